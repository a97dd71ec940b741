r"""Symlog two-hot: scalar returns <-> distributions over N bins.

What     turns value regression into classification: a return becomes a label over N bins, a
         distribution over the bins becomes a return, and the critic's loss is a cross-entropy
Why      a classifier's loss hardly grows with the size of the return that it predicts, so no task
         drowns the others because its rewards are large (paper, Figure 3)
Paper    AMAGO-2 (arXiv 2411.11188), equation 3 and appendix A, equations 5-8. Symlog and the wide
         limits are DreamerV3's; HL-Gauss labels are Imani & White 2018, Farebrother et al. 2024.
         Authors' code: github.com/UT-Austin-RPL/amago
Shapes   N bins; any leading dimensions: returns (...), labels and logits (..., N). M = N // 2: bins above
         the centre, each paired with its mirror image below
Notes    ERRATUM: equations 5 and 6 print the two weights swapped: as printed, a return that lies on a
           bin would be labelled as its neighbour. See `BinSupport.encode`.
         ERRATUM: appendix A counts bins b_0 to b_B and calls them B; here they are N, b_0 to b_N-1.
         DEVIATION: HL-Gauss labels saturate past the limits; the authors' sum to about 0 there.
         Whatever the autocast, a support and the losses compute in float32: symexp(symlog(1e5)) overflows
         in float16, and in bfloat16 returns of that size come back up to 4% off.
Use      support = BinSupport(bins=64)              # beside a network that puts out logits (..., 64)
         loss = twohot_loss(logits, *support.encode(y)).mean()      # y (...): what it should say
         value = support.decode(logits)            # (...): what it says
Copy     this file alone; needs torch
Try      python twohot.py
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def symlog(x: Tensor) -> Tensor:
    """Compress x of any shape: linear near 0, logarithmic far from it. Source: paper, Eq. 7."""
    # Eq. 7:  symlog(y) = sign(y) ln(|y| + 1)
    return torch.sign(x) * torch.log1p(torch.abs(x))


def symexp(x: Tensor) -> Tensor:
    """Invert `symlog`, elementwise on any shape. Source: paper, Eq. 8."""
    # Eq. 8:  symexp(b) = sign(b) (exp(|b|) - 1)
    return torch.sign(x) * torch.expm1(torch.abs(x))


class BinSupport(nn.Module):
    """N bins, evenly spaced between two limits in the transformed space.

    Arguments: `bins` N >= 2; `low` < `high`, limits in units of returns (before symlog); `use_symlog`
    False spaces the bins evenly in the returns themselves. Defaults: the paper's wide limits
    (appendix A), which need no tuning.
    Buffers: `bins_N` positions b_0..b_{N-1} in the transformed space; it moves with `.to(device)`.
    Raises ValueError for limits in the wrong order or fewer than two bins.
    """

    def __init__(self, bins: int = 64, low: float = -1e5, high: float = 1e5, use_symlog: bool = True):
        super().__init__()
        if bins < 2:
            raise ValueError(f"a support needs at least 2 bins, got {bins}")
        if not low < high:
            raise ValueError(f"the lower limit must lie below the upper, got low={low} and high={high}")
        self.use_symlog = use_symlog
        ends = torch.tensor([low, high], dtype=torch.float64)
        ends = symlog(ends) if use_symlog else ends
        self.first, self.last = ends.tolist()
        self.width = (self.last - self.first) / (bins - 1)
        self.center = (self.first + self.last) / 2
        # Offsets from the centre are mirrored by construction, o_i = -o_{N-1-i} to the last bit: that
        # makes the decoded value of uniform logits exactly the centre, even when no bin lies on it.
        offset_N = torch.linspace(self.first, self.last, bins, dtype=torch.float64) - self.center
        offset_N = (offset_N - offset_N.flip(0)) / 2
        self.register_buffer("bins_N", (self.center + offset_N).float(), persistent=False)
        self.register_buffer("upper_offset_M", offset_N[(bins + 1) // 2 :].float(), persistent=False)

    def transform(self, value: Tensor) -> Tensor:
        """Map returns (...) to the space in which the bins are evenly spaced, saturated at the limits.

        Raises ValueError on NaN: a NaN has no bin, and a label made from one would poison the critic.
        """
        value = value.float()
        if torch.isnan(value).any():
            raise ValueError("a return to be encoded is NaN: look for the reward or value that made it")
        x = symlog(value) if self.use_symlog else value
        return x.clamp(self.first, self.last)

    def encode(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (...) -> (index of the bin below, weight of the bin above it), both (...).

        The two-hot label of a value is 1 - weight at `index`, weight at `index + 1`, 0 elsewhere.
        Source: paper, Eq. 5 and 6. Raises ValueError on NaN.
        """
        position = (self.transform(value) - self.first) / self.width
        last = self.bins_N.numel() - 1
        index = position.floor().clamp(0, last - 1)
        # ERRATUM. Printed, Eq. 5:  twohot(y)[i-1] = (y - b_{i-1}) / (b_i - b_{i-1})
        #          Printed, Eq. 6:  twohot(y)[i]   = (b_i - y)     / (b_i - b_{i-1})
        # Swapped, as here, the nearer bin takes the larger share and sum(label * bins) gives y back.
        weight_above = (position - index).clamp(0.0, 1.0)
        return index.long(), weight_above

    def twohot_labels(self, value: Tensor) -> Tensor:
        """Dense two-hot labels (..., N) of returns (...). For reading and tests; the loss needs none."""
        index, weight_above = self.encode(value)
        below = F.one_hot(index, self.bins_N.numel()) * (1 - weight_above).unsqueeze(-1)
        above = F.one_hot(index + 1, self.bins_N.numel()) * weight_above.unsqueeze(-1)
        return below + above

    def hlgauss_labels(self, value: Tensor, sigma_bins: float = 0.75) -> Tensor:
        """Dense labels (..., N): a Gaussian around the value, integrated over each bin.

        `sigma_bins` is its standard deviation in bin widths. Source: HL-Gauss (Imani & White 2018),
        with the width of Farebrother et al. 2024. Raises ValueError on NaN.
        """
        x = self.transform(value).unsqueeze(-1)
        edges = torch.cat([self.bins_N - self.width / 2, self.bins_N[-1:] + self.width / 2])
        # P(bin i) = [Phi((e_{i+1} - y) / sigma) - Phi((e_i - y) / sigma)], rescaled to sum to 1
        cdf = torch.special.ndtr((edges - x) / (sigma_bins * self.width))
        mass = cdf.diff(dim=-1)
        return mass / mass.sum(-1, keepdim=True)

    def decode(self, logits: Tensor) -> Tensor:
        """Logits (..., N) -> returns (...): symexp of the mean bin, not the mean of symexp'd bins.

        A 50/50 split between the bins of 0 and 100 therefore decodes to symexp(ln(101) / 2) = 9.05.
        Uniform logits decode to exactly 0 on symmetric limits. Source: paper, appendix A.
        """
        # Q(h, a) = symexp(Q_B(h, a)^T b)
        p = torch.softmax(logits.float(), dim=-1)
        # Plain: x = sum_i p_i b_i. Summed as mirrored pairs (p_{N-1-i} - p_i) o_{N-1-i}, the rounding
        # errors of the two halves cancel, and an untrained critic says 0, not 1e-6.
        pairs = self.upper_offset_M.numel()
        difference = p[..., -pairs:] - p[..., :pairs].flip(-1)
        x = self.center + (difference * self.upper_offset_M).sum(-1)
        return symexp(x) if self.use_symlog else x


