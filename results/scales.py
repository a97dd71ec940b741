r"""The paper's experiment with rescaled rewards (Figures 6 and 7) in miniature, on a CPU.

    make scales                            # or: python results/scales.py [--jobs 2] [--steps N] [--seeds 3]

Trains all four variants on the four tasks of `--env scales`, whose rewards are multiplied by 100, 1, 1 and
1/10, with three seeds each, and two variants (ind_ind, dep_dep) on the same tasks with their own rewards: 18
runs with one thread each, as many at a time as there are cores. After an interruption, run it again: finished
runs are kept, and others resume from their checkpoints. Writes results/scales.csv (a row for each run and
task), results/scales_shares.csv (each task's mean share of the losses, and the last standard deviation of
PopArt) and results/scales.txt (a table, commands, commit, minutes). `python plot.py scales` draws them.
"""

import argparse
import csv
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from suites.popgym import SCALES
from suites.scores import load_bounds

VARIANTS = ("ind_ind", "ind_dep", "dep_ind", "dep_dep")
SHARES = ("states", "critic", "actor", "gradient")


def all_runs(seeds: int) -> list[tuple[str, bool, int]]:
    """(variant, scaled, seed) of every run. Seed by seed, so that one seed of each variant finishes early."""
    return [
        (variant, scaled, seed)
        for seed in range(seeds)
        for variant, scaled in [*itertools.product(VARIANTS, [True]), ("ind_ind", False), ("dep_dep", False)]
    ]


def name_of(variant: str, scaled: bool, seed: int) -> str:
    "The name of a run's folder in runs/."
    return f"scales_{variant}_{'scaled' if scaled else 'control'}_{seed}"


def fresh_command(variant: str, scaled: bool, seed: int, steps: int, extra: list[str]) -> list[str]:
    """The command line of a new run, without `python`."""
    name = name_of(variant, scaled, seed)
    tasks = (
        ["--env", "scales"] if scaled else ["--env", "popgym", "--tasks", ",".join(SCALES), "--attempts", "1"]
    )
    command = ["train.py", *tasks, "--variant", variant, "--seed", str(seed), "--scale", "laptop"]
    command += ["--steps", str(steps), "--minutes", "None", "--final_episodes", "50", "--name", name, *extra]
    return command


def command_of(run: tuple[str, bool, int], steps: int, extra: list[str]) -> list[str]:
    """The command line that resumes a run from its checkpoint or, without one, starts it."""
    folder = ROOT / "runs" / name_of(*run)
    if (folder / "checkpoint.pt").exists():
        return ["train.py", "--name", folder.name, "--resume"]
    if folder.exists():  # stopped before its first checkpoint: start again
        shutil.rmtree(folder)
    return fresh_command(*run, steps, extra)


def finished(run: tuple[str, bool, int]) -> bool:
    "Whether a run has written its table, which comes last."
    return (ROOT / "runs" / name_of(*run) / "table.txt").exists()


def train_all(runs: list, jobs: int, steps: int, extra: list[str]) -> None:
    """Run the unfinished runs, `jobs` at a time. RuntimeError, with the end of its output, if a run fails."""
    waiting, active = [run for run in runs if not finished(run)], {}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tqdm(total=len(runs), initial=len(runs) - len(waiting), unit="run") as bar:
        try:
            while waiting or active:
                while waiting and len(active) < jobs:
                    run = waiting.pop(0)
                    command = command_of(run, steps, extra)
                    log = (ROOT / "runs" / f"{name_of(*run)}.log").open("a+")
                    process = subprocess.Popen(
                        [sys.executable, *command], cwd=ROOT, stdout=log, stderr=log, env=environment
                    )
                    active[run] = (process, log)
                    bar.set_description(", ".join(name_of(*run) for run in active))
                time.sleep(1)
                for run, (process, log) in list(active.items()):
                    if process.poll() is None:
                        continue
                    if process.returncode:
                        log.seek(0)
                        raise RuntimeError(f"{name_of(*run)} failed:\n{log.read()[-2000:]}")
                    log.close()
                    del active[run]
                    bar.update()
        finally:  # on Ctrl-C the children, which received it too, save a checkpoint and exit
            for process, _ in active.values():
                process.terminate()
            for process, _ in active.values():
                process.wait()


