r"""Learning curves of several runs: seeds as bands, one panel a task, and one number for all tasks together.

What     a run's log as arrays; runs that differ in nothing but their seed as one group; the curves of one
         group, or of several to be compared, on axes in env steps
Why      one seed of one task says little: what a reader asks is how far the next seed would differ
Paper    none. Interquartile mean and bootstrap intervals: Agarwal et al. 2021, "Deep RL at the Edge of the
         Statistical Precipice". The mean of the middle half: one task that a run solves at once, or never
         learns, moves it less than it moves a mean, and it varies less than a median
Shapes   R runs of a group, K tasks, n points in time
Notes    SciPy has both. The package of the paper's authors, rliable 1.2.0, computes the same mean and the same
         intervals, but brings four more packages along, does not import beside pandas 3 (its arch 7.2), and draws
         resamples from numpy's global generator whatever seed it is given.
         Three seeds resample to intervals that are rather too narrow. One run cannot tell about seeds at all:
         its interval is over tasks instead, and figures say so
"""

import functools
import json
import os
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

from suites import BENCHMARKS, task_family
from suites.scores import load_bounds

# Lines differ in shade and in dash, so that they can be told apart in greyscale, too (Wong's palette).
STYLES = [("#0072b2", "-"), ("#d55e00", "--"), ("#009e73", ":"), ("#555555", "-.")]
STYLES += [("#cc79a7", (0, (6, 1, 1, 1, 1, 1))), ("#e69f00", (0, (3, 1))), ("#56b4e9", (0, (8, 3)))]
STYLES += [("#000000", (0, (1, 2)))]
MARKERS = "os^Dv<>P"

# What two runs of one group may differ in. Everything else is a choice, and a comparison is about choices.
NOT_A_CHOICE = ("seed", "name", "resume")
RESAMPLES = (
    2000  # bootstrap resamples behind an interval: where its ends lie is then known to 2% of its width
)


class Group(NamedTuple):
    """Runs of one configuration: a label, that configuration, and each run's log as `read_log` returns it."""

    label: str
    config: dict
    logs: list[dict]


# ------------------------------------------------------------------------------------------- reading runs


