r"""Timestep encoders: what the agent observes at one step -> one vector for the Transformer.

What     running input normalisation, and the feed-forward encoder for vector observations
Why      benchmarks mix one-hots, angles and rewards of any size; the Transformer should see them alike
Paper    AMAGO-2 section 3 (o+_t) and Table 2, "Timestep Encoder": FF (512, 256) and FF (512, 200)
Shapes   O observation, E embedding; any leading dimensions: (..., O) -> (..., E)
Notes    The timestep's input is one vector: observation, previous action, previous reward, flags. The
         environment (or the caller) has already put them side by side.
         Statistics change only when `RunningNorm.update` is called, which training does once a batch:
         acting and evaluation never move them.
Copy     this file alone; needs torch
Try      python encoders.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RunningNorm(nn.Module):
    """Normalise vectors (..., O) by running means and standard deviations.

    Arguments: `dim` O; `limit` clips the result; `floor` is the least standard deviation, so that a
    feature which was always 0 (padding) stays 0 and does not explode on its first move; `memory`, in
    vectors, is the most that the past weighs: up to that many the statistics are those of all data seen,
    exactly, and after it they forget exponentially, since a policy's data moves as it learns.
    Before the first update: mean 0 and standard deviation 1, so that vectors within +-`limit` pass as they
    are. Buffers, float64, survive save and load. Source: our choice; the paper leaves this open.
    """

    def __init__(self, dim: int, limit: float = 10.0, floor: float = 0.05, memory: float = 1e6):
        super().__init__()
        self.limit, self.floor, self.memory = limit, floor, memory
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean_O", torch.zeros(dim, dtype=torch.float64))
        self.register_buffer("variance_O", torch.ones(dim, dtype=torch.float64))

    @torch.no_grad()
    def update(self, x: Tensor, mask: Tensor) -> None:
        """Take in the vectors of x (..., O) where the booleans mask (...) are True; without any, do nothing.

        Nothing masked can leak in, NaN included. Raises ValueError for a mask that does not fit.
        """
        # A mask of 0s and 1s would be taken as indices, and the first two vectors counted over and over.
        if mask.dtype != torch.bool or x.shape != (*mask.shape, len(self.mean_O)):
            raise ValueError(
                f"expected vectors (..., {len(self.mean_O)}) and a boolean mask (...), got vectors "
                f"{tuple(x.shape)} and a mask {tuple(mask.shape)} of {mask.dtype}: try mask=mask.bool()"
            )
        # Selected, not multiplied by the mask: 0 * NaN is NaN. In float64, because the count outgrows
        # what float32 can add one to.
        x_NO = x[mask].double()
        if len(x_NO) == 0:
            return
        self.count += len(x_NO)
        # Parallel mean and variance (Chan et al. 1979), with the old share of the weight:
        #   mean' = mean + share * delta,  var' = (1 - share) var + share var_x + share (1 - share) delta^2
        # The first update has share 1: nothing is left of the initial mean 0 and variance 1.
        share = len(x_NO) / self.count.clamp(max=self.memory).clamp(min=len(x_NO))
        delta_O = x_NO.mean(0) - self.mean_O
        spread_O = x_NO.var(0, correction=0)
        self.mean_O += share * delta_O
        self.variance_O.lerp_(spread_O, share).add_(share * (1 - share) * delta_O**2)

    def forward(self, x: Tensor) -> Tensor:
        """(..., O) -> (..., O), float32, within +-limit."""
        deviation_O = self.variance_O.sqrt().clamp(min=self.floor).float()
        return ((x.float() - self.mean_O.float()) / deviation_O).clamp(-self.limit, self.limit)


class FeedForwardEncoder(nn.Module):
    """Observations (..., O) -> embeddings (..., E): normalise, two hidden layers, LayerNorm at the end.

    Arguments: `input_dim` O, `hidden` width of both hidden layers, `output_dim` E. Table 2's FF (512, 200)
    is hidden 512, output 200. `norm` holds the input statistics; call `norm.update` while training.
    Source: paper, appendix A, with the layers of the authors' code.
    """

    def __init__(self, input_dim: int, hidden: int, output_dim: int):
        super().__init__()
        self.norm = RunningNorm(input_dim)
        self.layers = nn.ModuleList(
            [nn.Linear(input_dim, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, output_dim)]
        )
        # The embedding enters the Transformer at one size, whatever the observation's was.
        self.out_norm = nn.LayerNorm(output_dim)

    def forward(self, x: Tensor) -> Tensor:
        """(..., O) -> (..., E)."""
        x = self.norm(x)
        for layer in self.layers[:-1]:
            x = F.leaky_relu(layer(x))
        return self.out_norm(self.layers[-1](x))


if __name__ == "__main__":
    torch.manual_seed(0)
    norm = RunningNorm(3)
    x_BO = torch.tensor([[1.0, 10.0, 0.0], [3.0, 30.0, 0.0], [float("nan"), 99.0, 99.0]])
    print("before any update:", norm(x_BO[0]).tolist())
    norm.update(x_BO, mask=torch.tensor([True, True, False]))
    print("two real vectors, (1, 10, 0) and (3, 30, 0), and a masked one")
    print(f"mean {norm.mean_O.tolist()}, standard deviation {norm.variance_O.sqrt().tolist()}")
    print("they become", norm(x_BO[0]).tolist(), "and", norm(x_BO[1]).tolist())
    encoder = FeedForwardEncoder(input_dim=3, hidden=16, output_dim=8)
    e_BTE = encoder(torch.randn(2, 5, 3))
    print(f"encoder: (B, T, O) = (2, 5, 3) -> (B, T, E) = {tuple(e_BTE.shape)}")
    print(
        f"each embedding has mean {e_BTE[0, 0].mean():.4f} and variance {e_BTE[0, 0].var(correction=0):.4f}"
    )