def collect(runs: list) -> tuple[list[dict], list[dict], list[float]]:
    """Rows of the two tables from the runs' logs, and the minutes of each run."""
    rows, shares, minutes, bounds = [], [], [], load_bounds("scales")
    for variant, scaled, seed in runs:
        folder = ROOT / "runs" / name_of(variant, scaled, seed)
        log = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        last = [row for row in log if "eval/return_mean" in row][-1]
        trained = [row for row in log if "loss/critic" in row]
        minutes.append(last["minutes"])
        key = {"variant": variant, "scaled": int(scaled), "seed": seed}
        for task, factor in SCALES.items():
            low, high = bounds[task]
            value = last[f"eval/return/{task}"]
            row = {"task": task, "factor": factor if scaled else 1.0, "return": value}
            rows.append(key | row | {"normalised": (value - low) / (high - low)})
            mean = {s: float(np.mean([row[f"share/{s}/{task}"] for row in trained])) for s in SHARES}
            shares.append(key | {"task": task} | mean | {"popart_sigma": trained[-1]["popart/sigma"]})
    return rows, shares, minutes


def write(path: Path, rows: list[dict]) -> None:
    "Write rows as CSV, with four decimal places."
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.4f}" if isinstance(v, float) else v for k, v in row.items()})


def format_table(rows: list[dict]) -> str:
    """A table of normalised returns by variant and task: mean over seeds (lowest to highest)."""
    groups = dict.fromkeys((row["variant"], row["scaled"]) for row in rows)
    # Columns are as wide as the longest task, and "0.98 (0.97 to 0.98)" fits in all of them.
    width = max(len(task) for task in SCALES) + 8
    header = "".join(f"{f'{task} x{factor:g}':>{width}}" for task, factor in SCALES.items())
    lines = [f"{'variant, rewards':<18}{header}{'mean':>{width}}"]
    for variant, scaled in groups:
        mine = [row for row in rows if (row["variant"], row["scaled"]) == (variant, scaled)]
        columns = [[row["normalised"] for row in mine if row["task"] == task] for task in SCALES]
        means = np.mean(columns, axis=0)  # of each seed
        cells = [f"{np.mean(c):.2f} ({min(c):.2f} to {max(c):.2f})" for c in [*columns, means]]
        label = f"{variant} {'scaled' if scaled else 'control'}"
        lines.append(f"{label:<18}" + "".join(f"{cell:>{width}}" for cell in cells))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Train all runs and write the tables."""
    parser = argparse.ArgumentParser(description="The rescaled-rewards experiment: 18 runs.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time, one core each")
    parser.add_argument("--steps", type=int, default=1_000_000, help="env steps of each run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    options, extra = parser.parse_known_args(argv)
    runs = all_runs(options.seeds)
    (ROOT / "runs").mkdir(exist_ok=True)
    train_all(runs, options.jobs, options.steps, extra)
    rows, shares, minutes = collect(runs)
    write(options.out / "scales.csv", rows)
    write(options.out / "scales_shares.csv", shares)
    versions = [json.loads((ROOT / "runs" / name_of(*run) / "versions.json").read_text()) for run in runs]
    about = sorted({f"{v['commit']}; torch {v['torch']}, {v['machine']}" for v in versions})
    text = "\n".join(
        [
            f"command: make scales   ({options.jobs} runs at a time, {options.steps:,} env steps each)",
            "one run: python " + " ".join(fresh_command(*runs[0], options.steps, extra)),
            f"commit:  {' | '.join(about)}",
            f"minutes: {sum(minutes):.0f} of all runs added up, {min(minutes):.1f} to {max(minutes):.1f} a run",
            "",
            f"After training, 50 rollouts of each task; 0 random, 1 best; mean of {options.seeds} seeds (range).",
            "",
            format_table(rows),
        ]
    )
    (options.out / "scales.txt").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped: the same command goes on from here")
