r"""Figures: a lesson drawn from twohot.py, a run's log, and the comparison under rescaled rewards.

    python plot.py scale                        # writes figures/scale.png: critic losses against return scales
    python plot.py run runs/<name>              # writes runs/<name>/curves.png from metrics.jsonl
    python plot.py run runs/a runs/b runs/c     # several seeds of one thing, as bands: runs/<what their names share>.png
    python plot.py compare runs/a runs/b        # two things or more, each of one run or several: runs/compare.png
    python plot.py attention runs/<name>        # one rollout: writes runs/<name>/attention.png (attention.py)
    python plot.py scales                       # writes figures/scales.png from results/scales.csv

scale    AMAGO-2's Figures 3 and 12, without training: the critic's loss against the relative error of
         its prediction, for targets over four orders of magnitude.
run      Returns task by task (lines: while training, with exploration noise; dots: evaluations
         without), the normalised mean, both losses, and the share of replayed actions that the filter
         lets through, against env steps. Where the log has them: the critic's most likely bins (the
         paper's Figure 7, centre) and each task's share of the losses.
         Of several runs: returns by task as bands over seeds, and the interquartile mean of all tasks.
compare  The same for runs of several configurations, in one figure; runs that differ in nothing but their
         seed (and name) belong together.
attention  What one rollout's steps attended to, the critic's bins, and actions with their advantages.
scales   The paper's experiment on rescaled rewards (Figures 6 and 7): the four combinations of actor
         and critic loss, with the rewards of some tasks multiplied and without.

Shapes   Y targets, E relative errors, N bins, n logged rows
"""

import csv
import os
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import matplotlib
import numpy as np
import torch
import tyro

from plots.curves import (
    STYLES,
    differences,
    draw_groups,
    interquartile,
    read_config,
    read_groups,
    read_log,
    smooth,
)
from runtime.checkpoint import CheckpointError
from suites import task_family
from twohot import BinSupport, cross_entropy, symexp, twohot_loss

matplotlib.use("Agg")  # files only: works without a display
import matplotlib.pyplot as plt

VARIANTS = ["ind_ind", "ind_dep", "dep_ind", "dep_dep"]  # actor first, as in the paper's Figure 4

# Bins, lower limit, upper limit, symlog, HL-Gauss labels. The text of the paper does not say how many bins
# its Figure 12 has; 64 is its own choice in POPGym (Table 2), 128 twice as fine.
CLASSIFIERS = {
    "two-hot, wide limits, symlog, 64 bins": (64, -1e5, 1e5, True, False),
    "two-hot, wide limits, symlog, 128 bins": (128, -1e5, 1e5, True, False),
    "HL-Gauss, wide limits, symlog, 128 bins": (128, -1e5, 1e5, True, True),
    "two-hot, tuned limits, symlog, 64 bins": (64, -100.0, 15_000.0, True, False),
    "two-hot, tuned limits, no symlog, 64 bins": (64, -100.0, 15_000.0, False, False),
}
TARGETS = (1.0, 10.0, 100.0, 1_000.0, 10_000.0)


@dataclass(frozen=True)
class Options:
    """Draw a figure."""

    what: Annotated[str, tyro.conf.Positional]  # scale, run, compare, attention or scales
    # run, compare, attention: folders of runs | scales: the table, if not results/scales.csv | scale: the picture
    paths: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    task: str | None = None  # attention: the task to play; default: the run's first
    seed: int = 0  # attention: of the variant that is played, and of the actions drawn
    output: str | None = None  # the picture to write, if not where it usually goes


