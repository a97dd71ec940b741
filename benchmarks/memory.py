r"""Does the memory of a run grow?

    python benchmarks/memory.py                 # 200,000 env steps at smoke scale; exit status 1 if it grows

Run      resident memory at the end is within 5% of that after a quarter of the steps, when the replay is full and
         every task has been played
Levels   1,000 changes of level in one Procgen task add less than 20 MB
"""

import argparse
import gc
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import train
from suites import make_env


def resident() -> int:
    "Bytes of this process that are in memory."
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def along_a_run(steps: int) -> list[tuple[int, int]]:
    """(env steps, resident bytes) after each quarter of a run of the program."""
    seen, collect = [], train.collect

    def watched(run):
        collect(run)
        if run.steps >= (len(seen) + 1) * steps // 4:
            seen.append((run.steps, resident()))

    with tempfile.TemporaryDirectory() as folder:
        root, train.ROOT, train.collect = train.ROOT, Path(folder), watched
        try:
            command = ["--scale", "smoke", "--device", "cpu", "--steps", str(steps), "--name", "memory"]
            train.main([*command, "--eval_every", "0.25", "--checkpoint_every", "0.25"])
        finally:
            train.ROOT, train.collect = root, collect
    return seen


def over_levels(changes: int) -> int:
    """Bytes that this process grows by over that many new levels of a Procgen task, after a tenth as many."""
    env = make_env("procgen-easy", "coinrun", attempts=1)
    for change in tqdm(range(changes + changes // 10), desc="levels", disable=None):
        if change == changes // 10:
            before = resident()
        env.reset(seed=change)
        for _ in range(3):
            env.step(0)
    grown = resident() - before
    env.close()
    return grown


def main(argv=None) -> int:
    """Measure and print both; returns 0 if both stay within their limits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--levels", type=int, default=1000)
    arguments = parser.parse_args(argv)
    sizes = along_a_run(arguments.steps)
    for steps, size in sizes:
        print(f"{steps:>9,} env steps: {size / 1e6:.1f} MB")
    growth = sizes[-1][1] / sizes[0][1] - 1
    print(f"growth after the first quarter: {growth:+.1%} (limit 5%)")
    levels = over_levels(arguments.levels) if arguments.levels else 0
    print(f"{arguments.levels:,} changes of a Procgen level: {levels / 1e6:+.1f} MB (limit 20 MB)")
    return int(growth > 0.05 or levels > 20e6)


if __name__ == "__main__":
    sys.exit(main())
