r"""PopArt: learn values at one scale, whatever the scale of the returns, and forget nothing when it moves.

What     running mean and deviation of the TD targets, one pair for each discount, and an affine output layer
         that is corrected whenever they move, so that the values it stands for stay where they were
Why      regression on raw returns needs another learning rate for every reward function. Normalised, the
         losses of the scale-dependent update have a known size. It is global: tasks that earn a hundred
         times more than others still do, and still take most of the loss. That is the paper's point
Paper    AMAGO-2 appendix A ("a global (task-agnostic) PopArt layer"); PopArt: van Hasselt et al. 2016
Shapes   G discounts; any leading dimensions: values and raw critic outputs (..., G)
Notes    Three scales meet here. raw: what a critic network puts out. normalised: n = w raw + b, where the
         loss is computed. returns: q = sigma n + mu.
         float32 throughout, as in the authors' code, whose numbers the tests compare with.
Copy     this file alone; needs torch
Try      python popart.py
"""

import torch
from torch import Tensor, nn


class PopArt(nn.Module):
    """Running statistics of returns for each of G discounts, and the output layer that they correct.

    Arguments: `discounts` G; `beta` is the step size that the statistics end with; `nu` the second moment
    that they start from. All that is learned are buffers (G,), which survive save and load: `mu` and `nu`
    first and second moment, `w` and `b` of the output layer, `t` the number of updates so far plus one.
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
        """Standard deviation (G,) of the returns seen, kept away from 0 and infinity."""
        # sigma = sqrt(nu - mu^2)
        return (self.nu - self.mu**2).clamp(1e-4, 1e8).sqrt().clamp(1e-4, 1e6)

    @torch.no_grad()
    def update(self, value: Tensor, mask: Tensor | None = None) -> None:
        """Take in returns (..., G) where the booleans `mask` (..., G) are True (None: everywhere).

        Nothing masked can leak in, NaN included, and a discount without any value keeps its statistics.
        `denormalised` of any raw output is the same before and after.
        """
        value = value.float().flatten(0, -2)
        mask = torch.ones_like(value, dtype=torch.bool) if mask is None else mask.bool().flatten(0, -2)
        count_G = mask.sum(0)
        # Selected, not multiplied by the mask: 0 * NaN is NaN.
        value = torch.where(mask, value, torch.zeros_like(value))
        mean_G, square_G = value.sum(0) / count_G.clamp(min=1), (value**2).sum(0) / count_G.clamp(min=1)
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
    torch.manual_seed(0)
    popart = PopArt(discounts=1, beta=0.5)
    raw = torch.tensor([[-1.0], [0.0], [1.0]])
    print("raw outputs -1, 0, 1; at first sigma = sqrt(100) = 10:", popart.denormalised(raw)[:, 0].tolist())
    popart.update(torch.tensor([[300.0], [500.0]]))
    # t = 2: beta_t = 0.5 / (1 - 0.25) = 2/3; mu = 2/3 * 400, nu = 100/3 + 2/3 * 170000
    print(f"returns 300 and 500 seen: mu {popart.mu.item():.2f} (by hand 266.67), nu {popart.nu.item():.1f}")
    print(f"sigma {popart.sigma.item():.2f}: by hand sqrt(113366.7 - 266.67^2) = 205.56")
    print(
        "the outputs stand for the same returns:",
        [round(x, 3) for x in popart.denormalised(raw)[:, 0].tolist()],
    )
    print(f"and a target of 500 is now {popart.standardise(torch.tensor([[500.0]])).item():.3f}, not 500")