def scale_losses(target_Y: np.ndarray, error_E: np.ndarray) -> dict[str, np.ndarray]:
    """Critic losses (Y, E) by name: targets (Y,), predictions off by the relative errors (E,).

    An error of -0.5 is a prediction of half the target. Squared error is the paper's Eq. 1, the others
    its Eq. 3. Two two-hots without a common bin have an infinite cross-entropy, and a network's softmax
    always has some width: a prediction is a Gaussian around the predicted value in the bins' space, with
    a standard deviation of 0.75 bins (`hlgauss_labels`). Source: paper, Figures 3 and 12.
    """
    target = torch.as_tensor(np.asarray(target_Y), dtype=torch.float64).unsqueeze(-1)
    prediction = target * (1 + torch.as_tensor(np.asarray(error_E), dtype=torch.float64))
    # Eq. 1:  L = (Q(h,a) - y)^2
    losses = {"squared error": ((prediction - target) ** 2).numpy()}
    for name, (bins, low, high, use_symlog, gaussian) in CLASSIFIERS.items():
        support = BinSupport(bins, low, high, use_symlog).double()
        # Far from its centre the Gaussian is a difference of two numbers near 1, which float64 resolves
        # to 1e-16. No bin gets less than 1e-12: every error, however large, has a finite loss (at most
        # 27.6 nats), and a larger error never a smaller one.
        logits = support.hlgauss_labels(prediction).clamp(min=1e-12).log()
        if gaussian:
            loss = cross_entropy(logits, support.hlgauss_labels(target))
        else:
            loss = twohot_loss(logits, *support.encode(target))
        losses[name] = loss.double().numpy()
    return losses


def plot_scale(out: str | Path | None = None) -> Path:
    """Draw `scale_losses`, one panel a loss; returns the path of the picture (default figures/scale.png).

    Each panel says how many times larger the loss of the largest target is than that of the smallest,
    when the prediction is half the target. Symlog is linear near 0: the lines of targets from 100 on lie on
    one another, those of 10 and 1 increasingly below. Source: paper, Figures 3 and 12.
    """
    # The axis shows relative errors at the places of their log ratios: -50% and +100% lie mirrored.
    error_E = 2 ** np.linspace(-1, 1, 201) - 1
    losses = scale_losses(TARGETS, error_E)
    at_half = scale_losses(TARGETS, [-0.5])
    figure, axes = plt.subplots(2, 3, figsize=(11.5, 7), layout="constrained")
    for axis, (name, loss_YE) in zip(axes.flat, losses.items()):
        for target, loss_E, (color, dash) in zip(TARGETS, loss_YE, STYLES):
            shown = np.where(loss_E > 0, loss_E, np.nan)  # a loss of 0 has no place on a log axis
            axis.plot(np.log1p(error_E), shown, color=color, linestyle=dash, label=f"{target:,.0f}")
        ratio = at_half[name][-1, 0] / at_half[name][0, 0]
        print(f"{name}: loss of target {TARGETS[-1]:,.0f} / loss of target {TARGETS[0]:g} = {ratio:.3g}")
        factor = f"{ratio:.1f}" if ratio < 100 else f"{ratio:,.0f}"
        axis.set_title(f"{name}\nlargest / smallest target at -50%: {factor} times", fontsize=9)
        axis.set_yscale("log")
        if name in CLASSIFIERS:  # one y range, so that their heights compare
            axis.set_ylim(0.5, 35)
            axis.set_yticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
            axis.minorticks_off()
        ticks = [-0.5, -0.4, -0.2, 0, 0.25, 0.5, 1]
        axis.set_xticks(np.log1p(ticks), [f"{100 * t:+.0f}%" if t else "0" for t in ticks])
        axis.tick_params(labelsize=7)
        axis.set_ylabel("squared units of return" if name == "squared error" else "nats", fontsize=8)
    axes[0, 1].legend(title="target", fontsize=7, title_fontsize=7, loc="upper center")
    figure.supxlabel("relative error of the prediction (log ratio)", fontsize=9)
    figure.suptitle(
        "Critic loss against relative error, for targets over four orders of magnitude\n"
        "Classifiers predict a Gaussian of 0.75 bins around the predicted value, with at least 1e-12 in each "
        "bin (27.6 nats)\nLimits: wide ±100,000; tuned -100 to 15,000, where predictions are clipped. Log axes",
        fontsize=9,
    )
    return save(figure, out or "figures/scale.png")


