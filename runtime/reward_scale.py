r"""The size of rewards: --reward_scale auto, and a warning where a critic's bins do not fit the returns.

What     `choose` finds the multiplier of rewards from the first of them; `misfit` says what is wrong with one
Why      a two-hot critic tells returns apart by its bins. Rewards of 0.001 all fall into one, rewards of 1e6 leave them
Paper    appendix A (limits of the bins)
Config   `config` is the trainer's (config.py)
"""

import numpy as np
import torch

from runtime import distributed


def choose(reward_T: np.ndarray) -> tuple[float, str]:
    """A multiplier by which the rewards (T,) of all processes that are not 0 have a size of 10, and the reason in words.

    One for all tasks: a multiplier for each would hide what one is worth beside another.
    """
    reward_T = reward_T.astype(np.float64)
    own = torch.tensor([(reward_T**2).sum(), np.count_nonzero(reward_T)], dtype=torch.float64)
    square, count = distributed.mean(own).tolist()
    # The size of rewards that are not 0: a task that seldom pays does not pay more for it.
    size = max((square / count) ** 0.5, 1e-29) if count else 1.0  # float32 ends at 3e38
    found = f"the first rewards have a size of {size:.3g}" if count else "the first rewards were all 0"
    return float(f"{10 / size:.2g}"), found


def misfit(config, low: float, high: float, count: int, value: float, length: int) -> str | None:
    """What is wrong with a task's `count` returns from `low` to `high`, the last `value` after `length` steps; or None.

    They leave the critic's bins, or lie too close together for it to tell them apart.
    """
    c = config
    position = lambda v: np.sign(v) * np.log1p(abs(v)) if c.symlog else v
    width = (position(c.bin_high) - position(c.bin_low)) / (c.bins - 1)
    apart = (position(high * c.reward_scale) - position(low * c.reward_scale)) / width
    # Of a return that is spread over `length` steps, the longest discount sees about this much.
    seen = value * c.reward_scale * min(1.0, 1 / (1 - max(c.gammas)) / length)
    if not c.bin_low <= seen <= c.bin_high:
        fault = f"a return of {value:g} lies beyond the critic's bins ({c.bin_low:g} to {c.bin_high:g})"
        return f"{fault}; start again with a lower --reward_scale, or a wider --bin_low and --bin_high"
    # It interpolates between bins, but not that finely.
    if count >= 50 and 0 < apart < 0.02:
        fault = f"returns from {low:g} to {high:g} lie within a fiftieth of one of the critic's bins"
        return f"{fault}; it can hardly tell them apart: take the common part out of the rewards, or raise --bins"
    return None
