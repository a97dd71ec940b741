r"""Launches, waits and memory of an update and of acting at every paper preset, counted on a pretend GPU.

    python benchmarks/launches.py                                 # two minutes; writes results/launches.csv
    python benchmarks/launches.py --presets popgym --variants ind_ind,dep_dep

Nothing is timed: pretend_gpu.py says what it can tell. A row has the launches of kernels, the times that the host
waits, the copies to the GPU that do not wait, and the most memory that is live at once, weights and optimizer included.
The rows called "graph" count a replayed CUDA graph as one launch.
"""

import argparse
import csv
import itertools
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import learner
from against import cut, window_lengths
from pretend_gpu import PretendGPU

from agent import Agent, Policy
from config import Config
from presets import COLUMNS, preset
from replay import Batch
from runtime import captured
from train import make_optimizer
from update import groups, update

VARIANTS = ("ind_ind", "dep_dep")
TASKS = 27
LAUNCH = 6e-6  # seconds that Python takes for a launch, about


def config_of(env: str, variant: str, **changes) -> Config:
    """The paper preset as a GPU with room for a whole batch runs it."""
    values = {"env": env, **preset(env, "paper", variant), "variant": variant, "precision": "bf16"}
    return Config(**values | {"chunk": 10**9, "steps_per_pass": 10**9} | changes)


def record_on(gpu: PretendGPU):
    """In place of `captured.record`: does the work once, uncounted; a replay is one launch."""

    def record(work, generator=None):
        before = gpu.by_name.copy(), gpu.waits_at.copy()
        result = work()
        gpu.by_name, gpu.waits_at = before
        return lambda: gpu.by_name.update(["graph"]), result

    return record


def counts(gpu: PretendGPU) -> dict:
    """What was counted since `gpu.reset()`."""
    return {"launches": gpu.launches, "waits": gpu.waits, "copies": gpu.copies, "gb": gpu.peak / 1e9}


def count_update(config: Config, batch: Batch, graph: bool, gpu: PretendGPU) -> dict:
    """Counts of one update, after one that made the optimizer's state."""
    agent = Agent(config, *learner.SIZES[config.env]).to("pretend")
    parts = (agent, *make_optimizer(agent, config))
    step = lambda batch: update(*parts, batch.to("pretend"), config, TASKS)
    if graph:
        step, batch = captured.CapturedUpdate(step, agent), captured.pad(batch, config.context)
        step(batch)
        step(batch)
    else:
        step(batch)
    gpu.reset()
    step(batch)
    return counts(gpu)


def observations(config: Config) -> dict:
    """One observation of each environment: zeros."""
    width, _, _, image_shape = learner.SIZES[config.env][:4]
    obs = {"vector": np.zeros((config.num_envs, width), np.float32)}
    if image_shape:
        obs["image"] = np.zeros((config.num_envs, *image_shape), np.uint8)
    return obs


def count_acting(config: Config, graph: bool, gpu: PretendGPU) -> dict:
    """Counts of one action of all environments."""
    agent = Agent(config, *learner.SIZES[config.env]).to("pretend")
    policy = (captured.CapturedPolicy if graph else Policy)(agent, config, config.num_envs)
    obs = observations(config)
    for _ in range(2):
        policy(obs)
    gpu.reset()
    policy(obs)
    return counts(gpu)


def rows(presets, variants) -> list[dict]:
    """A row for each preset, variant and kind of work."""
    table = []
    for env, variant in tqdm([*itertools.product(presets, variants)], desc="launches", disable=None):
        config = config_of(env, variant)
        batch = learner.make_batch(config)
        work = {"update, full windows": partial(count_update, config, batch, False)}
        if env == "popgym":
            real = cut(batch, window_lengths(config.batch_size, config.context))
            name = f"update, real lengths ({len(groups(real, config))} groups)"
            work[name] = partial(count_update, config, real, False)
        work["update, graph"] = partial(count_update, config, batch, True)
        work["acting"] = partial(count_acting, config, False)
        work["acting, graph"] = partial(count_acting, config, True)
        for name, count in work.items():  # a GPU of its own for each, so that the memory is its own
            with PretendGPU(numbers=False) as gpu, mock.patch.object(captured, "record", record_on(gpu)):
                table.append({"preset": env, "variant": variant, "work": name, **count(gpu)})
    return table


def main(argv=None) -> list[dict]:
    """Print the table, and write it as CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", default=",".join(COLUMNS))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "launches.csv")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.presets.split(",")) - set(COLUMNS):
        sys.exit(f"error: unknown preset {', '.join(unknown)}; there are {', '.join(COLUMNS)}")
    table = rows(arguments.presets.split(","), arguments.variants.split(","))
    print(
        f"{'preset':<22}{'variant':<10}{'work':<36}{'launches':>9}{'waits':>7}{'copies':>8}{'GB':>7}{'ms':>7}"
    )
    for row in table:
        milliseconds = 1e3 * LAUNCH * (row["launches"] + row["copies"])
        print(
            f"{row['preset']:<22}{row['variant']:<10}{row['work']:<36}{row['launches']:>9,}{row['waits']:>7}"
            f"{row['copies']:>8}{row['gb']:>7.2f}{milliseconds:>7.2f}"
        )
    with open(arguments.output, "w", newline="") as file:
        writer = csv.DictWriter(file, table[0])
        writer.writeheader()
        writer.writerows({**row, "gb": round(row["gb"], 3)} for row in table)
    print(f"ms: launches and copies at {1e6 * LAUNCH:g} microseconds each. Wrote {arguments.output}")
    return table


if __name__ == "__main__":
    main()
