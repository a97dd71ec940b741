r"""Play a trained policy and print its score, task by task.

    python evaluate.py runs/<name> --episodes 20            # the run's best weights
    python evaluate.py runs/<name>/checkpoint.pt --greedy   # any checkpoint; the mode instead of samples

For each task: the mean return (of the attempts that count) and its standard error, a random policy's
return, the best known or provable return (both measured: results/), and the score between the two. The
table is written beside the checkpoint as CSV.
"""

import csv
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from tqdm import tqdm

import checkpoint
from agent import env_arguments
from envs import make_env
from scores import format_table, load_bounds, score_rows
from train import evaluate, load, returns_of


@dataclass(frozen=True)
class Options:
    """Play a checkpoint without exploration noise."""

    run: Annotated[str, tyro.conf.Positional]  # a folder under runs/, or a checkpoint file in one
    episodes: int = 20  # rollouts of each task
    tasks: str | None = None  # comma-separated subset of the tasks that it was trained on
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


def main(argv: list[str] | None = None) -> list[dict]:
    """Evaluate as `argv` says (default: the program's own arguments); returns the table's rows."""
    options = tyro.cli(Options, args=argv)
    if options.episodes < 1:
        raise ValueError(f"--episodes must be at least 1, got {options.episodes}")
    path = find_checkpoint(options.run)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if options.device == "auto" else options.device
    policy = load(path, device=device)
    config, agent = policy.config, policy.agent
    tasks = make_env(**env_arguments(config)).tasks
    chosen = options.tasks.split(",") if options.tasks else tasks
    unknown = [task for task in chosen if task not in tasks]
    if unknown:
        raise ValueError(f"{path} was not trained on {', '.join(unknown)}; its tasks are {', '.join(tasks)}")
    print(
        f"{path}: {len(chosen)} tasks, {options.episodes} rollouts each, {'mode' if options.greedy else 'samples'}"
    )
    with tqdm(total=len(chosen) * options.episodes, unit="rollout", disable=None) as bar:
        rollouts = evaluate(
            agent, config, options.episodes, tasks=chosen, greedy=options.greedy, seed=options.seed, bar=bar
        )
    rows = score_rows(returns_of(rollouts), load_bounds(config.env))
    print(format_table(rows))
    out = Path(options.out) if options.out else path.parent / "evaluation.csv"
    with open(out, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print(f"written: {out}")
    return rows


if __name__ == "__main__":
    try:
        main()
    except (ValueError, checkpoint.CheckpointError) as error:
        sys.exit(f"error: {error}")
