r"""The look that all figures share.

What     `LOOK`: sizes, lines and colours. `@styled` before a function that draws a figure gives it that look.
         Heat maps, bins labelled with returns, and the file that a figure is written to
Why      one place decides how figures look, and importing it changes no other figure of the same process
Paper    none. Colours: Wong 2011, "Points of view: Color blindness"
Shapes   N bins; a heat map has the shape of its picture, rows first
"""

from pathlib import Path

import numpy as np
from matplotlib import cycler, rc_context
from matplotlib.colors import PowerNorm
from matplotlib.text import Text
from torch import Tensor

from twohot import BinSupport, symexp

# Lines differ in colour and in dash, so that a greyscale print still tells them apart.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#555555", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)), (0, (3, 1)), (0, (8, 3)), (0, (1, 2)))

LOOK = {
    # Each line of a panel takes the next style. "C0" to "C7" are the same colours.
    "axes.prop_cycle": cycler(color=COLORS, linestyle=DASHES),
    "lines.linewidth": 1.2,
    "lines.markersize": 3,
    "font.size": 7.5,  # titles are larger, in proportion
    "legend.fontsize": 6.5,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 110,
}
styled = rc_context(LOOK)


def heat_map(axis, x, y, values: np.ndarray, unit: str, **place) -> None:
    """Values (rows, columns) in shades of grey between the edges `y` (rows + 1) and `x` (columns + 1).

    White is 0, black is 1. A colour bar with the `unit` goes beside the
    axis; `place` is passed on to Matplotlib's `colorbar`.
    """
    # Shades follow the square root of the value, so that a hundredth of the darkest is still visible.
    mesh = axis.pcolormesh(x, y, values, cmap="Greys", norm=PowerNorm(0.5, vmin=0, vmax=1))
    axis.figure.colorbar(mesh, ax=axis, label=unit, **place)


def bin_map(axis, x, p_TN: np.ndarray, shown, support, reward_scale: float, unit: str, **look) -> None:
    """Heat map of the shares or probabilities (T, N) of bins, from the first to the last bin of `shown`.

    `x` (T + 1) are the edges in time. Bins are labelled with the returns that they stand for in the
    environment: their values, divided by the `reward_scale` of training. For `look` see `heat_map`.
    """
    bins = np.arange(min(shown), max(shown) + 1)
    heat_map(axis, x, np.arange(bins[0], bins[-1] + 2) - 0.5, p_TN[:, bins].T, unit, **look)
    returns_N = (symexp(support.bins_N) if support.use_symlog else support.bins_N) / reward_scale
    ticks = bins[:: -(-len(bins) // 8)]
    axis.set_yticks(ticks, [f"{returns_N[i]:.2g}" for i in ticks])


def bin_position(support: BinSupport, value: Tensor) -> Tensor:
    """Returns (...), scaled as the critic sees them, as positions (...) on an axis where bin i lies at i."""
    return (support.transform(value) - support.first) / support.width


def save(figure, out: str | Path) -> Path:
    """Write a figure to `out`, making its folder if necessary; returns the path."""
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    for text in figure.findobj(Text):  # in a name, "$" begins no formula
        if "$" in text.get_text():
            text.set_parse_math(False)
    figure.savefig(out)
    return out