def task_shares(log: dict, what: str, most: int = 8) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The log's share/<what>/<task> as {label: (env steps (n,), share (n,))}, at most `most` labels.

    More than `most` tasks are added up by family; if the families are too many as well, all but the first
    in the alphabet are added up as "all others", so that every panel has the same lines.
    """
    names = sorted(name for name in log if name.startswith(f"share/{what}/"))
    labels = [name.split("/", 2)[2] for name in names]
    if len(names) > most:
        labels = [task_family(label) for label in labels]
    if len(set(labels)) > most:
        kept = sorted(set(labels))[: most - 1]
        labels = [label if label in kept else "all others" for label in labels]
    # Added step by step: a task that no state of a batch belongs to may be missing from a row.
    totals = defaultdict(lambda: defaultdict(float))
    for name, label in zip(names, labels):
        for step, value in zip(*log[name]):
            totals[label][step] += value
    return {
        label: (np.array(sorted(total)), np.array([total[step] for step in sorted(total)]))
        for label, total in totals.items()
    }


def draw_bins(axis, steps: np.ndarray, share_nN: np.ndarray, config: dict) -> str:
    """Heat map of the critic's most likely bins: how often each of N bins, against env steps.

    `steps` (n,), `share_nN` sums to 1 over the bins. Returns what the axis shows: the "return" in
    the environment's scale that a bin stands for, where `config` tells, else the "bin". Source: paper,
    Figure 7 (centre).
    """
    used = np.flatnonzero(share_nN.max(0) > 0)
    low, high = used.min(), used.max()
    # A row covers the env steps since the row before it.
    edges = np.concatenate([[min(0, steps[0])], steps])
    # The square root of the share: a bin that 1% of the states choose is still visible.
    norm = matplotlib.colors.PowerNorm(0.5, vmin=0, vmax=share_nN.max())
    rows = np.arange(low, high + 2) - 0.5
    mesh = axis.pcolormesh(edges, rows, share_nN[:, low : high + 1].T, cmap="Greys", norm=norm)
    bar = axis.figure.colorbar(mesh, ax=axis, pad=0.02)
    bar.ax.tick_params(labelsize=6)
    bar.set_label("share of states", fontsize=7)
    fields = ("bins", "bin_low", "bin_high", "symlog", "reward_scale")
    if any(field not in config for field in fields) or config["bins"] != share_nN.shape[1]:
        return "bin"
    support = BinSupport(*(config[field] for field in fields[:4]))
    returns_N = (symexp(support.bins_N) if support.use_symlog else support.bins_N) / config["reward_scale"]
    ticks = np.arange(low, high + 1, max(1, -(-(high + 1 - low) // 9)))
    axis.set_yticks(ticks, [f"{returns_N[i]:.2g}" for i in ticks])
    zero = (support.transform(torch.tensor(0.0)).item() - support.first) / support.width
    if low <= zero <= high:
        axis.axhline(zero, color=STYLES[1][0], linestyle=STYLES[1][1], linewidth=0.8, label="return 0")
    return "return"


def plot_run(folder: str | Path, out: str | Path | None = None) -> Path:
    """Draw the learning curves of the run in `folder`; returns the path of the picture (default curves.png).

    Sources of the additional panels: paper, Figure 7 (bins: centre, filter: right).
    """
    log, config = read_log(folder), read_config(folder)
    variant = config.get("variant") or ""
    families = defaultdict(list)
    for task in [name.removeprefix("return/") for name in log if name.startswith("return/")]:
        families[task_family(task)].append(task)
    for members in families.values():
        members.sort(key=lambda t: [t.endswith(d) for d in ("Hard", "Medium", "Easy")])
    discounts = sorted((n for n in log if n.startswith("bins/")), key=lambda n: float(n.split("/")[1]))
    discounts = discounts[-1:] + discounts[:-1][:1]  # the last, with which the agent acts, and the first
    kinds = {"states": "batch's states", "critic": "critic loss", "actor": "actor loss"}
    kinds["gradient"] = "gradient that reaches the states"
    shared = {kind: lines for kind in kinds if len(lines := task_shares(log, kind)) > 1}  # one has all of it
    success = sorted(name for name in log if re.fullmatch(r"eval/success \d+_mean", name))
    panels = len(families) + 4 + len(discounts) + len(shared) + bool(success)
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
        if lines := axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=6, frameon=False, ncols=1 if len(lines) <= 4 else 2)

    for name, members in sorted(families.items()):
        axis = axes.pop(0)
        for task, style in zip(members, STYLES):
            draw(axis, f"return/{task}", task.removeprefix(name) or task, style, f"eval/return/{task}")
        finish(axis, name, "return")
    axis = axes.pop(0)
    draw(axis, "return_mean", "mean return", STYLES[3], "eval/return_mean")
    draw(axis, "", "normalised mean (0 random, 1 best)", STYLES[0], "eval/score_mean")
    scores = sorted(name for name in log if name.startswith("eval/score/"))
    if len(scores) > 1:
        iqm_n, low_n, high_n = interquartile(np.array([[log[name][1] for name in scores]]))
        steps, (color, dash) = log[scores[0]][0], STYLES[1]
        label = "interquartile mean,\n95% interval over tasks"
        axis.plot(steps, iqm_n, color=color, linestyle=dash, marker="s", markersize=3, label=label)
        axis.vlines(steps, low_n, high_n, color=color, linewidth=0.8)
        axis.margins(y=0.3)  # room for the legend
    finish(axis, "all tasks", "mean over tasks")
    if success:
        axis = axes.pop(0)
        for name, (color, dash) in zip(success, STYLES):
            axis.plot(
                *log[name],
                color=color,
                linestyle=dash,
                marker="o",
                markersize=3,
                label=name.removeprefix("eval/success ").removesuffix("_mean"),
            )
        finish(axis, "success by attempt, evaluations", "share of rollouts")
    units = {
        "critic": "squared error (normalised)" if variant.endswith("_dep") else "nats",
        "actor": "-value (normalised)" if variant.startswith("dep_") else "nats",
    }
    for name, unit in units.items():
        axis = axes.pop(0)
        draw(axis, f"loss/{name}", None, STYLES[0])
        finish(axis, f"{name} loss", unit)
    axis = axes.pop(0)
    shares = sorted((n for n in log if n.startswith("filter/")), key=lambda n: float(n.split("/")[1]))
    for i, name in enumerate(shares):
        shade = 0.75 * (1 - i / max(1, len(shares) - 1))
        draw(axis, name, f"discount {name.split('/')[1]}", (str(shade), "-"))
    finish(axis, "replayed actions that pass the filter", "share")
    for name in discounts:
        axis = axes.pop(0)
        unit = draw_bins(axis, *log[name], config)
        finish(axis, f"most likely bin, discount {name.split('/')[1]}", unit)
    # One y range and one set of lines in all of them: what is compared is a task's share across panels.
    top = max((smooth(v).max() for lines in shared.values() for _, v in lines.values()), default=0)
    for i, (kind, lines) in enumerate(shared.items()):
        axis = axes.pop(0)
        for (label, (steps, values)), (color, dash) in zip(sorted(lines.items()), STYLES):
            label = None if i else label
            axis.plot(steps, smooth(values), color=color, linestyle=dash, linewidth=1.2, label=label)
        axis.set_ylim(0, 1.4 * top)  # the upper part is the legend's
        finish(axis, f"tasks' shares of the {kinds[kind]}", "share")
    for axis in axes:
        axis.set_visible(False)
    figure.supxlabel("env steps", fontsize=9)
    figure.tight_layout()
    return save(figure, out or Path(folder) / "curves.png")


def plot_groups(what: str, folders: list[str], out: str | Path | None = None) -> Path:
    """Draw several runs: `what` "run", seeds of one thing, or "compare", two things or more; returns the path.

    Runs that differ in nothing but their seed and name belong together (curves.py). Prints each group's last
    evaluation. The picture goes beside the runs unless `out` is given. ValueError, one line, for runs that
    cannot be drawn together.
    """
    groups = read_groups(folders)
    different = differences([group.config for group in groups])
    if what == "run" and different:
        raise ValueError(
            f"these runs are not seeds of one thing, they differ in {different}: to draw them side by side type: "
            f"python plot.py compare {' '.join(folders)}"
        )
    figure, lines = draw_groups(groups, f"different: {different}" if different else groups[0].label)
    print("\n".join(lines))
    shared = os.path.commonprefix([Path(folder).name for folder in folders]).rstrip("_-. ")
    name = "compare" if what == "compare" else shared or "seeds"
    return save(figure, out or Path(folders[0]).parent / f"{name}.png")


def read_table(path: Path, texts: tuple[str, ...], numbers: tuple[str, ...]) -> list[dict]:
    """Rows of a csv file as dicts, `numbers` as floats; ValueError, one line, if columns are missing."""
    if not path.exists():
        raise ValueError(f"no results at {path}: to make results/scales.csv type: make scales")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    missing = [name for name in texts + numbers if not rows or rows[0].get(name) is None]
    if missing:
        raise ValueError(f"{path} has no rows with {', '.join(missing)}: to make it type: make scales")
    try:
        return [row | {name: float(row[name]) for name in numbers} for row in rows]
    except (TypeError, ValueError):
        columns = ", ".join(numbers)
        raise ValueError(f"{path}: {columns} must be numbers; to make it type: make scales") from None


def mean_and_range(rows: list[dict], column: str) -> tuple[float, float, float] | None:
    """Mean, smallest and largest over seeds of the mean over each seed's rows; None without rows."""
    seeds = defaultdict(list)
    for row in rows:
        seeds[row["seed"]].append(row[column])
    means = [np.mean(values) for values in seeds.values()]
    return (np.mean(means), np.min(means), np.max(means)) if means else None


