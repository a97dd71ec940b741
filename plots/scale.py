r"""The scale of returns: its effect on the critic's loss, and on learning.

What     `plot_scale`: loss against the relative error of a prediction, for targets over four orders of magnitude.
         `plot_scales`: all four variants trained with the rewards of some tasks multiplied, and without
Why      the paper's claim in two figures: the loss of a classifier hardly depends on the scale of returns, and
         the policy that learns from it neglects no task for its small rewards
Paper    Figures 3 and 12 (losses), without training; Figures 6 and 7 (left) in miniature, from results/scales.csv
Shapes   Y targets, E relative errors, K tasks, V variants
"""

import csv
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from plots.style import save, styled
from twohot import BinSupport, cross_entropy, twohot_loss

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

VARIANTS = ["ind_ind", "ind_dep", "dep_ind", "dep_dep"]  # actor first, as in the paper's Figure 4
KEYS = ("variant", "seed", "task")  # columns that say which run and task a row is about
# Columns of the table of shares, and how their bars look.
SHARES = {
    "states": {"label": "share of the states", "color": "0.85"},
    "critic": {"label": "share of the critic loss", "color": "#56b4e9", "hatch": "//"},
    "actor": {"label": "share of the actor loss", "color": "#e69f00", "hatch": ".."},
    "gradient": {"label": "share of the gradient", "color": "0.5"},
}


# ------------------------------------------------------------------------------------- the critic's loss


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
        # to 1e-16. With at least 1e-12 in every bin, each error, however large, has a finite loss (at most
        # 27.6 nats), and a larger error never a smaller one.
        logits = support.hlgauss_labels(prediction).clamp(min=1e-12).log()
        if gaussian:
            loss = cross_entropy(logits, support.hlgauss_labels(target))
        else:
            loss = twohot_loss(logits, *support.encode(target))
        losses[name] = loss.double().numpy()
    return losses


@styled
def plot_scale(out: str | Path | None = None) -> Path:
    """Draw `scale_losses`, one panel a loss; returns the path of the picture (default figures/scale.png).

    Each panel says how many times larger the loss of the largest target is than that of the smallest,
    when the prediction is half the target. Symlog is linear near 0: the lines of targets from 100 on lie on
    one another, those of 10 and 1 increasingly below. Source: paper, Figures 3 and 12.
    """
    error_E = np.linspace(-0.5, 1, 201)
    figure = Figure(figsize=(11.5, 7))
    axes = figure.subplots(2, 3)
    for axis, (name, loss_YE) in zip(axes.flat, scale_losses(TARGETS, error_E).items()):
        for target, loss_E in zip(TARGETS, loss_YE):
            # A loss of 0 has no place on a log axis.
            axis.plot(error_E, np.where(loss_E > 0, loss_E, np.nan), label=f"{target:,.0f}")
        ratio = loss_YE[-1, 0] / loss_YE[0, 0]  # the first error is -0.5
        print(f"{name}: loss of target {TARGETS[-1]:,.0f} / loss of target {TARGETS[0]:g} = {ratio:.3g}")
        times = f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.1f}"
        axis.set_title(f"{name}\nlargest / smallest target at -50%: {times} times")
        axis.set(yscale="log", ylabel="squared units of return")
        if name in CLASSIFIERS:  # one y range, so that their heights compare
            axis.set(ylim=(0.5, 35), ylabel="nats")
        axis.xaxis.set_major_formatter(PercentFormatter(1))
    axes[0, 1].legend(title="target", loc="upper center")
    figure.supxlabel("relative error of the prediction")
    figure.suptitle(
        "Critic loss against relative error, for targets over four orders of magnitude\n"
        "Classifiers predict a Gaussian of 0.75 bins. Limits: wide ±100,000; tuned -100 to 15,000, which clip"
    )
    return save(figure, out or "figures/scale.png")


# --------------------------------------------------------------------------- training on rescaled rewards


def read_table(path: Path, numbers: tuple[str, ...]) -> list[dict]:
    """Rows of a csv file of runs as dicts, `numbers` as floats; ValueError, one line, if there is no such table."""
    try:
        with path.open(newline="") as file:
            table = csv.DictReader(file)
            rows = [{k: row[k] for k in KEYS} | {n: float(row[n]) for n in numbers} for row in table]
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        rows = []
    if not rows:
        columns = f"{', '.join(KEYS)}, and numbers in {', '.join(numbers)}"
        raise ValueError(f"{path} must be a table with the columns {columns}: to make it type: make scales")
    return rows


