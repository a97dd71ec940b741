r"""PopArt: value targets normalised by running statistics, and an output layer that keeps its predictions.

What     a running mean and standard deviation of the TD targets, one pair for each discount, and an affine
         output layer. An update of the statistics also corrects the layer: predicted returns do not change
Why      squared errors of raw returns need another learning rate for every reward function. Once normalised,
         the losses of the scale-dependent update have a known size. The statistics are global: a task whose
         returns are a hundred times larger still takes most of the loss. The paper shows this weakness
Paper    AMAGO-2 appendix A ("a global (task-agnostic) PopArt layer"); PopArt: van Hasselt et al. 2016.
         Authors' code: github.com/UT-Austin-RPL/amago
Shapes   G discounts; any leading dimensions: values and raw critic outputs (..., G)
Notes    Values have three scales. Raw: the output of a critic network. Normalised: n = w raw + b, where the
         loss is computed. Returns: q = sigma n + mu.
         Only `update` changes w and b, no gradient does, and it leaves q as it was. So q = sqrt(nu_0) raw
         = 10 raw at all times: the statistics change the size of the loss, not the output to be learned.
         float32 throughout, as in the authors' code; the tests compare with its numbers.
Use      popart = PopArt(discounts=G)
         popart.update(y, mask)                    # once a batch, before its loss; mask (..., G): real steps
         loss = (popart.normalised(raw) - popart.standardise(y)) ** 2      # of the scale-dependent critic
         q = popart.denormalised(raw)              # in units of returns, for the next targets
Copy     this file alone; needs torch
Try      python popart.py
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class PopArt(nn.Module):
    """Running statistics of returns for each of G discounts, and the output layer that they correct.

    Arguments: `discounts` G; `beta`, the final step size of the statistics; `nu`, the initial second moment.
    The state is in buffers (G,), which are saved and loaded: `mu` and `nu`, the first and second moment; `w`
    and `b` of the output layer; `t`, the number of updates so far plus one. The first update therefore has a
    step size of 1 / (2 - beta), about a half.
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
        """Standard deviation (G,) of the returns, limited to [0.01, 10^4], as in the authors' code."""
        # sigma = sqrt(nu - mu^2)
        return (self.nu - self.mu**2).clamp(1e-4, 1e8).sqrt()

    @torch.no_grad()
    def update(self, value: Tensor, mask: Tensor | None = None, pool: Callable = lambda sums: sums) -> None:
        """Update the statistics with the returns (..., G) where the booleans `mask` (..., G) are True.

        Without a mask, all count. Other values have no effect, even NaN, and a discount without values keeps
        its statistics. The caller must mask NaN, infinity and values whose square overflows: one of them
        would corrupt the statistics permanently. `denormalised` of a raw output is the same before and after.
        With several processes, `pool` takes this one's sums (3, G) and returns their mean over all processes.
        """
        value = value.float().flatten(0, -2)
        mask = torch.ones_like(value, dtype=torch.bool) if mask is None else mask.bool().flatten(0, -2)
        # `where`, not a product with the mask: 0 * NaN is NaN.
        value = torch.where(mask, value, 0.0)
        sums = torch.stack([value.sum(0), (value**2).sum(0), mask.sum(0)])
        sum_G, sum_square_G, count_G = pool(sums)
        mean_G, square_G = sum_G / count_G.clamp(min=1e-6), sum_square_G / count_G.clamp(min=1e-6)
        old_mu, old_sigma, seen_G = self.mu.clone(), self.sigma, count_G > 0
        # beta_t = beta / (1 - (1 - beta)^t): early steps are large, so the initial values are soon forgotten.
        # A discount without values has step 0, not a branch: a branch on a tensor makes a GPU wait.
        t = self.t + seen_G
        step = torch.where(seen_G, self.beta / (1 - (1 - self.beta) ** t), 0.0)
        # mu <- (1 - beta_t) mu + beta_t mean(y),  nu <- (1 - beta_t) nu + beta_t mean(y^2)
        self.t.copy_(t)
        self.mu.lerp_(mean_G, step)
        self.nu.lerp_(square_G, step)
        # Correction of the output layer:  w <- w sigma / sigma',  b <- (sigma b + mu - mu') / sigma'
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
    raw_B1, y_B1 = torch.tensor([[-1.0], [0.0], [1.0]]), torch.tensor([[300.0], [500.0]])

    def show(title: str) -> None:
        "Print the returns that the raw outputs -1, 0, 1 mean, and the loss of the output 1 with the target 500."
        loss = (popart.normalised(raw_B1)[2] - popart.standardise(y_B1)[1]).item() ** 2
        returns = [round(q, 3) for q in popart.denormalised(raw_B1)[:, 0].tolist()]
        print(f"{title}: mu {popart.mu.item():.2f}, sigma {popart.sigma.item():.2f}")
        print(f"  raw outputs -1, 0, 1 mean the returns {returns}; loss of 1 with target 500: {loss:.3f}")

    show("Before the first update")
    print("  by hand: sigma = sqrt(100), loss = ((500 - 10) / 10)^2 = 49^2")
    popart.update(y_B1)
    # t = 2, so beta_t = 0.5 / (1 - 0.25) = 2/3. The second moment was 100, and of these returns it is 170000.
    show("After an update with the returns 300 and 500")
    print("  by hand: mu = 2/3 x 400 = 266.67, nu = 100/3 + 2/3 x 170000 = 113366.67")
    print("           sigma = sqrt(113366.67 - 266.67^2) = 205.56, loss = (490 / 205.56)^2 = 5.682")
