r"""Cost of a checkpoint at the paper's size: seconds, bytes and memory, with a full replay of POPGym.

    python benchmarks/saving.py                 # about 5 minutes, some GB of disk under the system's temporary folder

What     a run at paper scale fills its replay with rollouts of random actions. It saves everything, as a first
         checkpoint does, then only what is new after some more rollouts, as every later one does, and is resumed.
         Peak memory is that of the process; the memory before a checkpoint is printed for comparison
"""

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import train
from config import parse


def status(name: str) -> float:
    "VmRSS or VmHWM of this process, GB."
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024 / 1e9


def fill(run, trajectories: int) -> None:
    "Collect that many rollouts with random actions: the cost of storing them does not depend on the policy."
    random, policy = np.random.default_rng(0), run.policy
    reset, actions, envs = policy.reset, run.agent.action_dim, run.config.num_envs

    class RandomPolicy:
        def __call__(self, obs):
            return random.integers(actions, size=envs)

        def reset(self, which):
            reset(which)

    run.policy, end = RandomPolicy(), run.replay.total_added + trajectories
    with tqdm(total=trajectories, desc="rollouts", disable=None) as bar:
        while run.replay.total_added < end:
            train.act(run)
            train.collect(run)
            bar.update(run.replay.total_added - end + trajectories - bar.n)
    run.policy = policy


def size_of(folder: Path) -> float:
    "GB of the checkpoint and its parts."
    return sum(path.stat().st_size for path in folder.rglob("*.pt")) / 1e9


def main(argv=None) -> list[tuple[str, float, float]]:
    """Measure and print; returns rows of (name, seconds, GB written)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=15_000)
    parser.add_argument("--new", type=int, default=500, help="rollouts between two checkpoints")
    parser.add_argument("--scale", default="paper")
    arguments = parser.parse_args(argv)
    flags = ["--scale", arguments.scale, "--device", "cpu", "--name", "saving"]
    table = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with train.Run(parse(flags, root), root) as run:
            train.set_up(run)
            fill(run, arguments.trajectories)
            print(f"replay: {len(run.replay):,} trajectories, {run.replay.num_steps:,} env steps")
            print(f"memory before a checkpoint: {status('VmRSS'):.2f} GB")
            for name, new in (("all", 0), (f"{arguments.new} new", arguments.new), ("nothing new", 0)):
                if new:
                    fill(run, new)
                before, start = size_of(run.folder), time.perf_counter()
                run.save()
                seconds = time.perf_counter() - start
                table.append((f"checkpoint, {name}", seconds, size_of(run.folder) - before))
            print(f"peak memory: {status('VmHWM'):.2f} GB")
        del run
        start = time.perf_counter()
        with train.Run(parse([*flags, "--resume"], root), root) as run:
            train.set_up(run)
            table.append(("resume", time.perf_counter() - start, 0.0))
            print(f"resumed with {len(run.replay):,} trajectories")
    for name, seconds, size in table:
        print(f"{name:<24}{seconds:8.2f} s {size:+8.2f} GB on disk")
    return table


if __name__ == "__main__":
    main()
