r"""Learning curves of one run, of several seeds, or of configurations side by side.

What     `plot_run`: all that one run has logged. `plot_groups`: one panel a task and one for all tasks together,
         with the runs that differ in nothing but their seed as one group
Why      one seed of one task says little: a reader wants to know how far the next seed would differ
Paper    Figure 7, most likely bins (centre) and filter (right). Interquartile mean and bootstrap intervals:
         Agarwal et al. 2021, "Deep RL at the Edge of the Statistical Precipice". The mean of the middle half
         moves less than a mean if a run solves one task at once, or never; it varies less than a median
Shapes   R runs of a group, K tasks, n points in time, N bins. A log is {name: (env steps (n,), values (n,))}
Notes    SciPy has both. The package of the paper's authors, rliable 1.2.0, computes the same mean and the same
         intervals, but needs four more packages, does not import beside pandas 3 (through arch 7.2), and draws
         resamples from numpy's global generator whatever seed it is given.
         Intervals over three seeds are too narrow. One run says nothing about other seeds: its interval is
         over tasks instead, and the figure says so
"""

import json
import os
import re
import textwrap
from collections import defaultdict
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from plots.style import DASHES, bin_map, bin_position, save, styled
from suites import BENCHMARKS, task_family
from suites.scores import load_bounds
from twohot import BinSupport

MARKERS = "os^Dv<>P"
# Runs of one group may differ in these fields. All others are choices, and a comparison is about choices.
NOT_A_CHOICE = ("seed", "name", "resume")
# Bootstrap resamples behind an interval. Its ends are then known to 2% of its width.
RESAMPLES = 2000
Log = dict[str, tuple[np.ndarray, np.ndarray]]


class Group(NamedTuple):
    """Runs of one configuration: a label, that configuration, and each run's log."""

    label: str
    config: dict
    logs: list[Log]


# ------------------------------------------------------------------------------------------- reading runs


def read_run(folder: str | Path) -> tuple[Log, dict]:
    """A run's log and its configuration.

    The log is metrics.jsonl as {name: (env steps (n,), values (n,), or (n, N) where a row holds a list of N)}.
    Raises ValueError, one line, if either file is missing or nothing has been logged yet.
    """
    folder, rows = Path(folder), []
    if all((folder / name).exists() for name in ("metrics.jsonl", "config.json")):
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        # A run in progress may have written half of its last line.
        rows = [json.loads(line) for line in lines if line.endswith("}")]
    if not rows:
        raise ValueError(f"no log at {folder} (metrics.jsonl, config.json): give a folder like runs/my_run")
    log = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        found = [(row["step"], row[name]) for row in rows if name in row]
        log[name] = np.array([step for step, _ in found]), np.array([value for _, value in found], float)
    return log, json.loads((folder / "config.json").read_text())


def differences(configs: list[dict]) -> str:
    """How configurations differ: "variant (ind_ind, dep_dep), layers (2, 3)"."""
    fields = dict.fromkeys(field for config in configs for field in config)
    given = {field: dict.fromkeys(str(c.get(field, "not given")) for c in configs) for field in fields}
    return ", ".join(f"{field} ({', '.join(values)})" for field, values in given.items() if len(values) > 1)


def read_groups(folders: list[str]) -> list[Group]:
    """The runs in `folders`, those that differ in `NOT_A_CHOICE` alone together, in the order given.

    A group's label is the beginning that its runs' names share. ValueError, one line, for a run without log
    or config.json, and for runs without a task in common.
    """
    members = defaultdict(dict)
    for folder in map(Path, folders):
        log, config = read_run(folder)
        given = (*NOT_A_CHOICE, "found", *config.get("found", ()))  # what a run found is no choice either
        config = {field: value for field, value in config.items() if field not in given}
        members[json.dumps(config, sort_keys=True)][folder] = log
    labels = [common_name(runs) for runs in members.values()]
    groups = []
    for label, (config, runs) in zip(labels, members.items()):
        # A label that is empty, or that two groups share, would tell nothing: then the folders do.
        if not label or labels.count(label) > 1:
            label = ", ".join(map(str, runs))
        label += f" ({len(runs)} runs)" if len(runs) > 1 else ""
        groups.append(Group(label, json.loads(config), list(runs.values())))
    if not tasks_of([log for group in groups for log in group.logs]):
        raise ValueError("these runs have no task in common: compare runs of one --env and --tasks")
    return groups


