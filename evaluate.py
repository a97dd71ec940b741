r"""Play a trained policy and print its score, task by task.

    python evaluate.py runs/<name> --episodes 20            # the run's best weights
    python evaluate.py runs/<name>/checkpoint.pt --greedy   # any checkpoint; the mode instead of samples
    python evaluate.py runs/<name> --split test             # held-out tasks, levels, layouts and goals
    python evaluate.py runs/<name> --video rollouts.mp4     # and one rollout of each task to look at

For each task: the mean return (of the attempts that count) and its standard error, the returns that score
0 and 1 (results/), and the score between the two; then, where there are several attempts, the return of
each, and its success where the task tells: `solved` is the share of rollouts with success in two thirds of
their attempts. The table is written beside the checkpoint as CSV.
"""

import csv
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from tqdm import tqdm

import checkpoint
from envs import held_out_tasks, make_env
from scores import format_table
from train import evaluate, load, table_of
from wiring import evaluation_arguments


@dataclass(frozen=True)
class Options:
    """Play a checkpoint without exploration noise."""

    run: Annotated[str, tyro.conf.Positional]  # a folder under runs/, or a checkpoint file in one
    episodes: int = 20  # rollouts of each task
    split: Literal["train", "test"] = (
        "train"  # tasks, levels, layouts and goals it trained on, or held-out ones
    )
    tasks: str | None = None  # comma-separated subset of the split's tasks
    video: str | None = None  # write the first rollout of each task to this file: .mp4 or .gif
    greedy: bool = False  # the mode of the policy instead of a sample
    seed: int = 0  # of the variants that are played; training never sees these
    device: str = "auto"  # auto, cpu, cuda, ...
    out: str | None = None  # where to write the table; default: evaluation.csv beside the checkpoint


def find_checkpoint(run: str) -> Path:
    """The checkpoint that `run` names: a file, or the best (else the newest) one of a run's folder.

    Raises ValueError, naming the runs there are, if there is none.
    """
    path = Path(run)
    if path.is_file():
        return path
    for name in ("best.pt", "checkpoint.pt"):
        if (path / name).is_file():
            return path / name
    folder = path.parent if path.parent.is_dir() else Path("runs")
    known = sorted(str(p.parent) for p in folder.glob("*/*.pt"))
    have = (
        f"there are: {', '.join(dict.fromkeys(known))}" if known else f"nothing to evaluate in {folder}/ yet"
    )
    raise ValueError(f"no checkpoint at {run} ({have})")


def record(policy, env, tasks: list[str], out: Path, seed: int = 0, fps: int = 15) -> None:
    """Write one rollout of each task as a video to `out`, .mp4 or .gif, one after another.

    Pixels as the agent sees them, enlarged four times; other tasks as their `render` draws them. Raises
    ValueError for another ending, and for tasks of which there are no pictures.
    """
    import imageio.v2 as imageio  # here, because it is slow to import and seldom needed

    if out.suffix not in (".mp4", ".gif"):
        raise ValueError(f"--video writes .mp4 or .gif, not {out.name}")
    try:
        with imageio.get_writer(out, fps=fps) as writer:
            for task in tasks:
                obs, _ = env.reset(seed=10**9 + seed * 10**6, options={"task": task})
                policy.reset()
                done = False
                while not done:
                    frame = obs["image"].repeat(4, 0).repeat(4, 1) if isinstance(obs, dict) else env.render()
                    if frame is None:
                        raise ValueError(
                            f"{task} draws no pictures: --video is for pixels, Meta-World, BabyAI"
                        )
                    writer.append_data(frame)
                    obs, _, terminated, truncated, _ = env.step(policy(obs))
                    done = terminated or truncated
    except ValueError:
        out.unlink(missing_ok=True)  # what was begun of it cannot be played
        raise


def main(argv: list[str] | None = None) -> list[dict]:
    """Evaluate as `argv` says (default: the program's own arguments); returns the table's rows."""
    options = tyro.cli(Options, args=argv)
    if options.episodes < 1:
        raise ValueError(f"--episodes must be at least 1, got {options.episodes}")
    path = find_checkpoint(options.run)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    policy = load(path, device=device)
    config, agent = policy.config, policy.agent
    env = make_env(**evaluation_arguments(config, options.split))
    tasks = env.tasks
    chosen = options.tasks.split(",") if options.tasks else tasks
    unknown = [task for task in chosen if task not in tasks]
    if unknown:
        raise ValueError(f"{path} was not trained on {', '.join(unknown)}; its tasks are {', '.join(tasks)}")
    print(
        f"{path}: {len(chosen)} tasks, {options.episodes} rollouts each, {'mode' if options.greedy else 'samples'}"
    )
    with tqdm(total=len(chosen) * options.episodes, unit="rollout", disable=None) as bar:
        rollouts = evaluate(
            agent,
            config,
            options.episodes,
            tasks=chosen,
            split=options.split,
            greedy=options.greedy,
            seed=options.seed,
            bar=bar,
        )
    rows = table_of(rollouts, env, config)
    groups = None
    if options.split == "test":
        held_out = held_out_tasks(config.env, config.tasks)
        trained = [task for task in tasks if task not in held_out]
        groups = {"trained, unseen variants": trained, "held-out": held_out} if held_out else None
    print(format_table(rows, groups))
    out = Path(options.out) if options.out else path.parent / "evaluation.csv"
    with open(out, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(f"written: {out}")
    if options.video:
        record(
            load(path, device=device, greedy=options.greedy), env, chosen, Path(options.video), options.seed
        )
        print(f"written: {options.video}")
    return rows


if __name__ == "__main__":
    try:
        main()
    except (ValueError, checkpoint.CheckpointError) as error:
        sys.exit(f"error: {error}")
