r"""Kill a run at random times and resume it: does its log keep every row, once?

    python benchmarks/kills.py                  # twenty kills, some minutes; exit status 1 if a row was lost or doubled

What     a run at smoke scale saves a checkpoint about every second. SIGKILL ends it after a random time, and it is
         resumed, again and again. It then runs to its end, and so does a second run that is never killed
Lost     a row that a checkpoint covered, or that the undisturbed run has, is missing at the end
Doubled  two rows belong to one update
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from runtime import checkpoint

PROGRAM = "import pathlib, sys, train; train.ROOT = pathlib.Path(sys.argv[1]); train.main(sys.argv[2:])"
TIMES = ("minutes", "steps_per_second", "updates_per_second")


def start(folder: Path, flags: list[str]) -> subprocess.Popen:
    "Start the program, with its runs under `folder`."
    command = [sys.executable, "-c", PROGRAM, str(folder), *flags]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def rows_of(run: Path, size: int | None = None) -> list[str]:
    "Rows about training in the first `size` bytes of a log, without the columns that depend on time."
    path = run / "metrics.jsonl"
    lines = path.read_bytes()[:size].decode().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return [
        json.dumps({k: v for k, v in row.items() if k not in TIMES}) for row in rows if "loss/critic" in row
    ]


def main(argv=None) -> int:
    """Kill, resume and compare; returns 0 if nothing was lost or doubled."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the random times")
    parser.add_argument("--steps", type=int, default=250_000, help="env steps of the run")
    parser.add_argument(
        "--longest", type=float, default=3.0, help="seconds at most from a new row to the kill"
    )
    arguments = parser.parse_args(argv)
    times = random.Random(arguments.seed)
    flags = ["--scale", "smoke", "--device", "cpu", "--tasks", "RepeatFirstEasy,MineSweeperEasy"]
    flags += ["--steps", str(arguments.steps), "--log_every", "10"]
    flags += ["--eval_every", "0.1", "--eval_episodes", "1"]
    flags += ["--checkpoint_every", "0.015", "--final_episodes", "1"]
    with tempfile.TemporaryDirectory() as folder:
        folder, resumes, checkpointed, finished = Path(folder), 0, set(), 0
        run = folder / "runs" / "killed"
        process = start(folder, [*flags, "--name", "killed"])
        for kill in tqdm(range(arguments.kills), desc="kills", disable=None):
            resumed_from = len(rows_of(run))
            # Imports take seconds in which there is nothing to lose: wait for a new row first.
            while process.poll() is None and len(rows_of(run)) <= (resumed_from if kill else 0):
                time.sleep(0.02)
            time.sleep(times.uniform(0, arguments.longest))
            if process.poll() is not None:
                finished += 1
                print(process.stdout.read()[-2000:])
                break
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            if (run / "checkpoint.pt").exists():
                size = checkpoint.load(run / "checkpoint.pt")["log"]["bytes"]
                checkpointed |= set(rows_of(run, size))
            resumes += 1
            process = start(folder, ["--name", "killed", "--resume"])
        text, _ = process.communicate()
        if process.returncode or finished:
            print(text[-3000:], "the run ended before the last kill: raise --steps" if finished else "")
            return 1
        undisturbed = start(folder, [*flags, "--name", "whole"])
        undisturbed.communicate()
        rows, whole = rows_of(run), rows_of(folder / "runs" / "whole")
        lost = len((checkpointed | set(whole)) - set(rows))
        doubled = len(rows) - len({json.loads(row)["updates"] for row in rows})
        print(f"{len(rows)} rows, {len(whole)} in the undisturbed run, equal: {rows == whole}")
        print(f"{arguments.kills} kills, {resumes} resumes, {lost} rows lost, {doubled} rows doubled")
        return int(bool(lost or doubled or undisturbed.returncode))


if __name__ == "__main__":
    sys.exit(main())
