r"""How long an update takes, against another checkout of this repository, measured in turn.

    git worktree add ../before 8ee70d4
    python benchmarks/against.py ../before --shapes laptop,popgym-paper

For each shape of learner.py and two batches, of full windows and of windows as long as POPGym's rollouts of random
actions: median seconds of an update here and there, and their ratio. Each checkout runs in a process of its own, from
the same weights and batch; the two take turns. Prints the loss of the first update of each, which should agree.
"""

import argparse
import importlib
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def window_lengths(count: int, longest: int, seed: int = 0) -> list[int]:
    """Lengths of `count` POPGym rollouts of random actions, at most `longest`, longest first."""
    from suites import make_env  # here, because the other checkout's processes do not need it

    env, lengths = make_env("popgym"), []
    env.action_space.seed(seed)
    for i in range(count):
        env.reset(seed=seed + i)
        over, info = False, {}
        while not over:
            _, _, terminated, truncated, info = env.step(env.action_space.sample())
            over = terminated or truncated
        lengths.append(min(info["length"], longest))
    return sorted(lengths, reverse=True)


def cut(batch, lengths: list[int]):
    """A batch of full windows, cut to `lengths`, longest first; it may be another checkout's, with fewer fields."""
    import torch  # here, because a process that only compares does without

    steps, states = max(lengths), sum(lengths)
    mask_BT = torch.arange(steps) < torch.tensor(lengths)[:, None]
    fields = {"mask_BT": mask_BT, "real_S": mask_BT.flatten().nonzero()[:, 0], "lengths": tuple(lengths)}
    fields["weight_S"] = torch.full((states,), 1 / states)
    for name in ("obs_BTO", "time_BT", "image_BT", "action_BT", "reward_BT", "done_BT"):
        if (whole := getattr(batch, name)) is not None:
            fields[name] = whole[:, : steps + (name in ("obs_BTO", "time_BT", "image_BT"))]
    return batch._replace(**{name: x for name, x in fields.items() if name in batch._fields})


def serve(root: Path, shape: str, precision: str, threads: int, lengths: list[int] | None) -> None:
    """Make the learner of the checkout at `root`; print its first loss, then the seconds of an update for each line."""
    sys.path[:0] = [str(root), str(root / "benchmarks")]
    import torch

    learner, train = importlib.import_module("learner"), importlib.import_module("train")
    update = importlib.import_module("update" if (root / "update.py").exists() else "train").update
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = learner.config_of(shape, precision)
    agent = importlib.import_module("agent").Agent(config, *learner.SIZES[config.env])
    batch = learner.make_batch(config, agent if agent.discrete else None)
    batch = cut(batch, lengths) if lengths else batch
    steps_of = train.make_optimizer(agent, config)
    print(float(update(agent, *steps_of, batch, config)["loss/critic"].detach()), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        update(agent, *steps_of, batch, config)
        print(time.perf_counter() - start, flush=True)


def compare(other: Path, shape: str, precision: str, threads: int, lengths, repeats: int) -> str:
    """A line with the seconds of both checkouts, and their ratio."""
    workers = []
    for root in (other, ROOT):
        job = json.dumps([str(root.resolve()), shape, precision, threads, lengths])
        command = [sys.executable, __file__, str(root), "--job", job]
        pipes = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.DEVNULL,
            "text": True,
        }
        workers.append(subprocess.Popen(command, **pipes))
    losses, seconds = [float(worker.stdout.readline()) for worker in workers], ([], [])
    for turn in range(repeats):
        for i in (0, 1) if turn % 2 else (1, 0):
            print("go", file=workers[i].stdin, flush=True)
            seconds[i].append(float(workers[i].stdout.readline()))
    for worker in workers:
        worker.communicate()
    there, here = map(statistics.median, seconds)
    batch = "real lengths" if lengths else "full windows"
    case = f"{shape:<20}{batch:<14}{precision:<9}threads {threads}"
    return f"{case}  there {there:8.4f} s  here {here:8.4f} s  ratio {here / there:.2f}  losses {losses[0]:.4f} {losses[1]:.4f}"


def main(argv=None) -> None:
    """Print a line for each shape and batch that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--shapes", default="laptop,small,continuous-cpu,pixels-cpu,popgym-paper")
    parser.add_argument("--precision", default="float32", choices=("float32", "bf16"))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.job:
        root, *job = json.loads(arguments.job)
        return serve(Path(root), *job)
    if not (arguments.other / "benchmarks" / "learner.py").exists():
        sys.exit(
            f"error: {arguments.other} is no checkout of this repository: git worktree add ../before COMMIT"
        )
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    learner = importlib.import_module("learner")
    for shape, real in itertools.product(arguments.shapes.split(","), (False, True)):
        config = learner.config_of(shape)
        lengths = window_lengths(config.batch_size, config.context) if real else None
        threads = 1 if shape == "laptop" else 2
        repeats = min(3, arguments.repeats) if shape.endswith("paper") else arguments.repeats
        print(compare(arguments.other, shape, arguments.precision, threads, lengths, repeats), flush=True)
    return None


if __name__ == "__main__":
    main()
