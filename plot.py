r"""Figures: learning curves, the attention of a policy, and the paper's figures on the scale of returns.

    python plot.py run runs/<name>              # writes runs/<name>/curves.png
    python plot.py run runs/a_0 runs/a_1        # seeds of one configuration, as a band: writes runs/a.png
    python plot.py compare runs/a runs/b        # configurations, each of one run or several: runs/compare.png
    python plot.py attention runs/<name>        # one rollout of the policy: writes runs/<name>/attention.png
    python plot.py scale                        # writes figures/scale.png
    python plot.py scales                       # writes figures/scales.png from results/scales.csv

run        Returns task by task (lines: while training, with exploration noise; dots: evaluations without),
           means over tasks, both losses, and the share of replayed actions that the filter lets through,
           against env steps. The critic's most likely bins (the paper's Figure 7, centre) and each task's share
           of the losses, where the log has them. Of several runs: returns by task as bands over seeds, and
           the interquartile mean of all tasks. (plots/runs.py)
compare    The same bands for several configurations. Runs that differ in nothing but their seed and name
           belong together. (plots/runs.py)
attention  The attention of each step of a rollout, the critic's bins, and actions with their advantages.
           (plots/attention.py)
scale      AMAGO-2's Figures 3 and 12, without training: the critic's loss against the relative error of its
           prediction, for targets over four orders of magnitude. (plots/scale.py)
scales     The paper's experiment on rescaled rewards (Figures 6 and 7): the four combinations of actor and
           critic loss, with the rewards of some tasks multiplied and without. (plots/scale.py)
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from config import find_run, import_modules, shown
from plots.attention import plot_attention
from plots.runs import plot_groups, plot_run
from plots.scale import plot_scale, plot_scales
from runtime.checkpoint import CheckpointError

USAGE = "python plot.py run runs/<name> ..., compare runs/<name> ..., attention runs/<name>, scale, scales"


@dataclass(frozen=True)
class Options:
    """Draw a figure."""

    figure: Annotated[str, tyro.conf.Positional]  # run, compare, attention, scale or scales
    # run, compare, attention: folders of runs | scales: the table, if not results/scales.csv | scale: the picture
    paths: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    task: str | None = None  # attention: the task to play; default: the run's first
    # attention: gym:MODULE:ID as in training, imports the module of your own environments
    env: str | None = None
    seed: int = 0  # attention: of the variant that is played, and of the actions drawn
    output: str | None = None  # the picture to write, instead of its usual place


def main(argv: list[str] | None = None) -> Path:
    """Draw the figure that `argv` asks for (default: the program's own arguments); returns the picture's path.

    ValueError, one line, for an unknown figure, a wrong number of paths, or runs that cannot be drawn.
    """
    options = tyro.cli(Options, args=argv)
    paths, out = options.paths, options.output
    import_modules(options.env)
    if options.figure in ("run", "compare", "attention"):  # names will do
        paths = tuple(str(find_run(path)) for path in paths)
    match options.figure, len(paths):
        case "run", 1:
            return plot_run(paths[0], out)
        case "run", count if count > 1:
            return plot_groups(paths, out, one_group=True)
        case "compare", count if count > 1:
            return plot_groups(paths, out)
        case "compare", 1:
            raise ValueError("compare takes two runs or more; for one type: python plot.py run " + paths[0])
        case "attention", 1:
            return plot_attention(paths[0], options.task, options.seed, out)
        case "scale", 0 | 1:
            return plot_scale(out or "".join(paths) or None)
        case "scales", 0 | 1:
            return plot_scales(*paths, out=out)
    raise ValueError(f"cannot draw '{' '.join([options.figure, *paths])}'. Type one of: {USAGE}")


if __name__ == "__main__":
    try:
        print(f"written: {shown(main())}")
    except (ValueError, OSError, CheckpointError) as error:
        sys.exit(f"error: {error}")
