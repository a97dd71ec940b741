r"""What a checkpoint costs at the paper's size: seconds, bytes and memory, with a full replay of POPGym.

    python benchmarks/saving.py                 # about 5 minutes, some GB of disk under the system's temporary folder

What     a run at paper scale fills its replay with rollouts of random actions, then saves:
         all of it at once, as a first checkpoint would; then what is new after some more rollouts, as every later one;
         and is resumed. Peak memory is the process's, of which what a checkpoint adds to it is told apart
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
    "Collect that many with random actions: what is stored does not hang on the policy's quality."
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
            train.collect(run)
            bar.update(run.replay.total_added - end + trajectories - bar.n)
    run.policy = policy


def size_of(folder: Path) -> float:
    "GB of the checkpoint and its parts."
    return sum(path.stat().st_size for path in folder.rglob("*.pt")) / 1e9


def main(argv=None) -> list[tuple[str, float, float]]:
    """Measure and print; returns (what, seconds, GB written)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=15_000)
    parser.add_argument("--new", type=int, default=500, help="rollouts between two checkpoints")
    parser.add_argument("--scale", default="paper")
    arguments = parser.parse_args(argv)
    flags = ["--scale", arguments.scale, "--device", "cpu", "--name", "saving"]
    table = []
    with tempfile.TemporaryDirectory() as folder:
        train.ROOT = Path(folder)
        run = train.Run(parse(flags, train.ROOT))
        fill(run, arguments.trajectories)
        print(f"replay: {len(run.replay):,} trajectories, {run.replay.num_steps:,} env steps")
        print(f"memory before a checkpoint: {status('VmRSS'):.2f} GB")
        for what, new in (("all", 0), (f"{arguments.new} new", arguments.new), ("nothing new", 0)):
            if new:
                fill(run, new)
            before, start = size_of(run.folder), time.perf_counter()
            run.save()
            seconds = time.perf_counter() - start
            table.append((f"checkpoint, {what}", seconds, size_of(run.folder) - before))
        print(f"peak memory: {status('VmHWM'):.2f} GB")
        run.close()
        del run
        start = time.perf_counter()
        run = train.Run(parse([*flags, "--resume"], train.ROOT))
        table.append(("resume", time.perf_counter() - start, 0.0))
        print(f"resumed with {len(run.replay):,} trajectories")
        run.close()
    for what, seconds, size in table:
        print(f"{what:<24}{seconds:8.2f} s {size:+8.2f} GB on disk")
    return table


if __name__ == "__main__":
    main()
