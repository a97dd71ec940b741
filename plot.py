r"""Figures from a run's log.

    python plot.py run runs/<name>        # writes runs/<name>/curves.png from metrics.jsonl

Returns task by task (lines: while training, with exploration noise; dots: evaluations without), the
normalised mean, both losses, and the share of replayed actions that the filter lets through, against
env steps.
"""

import json
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import matplotlib
import numpy as np
import tyro

matplotlib.use("Agg")  # files only: works without a display
import matplotlib.pyplot as plt

# Lines differ in shade and in dash, so that they can be told apart in greyscale, too.
STYLES = [("#0072b2", "-"), ("#d55e00", "--"), ("#009e73", ":"), ("#555555", "-.")]


@dataclass(frozen=True)
class Options:
    """Draw a figure."""

    what: Annotated[str, tyro.conf.Positional]  # run: the learning curves of one run
    folder: Annotated[str, tyro.conf.Positional]  # runs/<name>


def read_log(folder: str | Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """metrics.jsonl as {name: (env steps (n,), values (n,))}.

    Raises ValueError, one line, if there is no log or nothing in it yet.
    """
    path = Path(folder) / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"no log at {path}: give a run's folder, for example runs/my_run")
    points = defaultdict(list)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        for name, value in row.items():
            points[name].append((row["step"], value))
    if not points:
        raise ValueError(f"{path} is empty: the run has not logged anything yet")
    return {name: (np.array(p)[:, 0], np.array(p, dtype=float)[:, 1]) for name, p in points.items()}


def smooth(values: np.ndarray, window: int = 9) -> np.ndarray:
    """Running mean (n,) over up to `window` neighbours, shorter at the ends."""
    window = min(window, len(values))
    kernel = np.ones(window)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def plot_run(folder: str | Path, out: str | Path | None = None) -> Path:
    """Draw the learning curves of the run in `folder`; returns the path of the picture (default curves.png)."""
    log = read_log(folder)
    tasks = [name.removeprefix("return/") for name in log if name.startswith("return/")]
    families = defaultdict(list)
    for task in tasks:
        families[re.sub("(Easy|Medium|Hard)$", "", task)].append(task)
    for members in families.values():
        members.sort(key=lambda t: [t.endswith(d) for d in ("Hard", "Medium", "Easy")])
    panels = len(families) + 4
    columns = min(4, panels)
    rows = -(-panels // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4 * columns, 2.7 * rows), squeeze=False)
    axes = list(axes.flat)

    def draw(axis, name, label, style, dots=None, width=1.2):
        if name in log:
            steps, values = log[name]
            axis.plot(steps, smooth(values), color=style[0], linestyle=style[1], linewidth=width, label=label)
        if dots in log:
            axis.plot(*log[dots], "o", color=style[0], markersize=3, label=None if name in log else label)

    def finish(axis, title, label):
        axis.set_title(title, fontsize=9)
        axis.set_ylabel(label, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter())
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=6, frameon=False)

    for family, members in sorted(families.items()):
        axis = axes.pop(0)
        for task, style in zip(members, STYLES):
            draw(axis, f"return/{task}", task.removeprefix(family) or task, style, f"eval/return/{task}")
        finish(axis, family, "return")
    axis = axes.pop(0)
    draw(axis, "return_mean", "mean return", STYLES[3], "eval/return_mean")
    draw(axis, "", "normalised mean (0 random, 1 best)", STYLES[0], "eval/score_mean")
    finish(axis, "all tasks", "mean over tasks")
    for name in ("critic", "actor"):
        axis = axes.pop(0)
        draw(axis, f"loss/{name}", None, STYLES[0])
        finish(axis, f"{name} loss", "nats")
    axis = axes.pop(0)
    shares = sorted((n for n in log if n.startswith("filter/")), key=lambda n: float(n.split("/")[1]))
    for i, name in enumerate(shares):
        shade = 0.75 * (1 - i / max(1, len(shares) - 1))
        draw(axis, name, f"discount {name.split('/')[1]}", (str(shade), "-"))
    finish(axis, "replayed actions that pass the filter", "share")
    for axis in axes:
        axis.set_visible(False)
    figure.supxlabel("env steps", fontsize=9)
    figure.tight_layout()
    out = Path(out) if out else Path(folder) / "curves.png"
    figure.savefig(out, dpi=110)
    plt.close(figure)
    return out


def main(argv: list[str] | None = None) -> Path:
    """Draw what `argv` asks for; returns the path of the picture."""
    options = tyro.cli(Options, args=argv)
    if options.what != "run":
        raise ValueError(
            f"cannot draw '{options.what}'; to draw a run's curves type: python plot.py run runs/<name>"
        )
    return plot_run(options.folder)


if __name__ == "__main__":
    try:
        print(f"written: {main()}")
    except ValueError as error:
        sys.exit(f"error: {error}")