def common_name(folders) -> str:
    """The beginning that the names of runs' folders share, "" if there is none."""
    return os.path.commonprefix([Path(folder).name for folder in folders]).rstrip("_-. ")


def tasks_of(logs: list[Log]) -> list[str]:
    """The tasks whose returns every log has: by name, then from easy to hard."""
    names = [name.removeprefix("return/") for name in logs[0] if name.startswith("return/")]
    difficulty = lambda task: [task.endswith(word) for word in ("Hard", "Medium", "Easy")]
    shared = (task for task in names if all(f"return/{task}" in log for log in logs))
    return sorted(shared, key=lambda task: (task_family(task), difficulty(task)))


# ------------------------------------------------------------------------------- from logs to numbers


def smooth(values: np.ndarray, window: int = 9) -> np.ndarray:
    """Running mean (n,) over up to `window` neighbours, shorter at the ends."""
    kernel = np.ones(min(window, len(values)))
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def training_returns(logs: list[Log], tasks: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns while training, smoothed: 100 env steps (n,) that all runs have passed, values (R, K, n)."""
    runs = [[log[f"return/{task}"] for task in tasks] for log in logs]
    starts, ends = zip(*((steps[0], steps[-1]) for run in runs for steps, _ in run))
    steps_n = np.linspace(min(max(starts), min(ends)), min(ends), 100)
    # Every run logs at steps of its own, so values between two of its rows are interpolated.
    values_RKn = [[np.interp(steps_n, steps, smooth(values)) for steps, values in run] for run in runs]
    return steps_n, np.array(values_RKn)


def evaluated_returns(logs: list[Log], tasks: list[str]) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns of the evaluations: env steps (n,), values (R, K, n). None if a run has none of some task.

    The steps are those of the shortest run. Evaluations go by the clock, so other runs have theirs at other
    steps: their values are interpolated, and before the first or after the last one the nearest one counts.
    """
    if not all(f"eval/return/{task}" in log for log in logs for task in tasks):
        return None
    runs = [[log[f"eval/return/{task}"] for task in tasks] for log in logs]
    steps_n = min((run[0][0] for run in runs), key=lambda steps: steps[-1])
    return steps_n, np.array([[np.interp(steps_n, *curve) for curve in run] for run in runs])


def normalised(values_RKn: np.ndarray, tasks: list[str], config: dict) -> np.ndarray:
    """Returns (R, K, n) of tasks with known bounds as scores: 0 a random policy, 1 the best known."""
    bounds, free = load_bounds(config["env"]), BENCHMARKS[config["env"]].rules.free_attempts
    low, high = np.array([bounds[task] for task in tasks]).T[..., None]
    counted = 1 if free is None else config["attempts"] - free
    # score = (return - random) / (best - random), of one of the attempts that count
    return (values_RKn / counted - low) / (high - low)


def interquartile(score_RKn: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Interquartile mean over all runs and tasks, and its 95% bootstrap interval: three of (n,).

    Of several runs, each task's are resampled (with replacement, tasks kept): where would other seeds be? Of
    one run, tasks are: where would other tasks be? One run of one task has no interval: NaN, which
    Matplotlib does not draw.
    Source: Agarwal et al. 2021.
    """
    from scipy import stats  # here, because it is slow to import and not needed by a single curve

    iqm = lambda *samples, axis: stats.trim_mean(np.concatenate(samples, axis=axis), 0.25, axis=axis)
    if score_RKn.shape[:2] == (1, 1):
        return score_RKn[0, 0], *np.full((2, score_RKn.shape[-1]), np.nan)
    samples = list(score_RKn.swapaxes(0, 1)) if len(score_RKn) > 1 else [score_RKn[0]]
    found = stats.bootstrap(samples, iqm, n_resamples=RESAMPLES, batch=200, method="percentile", rng=0)
    return iqm(*samples, axis=0), *found.confidence_interval


def task_shares(log: Log, kind: str, most: int = 8) -> Log:
    """The log's share/<kind>/<task> as a log {label: (env steps (n,), share (n,))} of at most `most` labels.

    More than `most` tasks are added up by family, and of the families the first in the alphabet are taken, so
    that every panel has the same lines.
    """
    tasks = matching(log, rf"(share/{kind}/(.+))")
    # Added step by step, because a row lacks a task to which no state of its batches belonged.
    totals = defaultdict(lambda: defaultdict(float))
    for name, task in tasks.items():
        label = task if len(tasks) <= most else task_family(task)
        for step, value in zip(*log[name]):
            totals[label][step] += value
    return {label: tuple(np.array(sorted(totals[label].items())).T) for label in sorted(totals)[:most]}


# ------------------------------------------------------------------------------------------------- one run


@styled
def plot_run(folder: str | Path, out: str | Path | None = None) -> Path:
    """Draw the learning curves of the run in `folder`; returns the path of the picture (default curves.png)."""
    log, config = read_run(folder)
    actor, critic = config["variant"].split("_")
    scores = [log[name] for name in matching(log, "(eval/score/(.+))")]
    means = {"score_mean": "normalised mean (0 random, 1 best)", "return_mean": "mean return"}
    # Title, unit, log, and curves {name in the log: label}.
    panels = [("all tasks", "mean over tasks", log, means)]
    for family, tasks in groupby(tasks_of([log]), task_family):
        returns = {f"return/{task}": task.removeprefix(family) or task for task in tasks}
        panels.append((family, "return", log, returns))
    if success := matching(log, r"eval/(success (\d+)_mean)"):
        panels.append(("success by attempt, evaluations", "share of rollouts", log, success))
    unit = {"ind": "nats"}
    panels.append(("critic loss", unit.get(critic, "squared error (normalised)"), log, {"loss/critic": None}))
    panels.append(("actor loss", unit.get(actor, "-value (normalised)"), log, {"loss/actor": None}))
    panels.append(("actions that pass the filter, by discount", "share", log, matching(log, "(filter/(.+))")))
    for kind in ("states", "critic", "actor", "gradient"):
        shares = task_shares(log, kind)
        if len(shares) > 1:  # a single task has a share of 1 in everything
            panels.append((f"tasks' shares, {kind}", "share", shares, {task: task for task in shares}))
    # The last discount, with which the agent acts, and the first.
    discounts = list(matching(log, "(bins/(.+))"))
    bins = dict.fromkeys(discounts[-1:] + discounts[:1])

    figure, axes = panel_grid(len(panels) + len(bins))
    for axis, (title, unit, source, curves) in zip(axes, panels):
        draw_curves(axis, source, curves)
        axis.set(title=title, ylabel=unit)
    if len(scores) > 1:
        iqm_n, low_n, high_n = interquartile(np.array([[values for _, values in scores]]))
        axes[0].plot(scores[0][0], iqm_n, "s", label="interquartile mean,\n95% interval over tasks")
        axes[0].vlines(scores[0][0], low_n, high_n, color="0.5", linewidth=0.8)
    # All panels of shares have one y range, because a task's share is compared across them.
    shares = [axis for axis in axes if axis.get_title().startswith("tasks' shares")]
    top = max((line.get_ydata().max() for axis in shares for line in axis.get_lines()), default=0)
    for axis in shares:
        axis.set_ylim(0, 1.4 * top)  # the legend needs the upper part
    for name, axis in zip(bins, axes[len(panels) :]):
        draw_bins(axis, log, name, config)
    for axis in axes:
        if labels := axis.get_legend_handles_labels()[1]:
            axis.legend(ncols=1 if len(labels) <= 4 else 2)
    return save(figure, out or Path(folder) / "curves.png")


def matching(log: Log, pattern: str) -> dict[str, str]:
    """The log's names that match a regular expression with two groups, as {first group: second group}."""
    return {match[1]: match[2] for name in log if (match := re.fullmatch(pattern, name))}


def panel_grid(panels: int) -> tuple[Figure, list]:
    """A figure of so many panels over env steps, in up to four columns."""
    rows, columns = -(-panels // 4), min(4, panels)
    figure = Figure(figsize=(4 * columns, 2.6 * rows + 0.9))
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(panels)]
    for axis in axes:
        axis.xaxis.set_major_formatter(EngFormatter())
        axis.set_xlabel("env steps")
    return figure, axes


def draw_curves(axis, log: Log, curves: dict[str, str | None]) -> None:
    """The logged `curves` {name: label}: a smoothed line for each, and in its colour a dot for each evaluation."""
    for name, label in curves.items():
        color = None
        if name in log:
            (line,) = axis.plot(log[name][0], smooth(log[name][1]), label=label)
            color, label = line.get_color(), None
        if f"eval/{name}" in log:
            axis.plot(*log[f"eval/{name}"], "o", color=color, label=label)


def draw_bins(axis, log: Log, name: str, config: dict) -> None:
    """Heat map of the critic's most likely bins: how often each of N bins, against env steps.

    The log's `name` has shares (n, N) that sum to 1 over bins. Source: paper, Figure 7 (centre).
    """
    steps, share_nN = log[name]
    support = BinSupport(*(config[field] for field in ("bins", "bin_low", "bin_high", "symlog")))
    zero = bin_position(support, torch.tensor(0.0)).item()
    shown, scale = [*np.flatnonzero(share_nN.max(0) > 0), round(zero)], config["reward_scale"]
    # A row covers the env steps since the row before it.
    bin_map(axis, [0, *steps], share_nN, shown, support, scale, "share of states", pad=0.02)
    axis.axhline(zero, color="C1", linestyle="--", linewidth=0.8, label="return 0")
    axis.set(title=f"most likely bin, discount {name.removeprefix('bins/')}", ylabel="return")


# -------------------------------------------------------------------------------------------- several runs


@styled
def plot_groups(folders: list[str], out: str | Path | None = None, one_group: bool = False) -> Path:
    """Draw several runs, all tasks together and task by task; returns the path of the picture.

    Runs that differ in nothing but their seed and name are a group, drawn as a band. Prints each group's last
    evaluation. The picture goes beside the runs unless `out` is given. ValueError, one line, for runs that
    cannot be drawn together; with `one_group`, for runs that differ in more than their seed, too.
    """
    groups = read_groups(folders)
    different = differences([group.config for group in groups])
    if one_group and different:
        hint = f"to draw them side by side type: python plot.py compare {' '.join(folders)}"
        raise ValueError(f"these runs are not seeds of one configuration, they differ in {different}: {hint}")
    tasks = tasks_of([log for group in groups for log in group.logs])
    scored = all(set(tasks) <= set(load_bounds(group.config["env"])) for group in groups)
    figure, axes = panel_grid(1 + len(tasks))
    for g, group in enumerate(groups):
        draw_group(axes, group, tasks, scored, g)
    for axis, title in zip(axes, [f"interquartile mean, tasks: {len(tasks)}", *tasks]):
        axis.set(title=title, ylabel="return")
    axes[0].set_ylabel("score (0 random, 1 best)" if scored else "return, not normalised")
    title = f"different: {different}" if different else groups[0].label
    figure.suptitle(
        f"{textwrap.fill(title, 100)}\nlines: while training, with exploration noise; markers: evaluations without\n"
        "first panel: 95% bootstrap interval over runs (of a single run: over tasks); others: mean and range"
    )
    figure.legend(loc="outside lower center", ncols=3)
    name = common_name(folders) or "seeds" if one_group else "compare"
    return save(figure, out or Path(folders[0]).parent / f"{name}.png")


def draw_group(axes: list, group: Group, tasks: list[str], scored: bool, g: int) -> None:
    """The curves of group number `g` in all panels, the first for all tasks together.

    All tasks: interquartile mean and 95% bootstrap interval of the scores (of the returns, unless `scored`).
    A task: mean over runs, and the range from the lowest run to the highest. Prints the last evaluation.
    """
    color, dash, marker = f"C{g}", DASHES[g % len(DASHES)], MARKERS[g % len(MARKERS)]
    band, bars = partial(Axes.fill_between, alpha=0.2, linewidth=0), partial(Axes.vlines, linewidth=0.9)
    axes[0].plot([], [], color=color, linestyle=dash, marker=marker, label=group.label)  # for the legend
    for returns, look, draw_range in (
        (training_returns(group.logs, tasks), {"linestyle": dash}, band),
        (evaluated_returns(group.logs, tasks), {"linestyle": "", "marker": marker}, bars),
    ):
        if returns is None:
            return
        steps_n, values_RKn = returns
        all_tasks = interquartile(normalised(values_RKn, tasks, group.config) if scored else values_RKn)
        each_task = zip(values_RKn.mean(0), values_RKn.min(0), values_RKn.max(0))
        for axis, (middle_n, low_n, high_n) in zip(axes, [all_tasks, *each_task]):
            axis.plot(steps_n, middle_n, color=color, **look)
            draw_range(axis, steps_n, low_n, high_n, color=color)
    middle, low, high = (values_n[-1] for values_n in all_tasks)
    interval = "" if np.isnan(low) else f", 95% interval {low:.3f} to {high:.3f}"
    print(f"{group.label}: interquartile mean {middle:.3f}{interval}, evaluated at {steps_n[-1]:,.0f} steps")
