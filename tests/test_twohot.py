"""twohot.py: the authors' numbers, values by hand, and known pitfalls of two-hot codes."""

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
    torch.testing.assert_close(labels.sum(-1), torch.ones(len(labels)))  # DEVIATION: also past the limits


def test_erratum_the_nearer_bin_gets_the_larger_weight():
    "As printed, equations 5 and 6 would give this value the weights 0.25 and 0.75."
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


@pytest.mark.parametrize("label", ["encode", "hlgauss_labels"])
def test_labels_without_the_check_equal_those_with_it(label):
    for support in (BinSupport(bins=33), BinSupport(bins=8, low=-3.0, high=5.0, use_symlog=False)):
        checked, unchecked = getattr(support, label), getattr(support, f"{label}_unchecked")
        y = torch.cat([torch.randn(1000) * 10 ** torch.linspace(-3, 6, 1000), support.bins_N])
        for a, b in zip(checked(y), unchecked(y)):
            assert torch.equal(a, b)
        with pytest.raises(ValueError, match="NaN"):
            checked(torch.tensor([float("nan")]))


def test_a_loss_of_nan_is_nan_when_nothing_checks_it():
    "The update skips such a batch; an index outside the bins would stop a GPU instead."
    support, logits = BinSupport(bins=8), torch.randn(2, 8)
    y = torch.tensor([1.0, float("nan")])
    for loss in (
        twohot_loss(logits, *support.encode_unchecked(y)),
        cross_entropy(logits, support.hlgauss_labels_unchecked(y)),
    ):
        assert loss.isnan().tolist() == [False, True]


def test_the_unchecked_path_runs_on_the_meta_device():
    "A branch on a tensor's values would raise there."
    support, logits = BinSupport(bins=8).to("meta"), torch.empty(5, 8, device="meta")
    y = torch.empty(5, device="meta")
    loss = twohot_loss(logits, *support.encode_unchecked(y))
    loss = loss + cross_entropy(logits, support.hlgauss_labels_unchecked(y)) + support.decode(logits)
    assert loss.shape == (5,)
    with pytest.raises((RuntimeError, NotImplementedError)):
        support.encode(y)


def test_bad_supports_raise():
    with pytest.raises(ValueError, match="lower limit"):
        BinSupport(8, 1.0, 1.0)
    with pytest.raises(ValueError, match="2 bins"):
        BinSupport(1)


def test_two_index_loss_equals_the_dense_one_and_its_gradient():
    support = BinSupport(bins=16)
    logits = torch.randn(5, 7, 16, dtype=torch.float32, requires_grad=True)
    y = torch.randn(7) * 1000  # one target for all critics on the first axis
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
    half = torch.tensor([1000.0, 3.3]).bfloat16()  # bfloat16 input, float32 labels
    torch.testing.assert_close(support.encode(half)[1], support.encode(half.float())[1], rtol=0, atol=0)