def twohot_loss(logits: Tensor, index: Tensor, weight_above: Tensor) -> Tensor:
    """Cross-entropy (...) of logits (..., N) against two-hot labels, given as `encode` returns them.

    `index` and `weight_above` broadcast to the leading dimensions of `logits`. Source: Eq. 3.
    """
    logits = logits.float()
    index, weight_above = torch.broadcast_tensors(index, weight_above)
    index = index.expand(logits.shape[:-1]).unsqueeze(-1)
    below = logits.gather(-1, index).squeeze(-1)
    above = logits.gather(-1, index + 1).squeeze(-1)
    # Eq. 3:  L = -twohot(y)^T log Q_B(h, a)
    # Plain: -(labels * log_softmax(logits)).sum(-1). The labels sum to 1 and have two non-zero entries,
    # so two numbers of each row suffice, and no label tensor of the size of the logits is ever built.
    return torch.logsumexp(logits, dim=-1) - torch.lerp(below, above, weight_above)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy (...) of logits (..., N) against dense labels (..., N) that sum to 1. Source: Eq. 3."""
    # Eq. 3:  L = -label^T log Q_B(h, a)
    return -(labels * torch.log_softmax(logits.float(), dim=-1)).sum(-1)


if __name__ == "__main__":
    support = BinSupport(bins=9, low=-math.expm1(4), high=math.expm1(4))
    b_N = support.bins_N
    print("9 bins, evenly spaced in symlog space:", [round(b, 2) for b in b_N.tolist()])
    print("  the returns they stand for:         ", [round(b, 2) for b in symexp(b_N).tolist()])

    print("\nthe return y = 3.3, step by step")
    y = torch.tensor(3.3)
    x = support.transform(y)
    index, above = support.encode(y)
    i = index.item()
    print(f"  1 symlog      ln(3.3 + 1) = {x.item():.4f}")
    print(f"  2 neighbours  bin {i} at {b_N[i].item():.0f} and bin {i + 1} at {b_N[i + 1].item():.0f}")
    print(
        f"  3 weights     below 2 - {x.item():.4f} = {1 - above.item():.4f}, above {x.item():.4f} - 1", end=""
    )
    print(f" = {above.item():.4f}; the nearer bin has the larger share")
    label_N = support.twohot_labels(y)
    print("  4 label      ", [round(p, 4) for p in label_N.tolist()])
    mean = (label_N * b_N).sum()
    print(
        f"  5 mean bin    {label_N[i].item():.4f} x 1 + {label_N[i + 1].item():.4f} x 2 = {mean.item():.4f}"
    )
    print(f"  6 symexp      exp({mean.item():.4f}) - 1 = {support.decode(label_N.log()).item():.4f}, y again")
    swapped = above * b_N[i] + (1 - above) * b_N[i + 1]
    print(f"  with the weights swapped, as equations 5 and 6 print them: {symexp(swapped).item():.4f}")
    print("  HL-Gauss's label of y:", [round(p, 4) for p in support.hlgauss_labels(y).tolist()])

    print("\nthe loss of a critic that knows nothing, and where it pulls")
    logits_N = torch.zeros(9, requires_grad=True)
    loss = twohot_loss(logits_N, index, above)
    loss.backward()
    print(f"  uniform logits decode to {support.decode(logits_N).item()}, loss {loss.item():.4f}", end="")
    print(f" = ln 9 = {math.log(9):.4f}")
    print("  gradient", [round(g, 4) for g in logits_N.grad.tolist()], "= 1/9 - label")

    print("\nthe same relative error at three scales: a two-hot of 1.1 y, with 1% spread over all bins")
    wide = BinSupport(bins=128)
    for scale in (1.0, 100.0, 10_000.0):
        prediction = (wide.twohot_labels(torch.tensor(1.1 * scale)) + 0.01 / 128).log()
        ce = twohot_loss(prediction, *wide.encode(torch.tensor(scale)))
        print(f"  y = {scale:>7g}: cross-entropy {ce.item():.3f}, squared error {(0.1 * scale) ** 2:g}")
