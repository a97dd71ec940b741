"""twohot.py: against the authors' numbers, by hand, and the traps that two-hot codecs fall into."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from twohot import BinSupport, cross_entropy, symexp, symlog, twohot_loss

GOLDEN = sorted((Path(__file__).parent / "golden").glob("labels_*.npz"))


def golden(path):
    data = {k: torch.as_tensor(v) for k, v in np.load(path).items()}
    support = BinSupport(len(data["bins"]), float(data["low"]), float(data["high"]), "symlog" in path.stem)
    return support, data


def test_all_five_supports_are_here():
    assert len(GOLDEN) == 5


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_equals_the_authors_numbers(path):
    support, data = golden(path)
    close = {"rtol": 1e-4, "atol": 2e-5}
    torch.testing.assert_close(support.bins_N, data["bins"], **close)
    torch.testing.assert_close(support.twohot_labels(data["values"]), data["labels_twohot"], **close)
    torch.testing.assert_close(support.decode(data["decode_logits"]), data["decoded"], **close)
    inside = (data["values"] >= data["low"]) & (data["values"] <= data["high"])
    assert inside.sum() > 50
    labels = support.hlgauss_labels(data["values"])
    torch.testing.assert_close(labels[inside], data["labels_hlgauss"][inside], **close)
    torch.testing.assert_close(labels.sum(-1), torch.ones(len(labels)))  # DEVIATION: past the limits, too


def test_erratum_the_nearer_bin_gets_the_larger_weight():
    "Equations 5 and 6 as printed would give .25, .75 to a value a quarter of the way up."
    support = BinSupport(bins=3, low=-4.0, high=4.0, use_symlog=False)
    index, above = support.encode(torch.tensor(1.0))
    assert (index.item(), above.item()) == (1, 0.25)
    assert support.twohot_labels(torch.tensor(1.0)).tolist() == [0.0, 0.75, 0.25]


def test_label_and_decode_are_inverse():
    support = BinSupport(bins=64)
    y = torch.tensor([-9.9e4, -120.0, -3.3, -1e-3, 0.0, 0.5, 3.3, 7e3, 1e5])
    torch.testing.assert_close(support.decode(support.twohot_labels(y).log()), y, rtol=2e-4, atol=1e-5)
    torch.testing.assert_close(symexp(symlog(y)), y, rtol=1e-5, atol=0)


@pytest.mark.parametrize("bins", [32, 33, 64, 128])
def test_uniform_logits_decode_to_exactly_zero(bins):
    for low, use_symlog in ((-1e5, True), (-110.0, False)):
        assert (
            BinSupport(bins, low, -low, use_symlog).decode(torch.full((3, bins), 0.7)).tolist() == [0.0] * 3
        )


def test_decode_is_symexp_of_the_mean_bin():
    support = BinSupport(bins=2, low=0.0, high=100.0)  # a limit of 0 stays 0
    assert support.bins_N[0] == 0
    assert support.decode(torch.zeros(2)).item() == pytest.approx(math.sqrt(101) - 1, rel=1e-5)  # 9.05


def test_linear_limits_are_not_symlogged():
    assert BinSupport(3, -110.0, 110.0, use_symlog=False).bins_N.tolist() == [-110.0, 0.0, 110.0]


def test_values_past_the_limits_saturate():
    support = BinSupport(bins=32, low=-10.0, high=10.0)
    labels = support.twohot_labels(torch.tensor([1e9, -1e9, float("inf")]))
    assert labels[0, -1] == labels[1, 0] == labels[2, -1] == 1
    assert labels.sum(-1).tolist() == [1.0] * 3


def test_nan_raises():
    with pytest.raises(ValueError, match="NaN"):
        BinSupport().encode(torch.tensor([0.0, float("nan")]))


def test_bad_supports_raise():
    with pytest.raises(ValueError, match="lower limit"):
        BinSupport(8, 1.0, 1.0)
    with pytest.raises(ValueError, match="2 bins"):
        BinSupport(1)


def test_two_index_loss_equals_the_dense_one_and_its_gradient():
    support = BinSupport(bins=16)
    logits = torch.randn(5, 7, 16, dtype=torch.float32, requires_grad=True)
    y = torch.randn(7) * 1000  # broadcasts over the first axis, as one target does over critics
    sparse = twohot_loss(logits, *support.encode(y))
    dense = cross_entropy(logits, support.twohot_labels(y))
    torch.testing.assert_close(sparse, dense)
    (g_sparse,) = torch.autograd.grad(sparse.sum(), logits)
    (g_dense,) = torch.autograd.grad(dense.sum(), logits)
    torch.testing.assert_close(g_sparse, g_dense, rtol=1e-5, atol=1e-6)


def test_float32_under_autocast():
    support, y = BinSupport(bins=128), torch.tensor([1e5, 99_999.0, 3.3])
    logits = torch.randn(3, 128)
    expected = support.encode(y)[1], support.decode(logits), twohot_loss(logits, *support.encode(y))
    with torch.autocast("cpu", torch.bfloat16):
        got = support.encode(y)[1], support.decode(logits), twohot_loss(logits, *support.encode(y))
    for a, b in zip(got, expected):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert twohot_loss(logits.bfloat16(), *support.encode(y)).dtype == torch.float32
    half = torch.tensor([1000.0, 3.3]).bfloat16()  # a value that comes in half precision is not coded in it
    torch.testing.assert_close(support.encode(half)[1], support.encode(half.float())[1], rtol=0, atol=0)
