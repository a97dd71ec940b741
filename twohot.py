r"""Symlog two-hot: scalar returns <-> distributions over N bins.

What     `BinSupport.encode` turns a return into a label over N bins; `twohot_loss` is the cross-entropy with
         that label; `BinSupport.decode` turns predicted logits into a return
Why      the cross-entropy stays in the same range whatever the size of the returns, so a task with large
         rewards cannot dominate the critic's loss (paper, Figure 3)
Paper    AMAGO-2 (arXiv 2411.11188), equation 3 and appendix A, equations 5-8. Symlog and the wide
         limits are DreamerV3's; HL-Gauss labels are Imani & White 2018, Farebrother et al. 2024.
         Authors' code: github.com/UT-Austin-RPL/amago
Shapes   N bins; any leading dimensions: returns (...), labels and logits (..., N). M = N // 2: the bins above
         the centre, each paired with its mirror image below
Notes    ERRATUM: equations 5 and 6 print the two weights swapped. As printed, a return that lies on a bin
           would be labelled as the neighbouring bin. See `BinSupport.encode_unchecked`.
         ERRATUM: appendix A numbers the bins b_0 to b_B and also calls their count B. Here there are N bins,
           b_0 to b_{N-1}.
         DEVIATION: HL-Gauss labels saturate past the limits; the authors' labels sum to about 0 there.
         Supports and losses compute in float32, also under autocast: symexp(symlog(1e5)) overflows in
         float16, and bfloat16 returns of that size are up to 4% off.
Use      support = BinSupport(bins=64)              # the network outputs logits (..., 64)
         loss = twohot_loss(logits, *support.encode(y)).mean()      # y (...): the target returns
         value = support.decode(logits)            # (...): the predicted returns
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


def refuse_nan(value: Tensor) -> None:
    """Raise ValueError if returns (...) contain NaN: NaN has no bin, and would corrupt the critic."""
    if torch.isnan(value).any():
        raise ValueError("cannot encode a return that is NaN: look for the reward or value that is NaN")


class BinSupport(nn.Module):
    """N bins, evenly spaced between two limits in the transformed space.

    Arguments: `bins` N >= 2; `low` < `high`, the limits in units of returns (before symlog); `use_symlog`
    False spaces the bins evenly in the returns themselves. The default limits are the paper's wide ones
    (appendix A), which need no tuning.
    Buffers: `bins_N` are the positions b_0..b_{N-1} in the transformed space; they move with `.to(device)`.
    Raises ValueError for limits in the wrong order or fewer than two bins.
    """

    def __init__(self, bins: int = 64, low: float = -1e5, high: float = 1e5, use_symlog: bool = True):
        super().__init__()
        if bins < 2:
            raise ValueError(f"a support needs at least 2 bins, got {bins}")
        if not low < high:
            raise ValueError(f"the lower limit must be below the upper limit, got low={low} and high={high}")
        self.use_symlog = use_symlog
        ends = torch.tensor([low, high], dtype=torch.float64)
        ends = symlog(ends) if use_symlog else ends
        self.first, self.last = ends.tolist()
        self.width = (self.last - self.first) / (bins - 1)
        self.center = (self.first + self.last) / 2
        # Offsets from the centre are mirrored exactly, o_i = -o_{N-1-i}. Uniform logits then decode to
        # exactly the centre, even when no bin lies on it.
        offset_N = torch.linspace(self.first, self.last, bins, dtype=torch.float64) - self.center
        offset_N = (offset_N - offset_N.flip(0)) / 2
        self.register_buffer("bins_N", (self.center + offset_N).float(), persistent=False)
        self.register_buffer("upper_offset_M", offset_N[(bins + 1) // 2 :].float(), persistent=False)

    def transform(self, value: Tensor) -> Tensor:
        """Map returns (...) to the space in which the bins are evenly spaced, clipped to the limits."""
        value = value.float()
        return (symlog(value) if self.use_symlog else value).clamp(self.first, self.last)

    def encode(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (...) -> (index of the bin below, weight of the bin above it), both (...).

        The two-hot label of a value is 1 - weight at `index`, weight at `index + 1`, 0 elsewhere.
        Source: paper, Eq. 5 and 6. Raises ValueError on NaN.
        """
        refuse_nan(value)
        return self.encode_unchecked(value)

    def encode_unchecked(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """`encode`, (...) -> (...), for callers that already know the values are not NaN.

        A check makes a GPU wait. A NaN gets a valid index and the weight NaN: its loss is NaN, and no lookup
        is out of range.
        """
        position = (self.transform(value) - self.first) / self.width
        # Clamped as an integer: a NaN has no integer, and the clamp brings it into the range of the bins.
        # The last bin is never the one below, since `index + 1` must exist.
        index = position.floor().long().clamp(0, self.bins_N.numel() - 2)
        # ERRATUM. Printed, Eq. 5:  twohot(y)[i-1] = (y - b_{i-1}) / (b_i - b_{i-1})
        #          Printed, Eq. 6:  twohot(y)[i]   = (b_i - y)     / (b_i - b_{i-1})
        # Swapped, as here, the nearer bin has the larger weight, and sum(label * bins) = y.
        weight_above = (position - index).clamp(0.0, 1.0)
        return index, weight_above

    def twohot_labels(self, value: Tensor) -> Tensor:
        """Dense two-hot labels (..., N) of returns (...). For reading and tests; the loss needs none."""
        index, weight_above = self.encode(value)
        below = F.one_hot(index, self.bins_N.numel()) * (1 - weight_above).unsqueeze(-1)
        above = F.one_hot(index + 1, self.bins_N.numel()) * weight_above.unsqueeze(-1)
        return below + above

    def hlgauss_labels(self, value: Tensor, sigma_bins: float = 0.75) -> Tensor:
        """Dense labels (..., N) of returns (...): a Gaussian around the value, integrated over each bin.

        `sigma_bins` is its standard deviation in bin widths. Source: HL-Gauss (Imani & White 2018),
        with the width of Farebrother et al. 2024. Raises ValueError on NaN.
        """
        refuse_nan(value)
        return self.hlgauss_labels_unchecked(value, sigma_bins)

    def hlgauss_labels_unchecked(self, value: Tensor, sigma_bins: float = 0.75) -> Tensor:
        """`hlgauss_labels`, (...) -> (..., N), for callers that already know the values are not NaN.

        A check makes a GPU wait. The labels of a NaN are NaN.
        """
        x = self.transform(value).unsqueeze(-1)
        edges = torch.cat([self.bins_N - self.width / 2, self.bins_N[-1:] + self.width / 2])
        # P(bin i) = [Phi((e_{i+1} - y) / sigma) - Phi((e_i - y) / sigma)], rescaled to sum to 1
        cdf = torch.special.ndtr((edges - x) / (sigma_bins * self.width))
        mass = cdf.diff(dim=-1)
        return mass / mass.sum(-1, keepdim=True)

    def decode(self, logits: Tensor) -> Tensor:
        """Logits (..., N) -> returns (...): the symexp of the mean bin, not the mean of the bins' symexp.

        A 50/50 split between the bins of 0 and 100 therefore decodes to symexp(ln(101) / 2) = 9.05.
        Uniform logits decode to exactly 0 on symmetric limits. Source: paper, appendix A.
        """
        # Q(h, a) = symexp(Q_B(h, a)^T b)
        p = torch.softmax(logits.float(), dim=-1)
        # Plain: x = sum_i p_i b_i. Summed as mirrored pairs (p_{N-1-i} - p_i) o_{N-1-i}, the rounding
        # errors of the two halves cancel, and an untrained critic predicts exactly 0, not 1e-6.
        pairs = self.upper_offset_M.numel()
        difference = p[..., -pairs:] - p[..., :pairs].flip(-1)
        x = self.center + (difference * self.upper_offset_M).sum(-1)
        return symexp(x) if self.use_symlog else x


def twohot_loss(logits: Tensor, index: Tensor, weight_above: Tensor) -> Tensor:
    """Cross-entropy (...) of logits (..., N) against two-hot labels in the form that `encode` returns.

    `index` and `weight_above` broadcast to the leading dimensions of `logits`. Source: Eq. 3.
    """
    logits = logits.float()
    index, weight_above = torch.broadcast_tensors(index, weight_above)
    index = index.expand(logits.shape[:-1]).unsqueeze(-1)
    below = logits.gather(-1, index).squeeze(-1)
    above = logits.gather(-1, index + 1).squeeze(-1)
    # Eq. 3:  L = -twohot(y)^T log Q_B(h, a)
    # Plain: -(labels * log_softmax(logits)).sum(-1). A label has two non-zero entries that sum to 1, so two
    # logits of each row are enough, and no label tensor of the size of the logits is built.
    return torch.logsumexp(logits, dim=-1) - torch.lerp(below, above, weight_above)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy (...) of logits (..., N) against dense labels (..., N) that sum to 1. Source: Eq. 3."""
    # Eq. 3:  L = -label^T log Q_B(h, a)
    return -(labels * torch.log_softmax(logits.float(), dim=-1)).sum(-1)


if __name__ == "__main__":
    rounded = lambda values, digits: [round(x, digits) for x in values.tolist()]
    support, y = BinSupport(bins=9, low=-math.expm1(4), high=math.expm1(4)), torch.tensor(3.3)
    index, above = support.encode(y)
    label_N = support.twohot_labels(y)
    print("9 bins, evenly spaced in symlog space:", rounded(support.bins_N, 2))
    print("The label of the return 3.3:", rounded(label_N, 4))
    print("  by hand: symlog(3.3) = ln 4.3 = 1.4586 lies between bin 5 at 1 and bin 6 at 2;")
    print("           weights 2 - 1.4586 and 1.4586 - 1, the larger one for the nearer bin")
    print(f"  decoded: exp(0.5414 x 1 + 0.4586 x 2) - 1 = {support.decode(label_N.log()):.4f}")
    swapped = symexp(above * 1 + (1 - above) * 2)
    print(f"  decoded with the weights swapped, as equations 5 and 6 print them: {swapped:.4f}")
    print(f"The loss of uniform logits: {twohot_loss(torch.zeros(9), index, above):.4f} = ln 9")

    print("The same relative error at three scales, with 128 bins: a prediction of 1.1 y instead of y")
    wide = BinSupport(bins=128)
    for y in (1.0, 100.0, 10_000.0):
        # Mixed with 1% of a uniform distribution: a label's zeros would make the cross-entropy infinite.
        prediction = (wide.twohot_labels(torch.tensor(1.1 * y)) + 0.01 / 128).log()
        ce = twohot_loss(prediction, *wide.encode(torch.tensor(y)))
        print(f"  y = {y:>7g}: cross-entropy {ce:.3f}, squared error {(0.1 * y) ** 2:g}")