def over_seeds(rows: list[dict], column: str, **where) -> tuple[float, float, float]:
    """Mean, smallest and largest over seeds of each seed's mean, of the rows that have the values `where`.

    Three NaN if no row has them: Matplotlib draws nothing there.
    """
    seeds = defaultdict(list)
    for row in rows:
        if all(row[key] == value for key, value in where.items()):
            seeds[row["seed"]].append(row[column])
    means = [np.mean(values) for values in seeds.values()] or [np.nan]
    return np.mean(means), np.min(means), np.max(means)


def draw_returns(axis, rows: list[dict], title: str, **where) -> None:
    """Normalised return by variant: mean and range over seeds, rescaled rewards filled, control hollow."""
    for scaled, (fill, label) in enumerate((("none", "rewards as they are"), ("full", "rescaled"))):
        place_V = np.arange(len(VARIANTS)) + 0.24 * (scaled - 0.5)
        seeds = [over_seeds(rows, "normalised", variant=name, scaled=scaled, **where) for name in VARIANTS]
        mean_V, low_V, high_V = np.transpose(seeds)
        axis.vlines(place_V, low_V, high_V)
        axis.plot(place_V, mean_V, "oC0", fillstyle=fill, markersize=6, label=label)
    axis.hlines([0, 1], -0.5, len(VARIANTS) - 0.5, color="0.8", linewidth=0.8, zorder=0)
    axis.set_xticks(range(len(VARIANTS)), [variant.replace("_", " /\n") for variant in VARIANTS])
    axis.set_title(title)


def draw_shares(axis, rows: list[dict], tasks: list[str], variant: str) -> None:
    """Each task's shares of states, losses and gradient: bars with rescaled rewards, diamonds without."""
    diamond = {"color": "black", "markerfacecolor": "white", "markersize": 4, "zorder": 3}
    for k, (kind, look) in enumerate(SHARES.items()):
        place_K = np.arange(len(tasks)) + 0.2 * (k - 1.5)
        control, rescaled = (
            [over_seeds(rows, kind, variant=variant, scaled=s, task=task) for task in tasks] for s in (0, 1)
        )
        mean_K, low_K, high_K = np.transpose(rescaled)
        axis.bar(place_K, mean_K, 0.2, edgecolor="black", linewidth=0.6, **look)
        axis.vlines(place_K, low_K, high_K, color="black", linewidth=1)
        axis.plot(place_K, [mean for mean, *_ in control], "D", **diamond)
    axis.plot([], [], "D", **diamond, label="the same, rewards as they are")
    axis.set_xticks(range(len(tasks)), tasks, fontsize=6, rotation=20, ha="right")
    axis.set_title(variant.replace("_", " / "))


@styled
def plot_scales(path: str | Path = "results/scales.csv", out: str | Path | None = None) -> Path:
    """Draw the comparison under rescaled rewards; returns the path of the picture.

    `path` has the columns variant, scaled, seed, task, factor, return, normalised; <path>_shares.csv beside
    it, if there is one, variant, scaled, seed, task, states, critic, actor, gradient. The picture goes to
    figures/<name of the table>.png unless `out` is given. Source: paper, Figures 6 and 7 (left).
    """
    path = Path(path)
    rows = read_table(path, ("scaled", "factor", "return", "normalised"))
    beside = path.with_name(f"{path.stem}_shares.csv")
    shares = read_table(beside, ("scaled", *SHARES)) if beside.exists() else []
    # The control's factor may say 1: the title tells the multiplier of the rescaled runs.
    factors = {row["task"]: row["factor"] for row in sorted(rows, key=lambda row: row["scaled"])}
    tasks = sorted(factors, key=lambda task: (-factors[task], task))
    layers = 2 if shares else 1
    figure = Figure(figsize=(2.9 * max(len(tasks) + 1, len(VARIANTS)), 3.3 * layers))
    upper, *lower = figure.subfigures(layers, 1, squeeze=False)[:, 0]
    axes = upper.subplots(1, len(tasks) + 1, sharey=True)
    for axis, task in zip(axes, tasks):
        draw_returns(axis, rows, f"{task}\nrewards × {factors[task]:g}", task=task)
    draw_returns(axes[-1], rows, "mean over tasks\n")
    axes[0].set_ylabel("normalised return (0 random, 1 best)")
    upper.supxlabel("actor / critic loss; bars: range over seeds")
    upper.legend(*axes[-1].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    for part in lower:
        axes = part.subplots(1, len(VARIANTS), sharey=True)
        for axis, variant in zip(axes, VARIANTS):
            draw_shares(axis, shares, tasks, variant)
        axes[0].set_ylabel("share of each task")
        part.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return save(figure, out or Path("figures") / f"{path.stem}.png")
