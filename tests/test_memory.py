"""Memory that does not grow: benchmarks/memory.py, shortened, in a process that nothing else has filled."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# First the benchmark as it is; then with a leak of 125 kB a step, as if an environment kept its frames.
# The limit is 5% of all memory, of which PyTorch for CUDA takes 700 MB, and PyTorch for CPUs 220 MB.
CODE = """
import sys, plots.runs
sys.path.insert(0, "benchmarks")
import memory
plots.runs.plot_run = lambda folder: folder
kept = memory.main(["--steps", "4000", "--levels", "50"])
leak, collect = [], memory.train.collect
memory.train.collect = lambda run: (leak.append(b"x" * 500_000 + bytes(len(leak))), collect(run))
print("statuses", kept, memory.main(["--steps", "1600", "--levels", "0"]))
"""


def test_a_run_and_changes_of_level_do_not_grow_and_a_leak_is_told():
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.stdout.endswith("statuses 0 1\n"), done.stdout + done.stderr