def draw_returns(axis, rows: list[dict], title: str) -> None:
    """Normalised return by variant: mean and range over seeds, rescaled rewards filled, control hollow."""
    for scaled, shift, marker, label in ((0, -0.12, "s", "rewards as they are"), (1, 0.12, "o", "rescaled")):
        for x, (variant, (color, _)) in enumerate(zip(VARIANTS, STYLES)):
            chosen = [row for row in rows if row["variant"] == variant and row["scaled"] == scaled]
            if numbers := mean_and_range(chosen, "normalised"):
                mean, low, high = numbers
                style = {"color": color, "markerfacecolor": color if scaled else "white", "capsize": 3}
                axis.errorbar(x + shift, mean, [[mean - low], [high - mean]], marker=marker, **style)
        # The legend shows shape and filling; colours are the variants, which the axis names.
        face = "black" if scaled else "white"
        axis.plot([], [], marker, color="black", markerfacecolor=face, label=label)
    axis.hlines([0, 1], -0.5, len(VARIANTS) - 0.5, color="0.8", linewidth=0.8, zorder=0)
    axis.set_xticks(range(len(VARIANTS)), [v.replace("_", " /\n") for v in VARIANTS], fontsize=7)
    axis.tick_params(axis="y", labelsize=7)
    axis.set_title(title, fontsize=9)


