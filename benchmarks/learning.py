r"""Seconds until two tasks are learned: the only speed that a user feels.

    python benchmarks/learning.py                         # three seeds, one after the other, up to 4 minutes each
    python benchmarks/learning.py --seeds 0 --precision bf16

Trains the README's example (RepeatFirstEasy and HigherLowerEasy, one attempt, laptop scale, one thread) and notes the
first evaluation in which both have been learned: mean returns of at least 0.8 and 0.4 over 20 rollouts of each.
The time is the run's own, evaluations included; then it is stopped.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
LEARNED = {"RepeatFirstEasy": 0.8, "HigherLowerEasy": 0.4}
LIMIT = 4.0  # minutes


def seconds_to_learn(seed: int, flags: list[str]) -> tuple[float | None, int]:
    """Train until both tasks are learned: seconds, or None after `LIMIT` minutes, and the updates made."""
    folder = ROOT / "runs" / f"learning_{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, ROOT / "train.py", "--tasks", ",".join(LEARNED), "--attempts", "1"]
    command += ["--scale", "laptop", "--minutes", str(LIMIT), "--seed", str(seed), "--name", folder.name]
    command += ["--eval_every", "0.08", "--eval_episodes", "20", *flags]
    log, row = folder / "metrics.jsonl", {}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        try:
            while run.poll() is None:
                time.sleep(0.2)
                lines = log.read_text().splitlines() if log.exists() else []
                for line in lines:
                    # The last line may still be being written.
                    row = json.loads(line) if line.endswith("}") else {}
                    if all(row.get(f"eval/return/{task}", -1) >= least for task, least in LEARNED.items()):
                        return 60 * row["minutes"], row["updates"]
        finally:
            run.terminate()
    if run.returncode not in (0, -15, 143):
        raise RuntimeError(f"the run failed with exit code {run.returncode}: {' '.join(map(str, command))}")
    return None, row.get("updates", 0)


def main(argv=None) -> list[float | None]:
    """Print the seconds of each seed and their median; further flags go to train.py."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2")
    arguments, flags = parser.parse_known_args(argv)
    found = []
    for seed in tqdm(arguments.seeds.split(","), desc="learning", disable=None):
        seconds, updates = seconds_to_learn(int(seed), flags)
        found.append(seconds)
        took = f"{seconds:.0f} s" if seconds else f"not within {LIMIT:g} minutes"
        print(f"seed {seed}: {took}, {updates} updates", flush=True)
    print(f"median: {statistics.median(s or float('inf') for s in found):.0f} s")
    return found


if __name__ == "__main__":
    main()
