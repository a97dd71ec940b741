r"""PopArt: a critic's loss at one scale, whatever the scale of the returns; its values stay when that moves.

What     running mean and deviation of the TD targets, one pair for each discount, and an affine output layer
         that is corrected whenever they move, so that the values it stands for stay where they were
Why      regression on raw returns needs another learning rate for every reward function. Normalised, the
         losses of the scale-dependent update have a known size. It is global: tasks that earn a hundred
         times more than others still do, and still take most of the loss. That is the paper's point
Paper    AMAGO-2 appendix A ("a global (task-agnostic) PopArt layer"); PopArt: van Hasselt et al. 2016.
         Authors' code: github.com/UT-Austin-RPL/amago
Shapes   G discounts; any leading dimensions: values and raw critic outputs (..., G)
Notes    Three scales meet here. raw: what a critic network puts out. normalised: n = w raw + b, where the
         loss is computed. returns: q = sigma n + mu.
         No gradient moves w and b, only `update` does, and it keeps q where it was: q = sqrt(nu_0) raw = 10 raw
         for good. What follows the returns is the size of the loss, not what the network has to put out.
         float32 throughout, as in the authors' code, whose numbers the tests compare with.
Use      popart = PopArt(discounts=G)
         popart.update(y, mask)                    # once a batch, before its loss; mask (..., G): no padding
         loss = (popart.normalised(raw) - popart.standardise(y)) ** 2      # the scale-dependent critic's
         q = popart.denormalised(raw)              # in units of returns, for the next targets
Copy     this file alone; needs torch
Try      python popart.py
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class PopArt(nn.Module):
    """Running statistics of returns for each of G discounts, and the output layer that they correct.

    Arguments: `discounts` G; `beta` is the step size that the statistics end with; `nu` the second moment
    that they start from. All that is learned are buffers (G,), which survive save and load: `mu` and `nu`
    first and second moment, `w` and `b` of the output layer, `t` the number of updates so far plus one: the
    first update takes a step of 1 / (2 - beta), about half of the way from `nu` to what it sees.
    Source: van Hasselt et al. 2016, with the step size and limits of the authors' code.
    """

    def __init__(self, discounts: int, beta: float = 5e-4, nu: float = 100.0):
        super().__init__()
        self.beta = beta
        self.register_buffer("mu", torch.zeros(discounts))
        self.register_buffer("nu", torch.full((discounts,), nu))
        self.register_buffer("w", torch.ones(discounts))
        self.register_buffer("b", torch.zeros(discounts))
        self.register_buffer("t", torch.ones(discounts))

    @property
    def sigma(self) -> Tensor:
        """Standard deviation (G,) of the returns seen, kept in [0.01, 10^4], as in the authors' code."""
        # sigma = sqrt(nu - mu^2)
        return (self.nu - self.mu**2).clamp(1e-4, 1e8).sqrt()

    @torch.no_grad()
    def update(self, value: Tensor, mask: Tensor | None = None, pool: Callable = lambda sums: sums) -> None:
        """Take in returns (..., G) where the booleans `mask` (..., G) are True (None: everywhere).

        Nothing masked can leak in, NaN included, and a discount without any value keeps its statistics. What is
        not finite, or has a square that is not, has to be masked: it would stay in the statistics for good.
        `denormalised` of any raw output is the same before and after. Where several processes hold a part of
        the values each, `pool` takes the sums (3, G) of this one and returns their mean over all.
        """
        value = value.float().flatten(0, -2)
        mask = torch.ones_like(value, dtype=torch.bool) if mask is None else mask.bool().flatten(0, -2)
        # Selected, not multiplied by the mask: 0 * NaN is NaN.
        value = torch.where(mask, value, torch.zeros_like(value))
        sums = torch.stack([value.sum(0), (value**2).sum(0), mask.sum(0)])
        sum_G, sum_square_G, count_G = pool(sums)
        mean_G, square_G = sum_G / count_G.clamp(min=1e-6), sum_square_G / count_G.clamp(min=1e-6)
        old_mu, old_sigma, seen_G = self.mu.clone(), self.sigma, count_G > 0
        # beta_t = beta / (1 - (1 - beta)^t): large steps at first, so that the start is soon forgotten.
        t = self.t + seen_G
        step = torch.where(seen_G, self.beta / (1 - (1 - self.beta) ** t), torch.zeros_like(t))
        # mu <- (1 - beta_t) mu + beta_t mean(y),  nu <- (1 - beta_t) nu + beta_t mean(y^2)
        self.t.copy_(t)
        self.mu.lerp_(mean_G, step)
        self.nu.lerp_(square_G, step)
        # The output's correction:  w <- w sigma / sigma',  b <- (sigma b + mu - mu') / sigma'
        self.w.mul_(old_sigma / self.sigma)
        self.b.copy_((old_sigma * self.b + old_mu - self.mu) / self.sigma)

    def normalised(self, raw: Tensor) -> Tensor:
        """Raw critic outputs (..., G) -> normalised values n = w raw + b, (..., G)."""
        return self.w * raw + self.b

    def denormalised(self, raw: Tensor) -> Tensor:
        """Raw critic outputs (..., G) -> returns q = sigma (w raw + b) + mu, (..., G)."""
        return self.sigma * self.normalised(raw) + self.mu

    def standardise(self, value: Tensor) -> Tensor:
        """Returns (..., G) -> normalised values (q - mu) / sigma, (..., G)."""
        return (value - self.mu) / self.sigma


if __name__ == "__main__":
    popart = PopArt(discounts=1, beta=0.5)
    raw_B1 = torch.tensor([[-1.0], [0.0], [1.0]])
    y_B1 = torch.tensor([[300.0], [500.0]])

    def show(what: str) -> None:
        "What the raw outputs -1, 0, 1 stand for, and the loss of 1 against a target of 500."
        q = [round(x, 3) for x in popart.denormalised(raw_B1)[:, 0].tolist()]
        n = [round(x, 3) for x in popart.normalised(raw_B1)[:, 0].tolist()]
        loss = (popart.normalised(raw_B1)[2] - popart.standardise(y_B1)[1]) ** 2
        print(f"{what}: mu {popart.mu.item():.2f}, sigma {popart.sigma.item():.2f}")
        print(f"  raw -1, 0, 1 are normalised {n} and stand for the returns {q}")
        print(f"  target 500: normalised {popart.standardise(y_B1)[1].item():.3f}, loss {loss.item():.3f}")

    show("at first, sigma = sqrt(100)")
    popart.update(y_B1)
    # t = 2: beta_t = 0.5 / (1 - 0.25) = 2/3; mu = 2/3 * 400, nu = 100/3 + 2/3 * 170000
    show("returns 300 and 500 seen")
    print("  by hand: mu = 2/3 x 400 = 266.67, nu = 100/3 + 2/3 x 170000 = 113366.67")
    print("           sigma = sqrt(113366.67 - 266.67^2) = 205.56, the loss (490 / 205.56)^2 = 5.682")
    print("the returns stayed, the loss shrank from 49^2 = 2401: a raw output is worth 10, before and after")
