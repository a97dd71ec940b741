r"""What an update costs, in time, arithmetic and memory, as each size grows; and what the paper's runs would cost.

    python benchmarks/scaling.py               # about 10 minutes on 2 cores; writes results/scaling.csv and .txt

What     one size at a time is moved away from a base (POPGym's column of Tables 1 and 2 at 4 windows of 256 steps);
         each case is timed in turn with the base, so that another program's load falls on both. Policies: 0.5 nats
Paper    for each column of the tables: GFLOP of an update, counted by PyTorch for one window and multiplied by the
         windows (attention included, by its formula); updates of the whole run, one per 12 env steps; hours on a
         GPU at the stated share of its peak; memory by the trainer's own estimate
"""

import argparse
import csv
import gc
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.append(str(ROOT / "benchmarks"))

import learner

from config import prepare_torch
from presets import COLUMNS, preset
from runtime.memory import learner_bytes

BASE = {"batch_size": 4, "context": 256}
SWEEPS = {
    "context": (128, 256, 512, 1024, 2048),
    "batch_size": (2, 4, 8, 16),
    "bins": (32, 64, 128, 256),
    "gammas": (1, 3, 7, 14),
    "critics": (2, 4, 8),
    "action_samples": (1, 3, 8),
    "d_model": (128, 256, 512),
}
# name -> peak bf16 TFLOP/s without sparsity, GB of memory | NVIDIA's data sheets
GPUS = {"H200": (989, 141), "RTX 4090": (165, 24)}
SHARE = 0.2  # of that peak: an assumption, nothing here was run on a GPU


def case_of(field: str, value) -> str:
    """Name the shape in which `field` has `value`, and make learner.py know it."""
    if field == "gammas":
        changes = {"gammas": tuple(1 - 0.9 * 0.6**i for i in range(value))}
    elif field == "d_model":
        changes = {"d_model": value, "d_ff": 4 * value}
    else:
        changes = {field: value}
    name = f"{field} {value}"
    learner.SHAPES[name] = ("popgym", "paper", BASE | changes)
    return name


def attention_flops(config) -> float:
    "Forward and backward of causal attention: half of the full products, five of them backward for two forward."
    return 7 * config.layers * config.batch_size * (config.context + 1) ** 2 * config.d_model


def peak_memory(field: str, value, threads: int) -> float:
    "Peak memory of one update in a process of its own, bytes."
    command = [sys.executable, __file__, "--memory_of", field, str(value), "--threads", str(threads)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def measure(field: str, value, base, repeats: int) -> dict:
    """One row: seconds, arithmetic and memory of a case, and its time over the base's."""
    name = case_of(field, value)
    work, config = learner.make_learner(name, "float32", 0.5, "cpu")
    with FlopCounterMode(display=False) as counter:
        work()
    times, base_times = [], []
    for _ in range(repeats):
        times.append(learner.seconds_of(work, "cpu"))
        base_times.append(learner.seconds_of(base, "cpu"))
    del work
    gc.collect()
    seconds = statistics.median(times)
    return {
        "field": field,
        "value": value,
        "seconds": seconds,
        "over_base": seconds / statistics.median(base_times),
        "gflop": (counter.get_total_flops() + attention_flops(config)) / 1e9,
        "peak_gb": peak_memory(field, value, torch.get_num_threads()) / 1e9,
    }


def paper_rows() -> list[dict]:
    """What each of the paper's columns costs: arithmetic of an update, updates, hours on each of `GPUS`."""
    table = []
    for name in tqdm(COLUMNS, desc="paper", disable=None):
        values = preset(name)
        learner.SHAPES["one window"] = (name, "paper", {"batch_size": 1})
        work, config = learner.make_learner("one window", "float32", 0.5, "cpu")
        with FlopCounterMode(display=False) as counter:
            work()
        flops = (counter.get_total_flops() + attention_flops(config)) * values["batch_size"]
        updates = values["steps"] / values["env_steps_per_update"]
        learner.SHAPES["whole batch"] = (name, "paper", {})
        observation_dim, _, _, image_shape, _ = learner.SIZES[name]
        memory = learner_bytes(learner.config_of("whole batch"), observation_dim, image_shape)
        row = {"column": name, "gflop": flops / 1e9, "updates": updates, "gb": memory / 1e9}
        for gpu, (peak, _) in GPUS.items():
            row[f"hours {gpu}"] = flops * updates / (peak * 1e12 * SHARE) / 3600
        table.append(row)
    return table


def main(argv=None) -> list[dict]:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--fields", default=",".join(SWEEPS))
    parser.add_argument("--no_paper", action="store_true")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "scaling")
    parser.add_argument("--memory_of", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    prepare_torch(arguments.threads)
    if arguments.memory_of:
        field, value = arguments.memory_of
        learner.make_learner(case_of(field, int(value)), "float32", 0.5, "cpu")[0]()
        print(learner.peak_resident())
        return []
    base, _ = learner.make_learner(case_of("batch_size", 4), "float32", 0.5, "cpu")
    base()
    cases = [(field, value) for field in arguments.fields.split(",") for value in SWEEPS[field]]
    rows = [
        measure(field, value, base, arguments.repeats)
        for field, value in tqdm(cases, desc="scaling", disable=None)
    ]
    lines = [f"{'':<16}{'value':>8}{'seconds':>10}{'x base':>8}{'GFLOP':>9}{'peak GB':>9}"]
    lines += [
        f"{row['field']:<16}{row['value']:>8}{row['seconds']:>10.3f}{row['over_base']:>8.2f}{row['gflop']:>9.1f}"
        f"{row['peak_gb']:>9.2f}"
        for row in rows
    ]
    if not arguments.no_paper:
        lines += [
            "",
            f"{'':<22}{'GFLOP':>10}{'updates':>14}{'GB':>7}" + "".join(f"{'h ' + gpu:>14}" for gpu in GPUS),
        ]
        for row in paper_rows():
            hours = "".join(f"{row[f'hours {gpu}']:>14,.0f}" for gpu in GPUS)
            lines.append(
                f"{row['column']:<22}{row['gflop']:>10,.0f}{row['updates']:>14,.0f}{row['gb']:>7.1f}{hours}"
            )
        lines.append(
            f"hours: of the learner alone, at an assumed {SHARE:.0%} of the peak in bf16; GB: of one pass, the policy's memory included"
        )
    print("\n".join(lines))
    arguments.output.with_suffix(".txt").write_text("\n".join(lines) + "\n")
    with arguments.output.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return rows


if __name__ == "__main__":
    main()