def read_log(folder: str | Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """metrics.jsonl as {name: (env steps (n,), values (n,), or (n, N) where a row holds a list of N)}.

    Raises ValueError, one line, if there is no log or nothing in it yet.
    """
    path = Path(folder) / "metrics.jsonl"
    if not path.exists():
        raise ValueError(f"no log at {path}: give a run's folder, for example runs/my_run")
    points = defaultdict(list)
    # A run that goes on while it is drawn may have written half of its last line.
    for line in (line for line in path.read_text().splitlines() if line.endswith("}")):
        row = json.loads(line)
        for name, value in row.items():
            points[name].append((row["step"], value))
    if not points:
        raise ValueError(f"{path} is empty: the run has not logged anything yet")
    return {
        name: (np.array([step for step, _ in rows]), np.array([value for _, value in rows], dtype=float))
        for name, rows in points.items()
    }


def read_config(folder: str | Path) -> dict:
    """config.json of a run; {} if there is none, and labels then say less."""
    path = Path(folder) / "config.json"
    return json.loads(path.read_text()) if path.exists() else {}


def choices(config: dict) -> dict:
    """What of a configuration decides which group its run belongs to."""
    return {field: value for field, value in config.items() if field not in NOT_A_CHOICE}


def differences(configs: list[dict], most: int = 4) -> str:
    """In what configurations differ, and how: "variant (ind_ind, dep_dep), layers (2, 3)", and how many more."""
    fields = dict.fromkeys(field for config in configs for field in choices(config))
    found = {field: [str(config.get(field, "not said")) for config in configs] for field in fields}
    shown = [
        f"{field} ({', '.join(dict.fromkeys(values))})"
        for field, values in found.items()
        if len(set(values)) > 1
    ]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")


def read_groups(folders: list[str]) -> list[Group]:
    """The runs in `folders`, those that differ in `NOT_A_CHOICE` alone together, in the order given.

    A group is called by what its runs' names begin with. ValueError, one line, for a run without log or
    config.json, and for runs of different environments or without a task in common.
    """
    members = defaultdict(list)
    for folder in dict.fromkeys(map(Path, folders)):
        log, config = read_log(folder), read_config(folder)
        if not config:
            raise ValueError(f"no config.json in {folder}: it says which runs belong together")
        members[json.dumps(choices(config), sort_keys=True)].append((folder, config, log))
    labels = [os.path.commonprefix([run[0].name for run in runs]).rstrip("_-. ") for runs in members.values()]
    groups = []
    for label, runs in zip(labels, members.values()):
        # A beginning that groups share, or that is no name at all, tells nothing: then the folders do.
        if not label or labels.count(label) > 1:
            label = ", ".join(str(folder) for folder, _, _ in runs)
        label += f" ({len(runs)} runs)" if len(runs) > 1 else ""
        groups.append(Group(label, runs[0][1], [log for _, _, log in runs]))
    environments = list(dict.fromkeys(group.config.get("env", "not said") for group in groups))
    if len(environments) > 1:
        raise ValueError(
            f"a comparison is about one environment, and these runs are of --env {' and '.join(environments)}"
        )
    if not tasks_of(groups):
        raise ValueError("these runs have no task in common of which a return was logged: nothing to compare")
    return groups


def tasks_of(groups: list[Group]) -> list[str]:
    """The tasks of which every run of every group has logged a return: by name, then from easy to hard."""
    logs = [log for group in groups for log in group.logs]
    names = [name.removeprefix("return/") for name in logs[0] if name.startswith("return/")]
    difficulty = lambda task: [task.endswith(word) for word in ("Hard", "Medium", "Easy")]
    shared = (task for task in names if all(f"return/{task}" in log for log in logs))
    return sorted(shared, key=lambda task: (task_family(task), difficulty(task)))


# ------------------------------------------------------------------------------- from logs to numbers


def smooth(values: np.ndarray, window: int = 9) -> np.ndarray:
    """Running mean (n,) over up to `window` neighbours, shorter at the ends."""
    window = min(window, len(values))
    kernel = np.ones(window)
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def training_returns(logs: list[dict], tasks: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns while training, smoothed: 100 env steps (n,) that all runs have passed, values (R, K, n)."""
    runs = [[log[f"return/{task}"] for task in tasks] for log in logs]
    first = max(steps[0] for run in runs for steps, _ in run)
    last = min(steps[-1] for run in runs for steps, _ in run)
    steps_n = np.linspace(min(first, last), last, 100)
    # Runs log at steps of their own: between two of its rows, a run is taken to move along a line.
    return steps_n, np.array(
        [[np.interp(steps_n, steps, smooth(values)) for steps, values in run] for run in runs]
    )


def evaluated_returns(logs: list[dict], tasks: list[str]) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns of the evaluations: env steps (n,), values (R, K, n). None if a run has none of some task.

    The steps are those of the run that got least far. Evaluations go by the clock, so other runs have theirs
    elsewhere: they are interpolated there, and at an end the nearest one counts.
    """
    if not all(f"eval/return/{task}" in log for log in logs for task in tasks):
        return None
    runs = [[log[f"eval/return/{task}"] for task in tasks] for log in logs]
    steps_n = min((run[0][0] for run in runs), key=lambda steps: steps[-1])
    return steps_n, np.array([[np.interp(steps_n, *curve) for curve in run] for run in runs])


def normalised(values_RKn: np.ndarray, tasks: list[str], config: dict) -> np.ndarray | None:
    """Returns (R, K, n) as scores: 0 a random policy, 1 the best known. None where bounds are not known."""
    bounds = load_bounds(config["env"])
    if any(task not in bounds for task in tasks):
        return None
    low, high = np.array([bounds[task] for task in tasks]).T[..., None]
    attempts, benchmark = config["attempts"], BENCHMARKS.get(config["env"])
    free = benchmark.free_attempts if benchmark else None
    counted = attempts - (attempts - 1 if free is None else free)
    # score = (return - random) / (best - random), of one of the attempts that count
    return (values_RKn / counted - low) / (high - low)


def interquartile(score_RKn: np.ndarray) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Interquartile mean over all runs and tasks, and its 95% bootstrap interval: three of (n,).

    Of several runs, each task's are resampled (with replacement, tasks kept): where would other seeds be? Of
    one run, tasks are: where would other tasks be? One run of one task has no interval: None, None.
    Source: Agarwal et al. 2021.
    """
    from scipy import stats  # here, because it is slow to import and not needed by a single curve

    iqm = lambda *samples, axis: stats.trim_mean(np.concatenate(samples, axis=axis), 0.25, axis=axis)
    runs, tasks, _ = score_RKn.shape
    if runs * tasks == 1:
        return score_RKn[0, 0], None, None
    samples = [score_RKn[:, k] for k in range(tasks)] if runs > 1 else [score_RKn[0]]
    interval = stats.bootstrap(
        samples, iqm, n_resamples=RESAMPLES, batch=200, vectorized=True, method="percentile", rng=0
    ).confidence_interval
    return iqm(*samples, axis=0), interval.low, interval.high


# -------------------------------------------------------------------------------------------- drawing


def draw_groups(groups: list[Group], title: str) -> tuple[Figure, list[str]]:
    """The curves of one group or more, all tasks together and task by task; and a line of numbers a group.

    Lines: returns while training, with exploration noise; markers: evaluations without. All tasks:
    interquartile mean and 95% bootstrap interval of the scores (of the returns, where bounds are not known).
    A task: mean over runs, and the range from the lowest run to the highest.
    """
    tasks = tasks_of(groups)
    scored = all(task in load_bounds(groups[0].config["env"]) for task in tasks)
    panels = 1 + len(tasks)
    columns = min(7, max(2, round((1.5 * panels) ** 0.5)))
    rows = -(-panels // columns)
    figure = Figure(figsize=(max(7.0, 2.6 * columns), 2.3 * rows + 0.9), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    lines, handles = [], []
    for g, group in enumerate(groups):
        color, dash = STYLES[g % len(STYLES)]
        look = {"color": color, "linestyle": dash, "linewidth": 1.3}
        dots = {"color": color, "linestyle": "", "marker": MARKERS[g % len(MARKERS)], "markersize": 3.5}
        steps_n, values_RKn = training_returns(group.logs, tasks)
        evaluated = evaluated_returns(group.logs, tasks)
        handles.append(Line2D([], [], label=group.label, **dots | look))
        score = functools.partial(normalised, tasks=tasks, config=group.config) if scored else np.asarray
        iqm_n, low_n, high_n = interquartile(score(values_RKn))
        axes[0].plot(steps_n, iqm_n, **look)
        if low_n is not None:
            axes[0].fill_between(steps_n, low_n, high_n, color=color, alpha=0.2, linewidth=0)
        if evaluated:
            at_n, returns_RKn = evaluated
            iqm_n, low_n, high_n = interquartile(score(returns_RKn))
            axes[0].plot(at_n, iqm_n, **dots)
            interval = ""
            if low_n is not None:
                axes[0].vlines(at_n, low_n, high_n, color=color, linewidth=0.9)
                interval = f", 95% interval {low_n[-1]:.3f} to {high_n[-1]:.3f}"
            lines.append(
                f"{group.label}: interquartile mean {iqm_n[-1]:.3f}{interval}, evaluated at {at_n[-1]:,.0f} steps"
            )
        for k, axis in enumerate(axes[1:panels]):
            axis.plot(steps_n, values_RKn[:, k].mean(0), **look)
            if len(group.logs) > 1:
                band = (values_RKn[:, k].min(0), values_RKn[:, k].max(0))
                axis.fill_between(steps_n, *band, color=color, alpha=0.2, linewidth=0)
            if evaluated:
                axis.plot(at_n, returns_RKn[:, k].mean(0), **dots)
    for axis, name in zip(axes, ["", *tasks]):
        axis.set_title(name, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.xaxis.set_major_formatter(EngFormatter())
    axes[0].set_title(f"interquartile mean of {len(tasks)} tasks" if len(tasks) > 1 else tasks[0], fontsize=8)
    axes[0].set_ylabel("score (0 random, 1 best)" if scored else "return, not normalised", fontsize=8)
    axes[1].set_ylabel("return", fontsize=8)
    for axis in axes[panels:]:
        axis.set_visible(False)
    single = [len(group.logs) == 1 for group in groups]
    over = "tasks" if all(single) else "runs (of a single run: over tasks)" if any(single) else "runs"
    spread = "" if all(single) else "; tasks: mean and range over runs"
    none = all(single) and len(tasks) == 1
    figure.suptitle(
        f"{textwrap.fill(title, 100)}\nlines: while training, with exploration noise; markers: evaluations without"
        + ("" if none else f"\nfirst panel: 95% bootstrap interval over {over}{spread}"),
        fontsize=8,
    )
    for axis in axes[max(0, panels - columns) : panels]:
        axis.set_xlabel("env steps", fontsize=8)
    figure.legend(handles=handles, loc="outside lower center", ncols=min(3, len(groups)), fontsize=7)
    return figure, lines