def draw_shares(axis, rows: list[dict], tasks: list[str], title: str) -> None:
    """Each task's shares of states, losses and gradient: bars with rescaled rewards, diamonds without."""
    looks = {
        "states": ("0.85", ""),
        "critic": ("#56b4e9", "//"),
        "actor": ("#e69f00", ".."),
        "gradient": ("0.5", ""),
    }
    diamond = {"color": "black", "markerfacecolor": "white", "markersize": 4, "linestyle": ""}
    for k, (kind, (color, hatch)) in enumerate(looks.items()):
        look = {"color": color, "hatch": hatch, "edgecolor": "black", "linewidth": 0.6}
        axis.bar(0, 0, 0, label=f"share of the {kind}" + " loss" * (kind in ("critic", "actor")), **look)
        for x, task in enumerate(tasks):
            place = x + 0.2 * (k - 1.5)
            for scaled in (1, 0):
                chosen = [row for row in rows if row["task"] == task and row["scaled"] == scaled]
                numbers = mean_and_range(chosen, kind)
                if numbers and scaled:
                    mean, low, high = numbers
                    axis.bar(place, mean, 0.2, **look)
                    axis.errorbar(place, mean, [[mean - low], [high - mean]], color="black", linewidth=1)
                elif numbers:
                    axis.plot(place, numbers[0], "D", **diamond)
    axis.plot([], [], "D", **diamond, label="the same, rewards as they are")
    axis.set_xticks(range(len(tasks)), tasks, fontsize=6, rotation=20, ha="right")
    axis.tick_params(axis="y", labelsize=7)
    axis.set_title(title, fontsize=9)


def plot_scales(path: str | Path = "results/scales.csv", out: str | Path | None = None) -> Path:
    """Draw the comparison under rescaled rewards; returns the path of the picture.

    `path` has the columns variant, scaled, seed, task, factor, return, normalised; <path>_shares.csv beside
    it, if there is one, variant, scaled, seed, task, states, critic, actor, gradient. The picture goes to
    figures/<name of the table>.png unless `out` is given. Source: paper, Figures 6 and 7 (left).
    """
    path = Path(path)
    keys = ("variant", "seed", "task")
    rows = read_table(path, keys, ("scaled", "factor", "return", "normalised"))
    beside = path.with_name(f"{path.stem}_shares.csv")
    kinds = ("scaled", "states", "critic", "actor", "gradient")
    shares = read_table(beside, keys, kinds) if beside.exists() else []
    # The control's factor may say 1: the title tells the multiplier of the rescaled runs.
    factors = {row["task"]: row["factor"] for row in sorted(rows, key=lambda row: row["scaled"])}
    tasks = sorted(factors, key=lambda task: (-factors[task], task))
    titles = {task: f"{task}\nrewards × {factors[task]:g}" for task in tasks}
    columns = max(len(tasks) + 1, len(VARIANTS) if shares else 0)
    layers = 2 if shares else 1
    figure = plt.figure(figsize=(2.9 * columns, 3.3 * layers), layout="constrained")
    parts = figure.subfigures(layers, 1, squeeze=False)[:, 0]
    axes = parts[0].subplots(1, len(tasks) + 1, sharey=True)
    for axis, task in zip(axes, tasks):
        draw_returns(axis, [row for row in rows if row["task"] == task], titles[task])
    draw_returns(axes[-1], rows, "mean over tasks\n")
    axes[0].set_ylabel("normalised return (0 random, 1 best)", fontsize=8)
    parts[0].supxlabel("actor / critic loss; bars: range over seeds", fontsize=8)
    parts[0].legend(*axes[-1].get_legend_handles_labels(), loc="outside upper center", ncols=2, fontsize=7)
    if shares:
        axes = parts[1].subplots(1, len(VARIANTS), sharey=True)
        for axis, variant in zip(axes, VARIANTS):
            chosen = [row for row in shares if row["variant"] == variant]
            draw_shares(axis, chosen, tasks, variant.replace("_", " / "))
        axes[0].set_ylabel("share of each task", fontsize=8)
        parts[1].legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=7)
    return save(figure, out or Path("figures") / f"{path.stem}.png")


def save(figure, out: str | Path) -> Path:
    """Write a figure as a picture, making its folder, and close it; returns the path."""
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    plt.close(figure)
    return out


def main(argv: list[str] | None = None) -> Path:
    """Draw what `argv` asks for; returns the path of the picture."""
    options = tyro.cli(Options, args=argv)
    what, paths, out = options.what, list(options.paths), options.output
    if what in ("scale", "scales") and len(paths) > 1:
        raise ValueError(f"python plot.py {what} takes one file at most, got {', '.join(paths)}")
    if what == "scale":
        return plot_scale(out or (paths or [None])[0])
    if what == "scales":
        return plot_scales((paths or ["results/scales.csv"])[0], out)
    if what not in ("run", "compare", "attention"):
        raise ValueError(
            f"cannot draw '{what}'; to draw a run's curves type: python plot.py run runs/<name>, "
            "for the other figures: python plot.py compare, attention, scale or scales"
        )
    if not paths:
        raise ValueError(f"which run? Type: python plot.py {what} runs/<name>")
    if what == "attention":
        if len(paths) > 1:
            raise ValueError(f"attention is drawn of one run at a time, got {', '.join(paths)}")
        from plots.attention import (
            draw_attention,
        )  # here, because it takes the whole program, and a log's curves do not

        figure, folder = draw_attention(paths[0], options.task, options.seed)
        return save(figure, out or folder / "attention.png")
    if len(paths) == 1 and what == "compare":
        raise ValueError(f"compare takes two runs or more: python plot.py compare {paths[0]} runs/<name>")
    return plot_run(paths[0], out) if len(paths) == 1 else plot_groups(what, paths, out)


if __name__ == "__main__":
    try:
        print(f"written: {main()}")
    except (ValueError, OSError, CheckpointError) as error:
        sys.exit(f"error: {error}")
