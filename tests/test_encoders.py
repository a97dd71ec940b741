"""encoders.py: running statistics against numpy, and what masked entries may not do."""

import numpy as np
import pytest
import torch

from encoders import FeedForwardEncoder, RunningNorm


def batches(count=6, B=4, T=5, O=3):
    "Batches of vectors far from 0, the first without a real one, some vectors of the others masked."
    generator = torch.Generator().manual_seed(0)
    out = []
    for i in range(count):
        x = 100 + torch.randn(B, T, O, generator=generator) * torch.tensor([0.5, 5.0, 50.0]) + 3 * i
        out.append((x, torch.rand(B, T, generator=generator) < (0.6 if i else 0.0)))
    return out


def statistics(norm):
    return norm.count, norm.mean_O, norm.variance_O


def trained(data):
    norm = RunningNorm(3)
    for x, mask in data:
        norm.update(x, mask)
    return norm


def test_statistics_are_those_of_all_unmasked_data():
    data = batches()
    norm = trained(data)
    seen = np.concatenate([x[mask].double().numpy() for x, mask in data])
    assert norm.count.item() == len(seen) > 20
    np.testing.assert_allclose(norm.mean_O.numpy(), seen.mean(0), rtol=1e-10)
    np.testing.assert_allclose(norm.variance_O.numpy(), seen.var(0), rtol=1e-10)
    x = data[-1][0]
    expected = (x.numpy() - seen.mean(0)) / seen.std(0)
    np.testing.assert_allclose(norm(x).numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e6])
def test_masked_entries_cannot_leak(garbage):
    data = batches()
    dirty = [(torch.where(mask.unsqueeze(-1), x, garbage), mask) for x, mask in data]
    for clean, other in zip(statistics(trained(data)), statistics(trained(dirty))):
        assert torch.equal(clean, other)


def test_a_batch_without_a_real_vector_changes_nothing():
    norm = trained(batches())
    before = [x.clone() for x in statistics(norm)]
    norm.update(torch.full((4, 5, 3), float("nan")), torch.zeros(4, 5, dtype=torch.bool))
    assert all(torch.equal(a, b) for a, b in zip(before, statistics(norm)))


def test_one_vector_is_enough_to_be_finite():
    norm = RunningNorm(2)
    norm.update(torch.tensor([[3.0, -1.0]]), torch.tensor([True]))
    assert norm(torch.tensor([3.0, -1.0])).tolist() == [0.0, 0.0]


def test_before_the_first_update_vectors_pass_as_they_are():
    x = torch.tensor([1.5, -9.0, 0.0])
    assert torch.equal(RunningNorm(3)(x), x)


def test_only_update_moves_the_statistics():
    norm = trained(batches()).train()
    before = [x.clone() for x in statistics(norm)]
    norm(torch.randn(7, 3))
    assert all(torch.equal(a, b) for a, b in zip(before, statistics(norm)))


def test_a_feature_that_never_moved_is_zero_and_does_not_explode():
    norm = RunningNorm(2, limit=10.0, floor=0.05)
    norm.update(torch.zeros(100, 2), torch.ones(100, dtype=torch.bool))
    assert norm(torch.zeros(2)).tolist() == [0.0, 0.0]
    torch.testing.assert_close(norm(torch.tensor([0.05, -3.0])), torch.tensor([1.0, -10.0]))


def test_past_its_memory_it_forgets():
    "A jump from 0 to 1: with all data equal the mean would stay below a half, here it arrives."
    all_10, memory = torch.ones(10, dtype=torch.bool), RunningNorm(1, memory=20)
    for value in [0.0] * 50 + [1.0] * 30:
        memory.update(torch.full((10, 1), value), all_10)
    # Each update takes 10 / 20 of the weight, so 30 of them leave 2^-30 of the old mean.
    assert memory.mean_O.item() == pytest.approx(1 - 2.0**-30, abs=1e-12)
    assert memory.variance_O.item() == pytest.approx(2.0**-30, rel=1e-3)


def test_statistics_survive_save_and_load(tmp_path):
    norm = trained(batches())
    torch.save(norm.state_dict(), tmp_path / "norm.pt")
    other = RunningNorm(3)
    other.load_state_dict(torch.load(tmp_path / "norm.pt", weights_only=True))
    more, mask = batches()[-1]
    norm.update(more, mask)
    other.update(more, mask)
    assert all(torch.equal(a, b) for a, b in zip(statistics(norm), statistics(other)))


def test_statistics_keep_their_precision_under_autocast_and_large_counts():
    norm = RunningNorm(3, memory=1e12)
    norm.count.fill_(1e9)  # in float32, 1e9 + 1 = 1e9
    with torch.autocast("cpu", torch.bfloat16):
        norm.update(torch.ones(1, 3), torch.tensor([True]))
        assert norm(torch.ones(3)).dtype == torch.float32
    assert norm.count.item() == 1e9 + 1
    np.testing.assert_allclose(norm.mean_O.numpy(), 1 / (1e9 + 1), rtol=1e-9)


def test_a_mask_that_does_not_fit_is_named():
    norm, x = RunningNorm(3), torch.ones(2, 5, 3)
    for bad_x, mask in (
        (x, torch.ones(2, 5)),  # not boolean: would be indices
        (x, torch.ones(2, dtype=torch.bool)),  # not a mask of every vector
        (x[..., :1], torch.ones(2, 5, dtype=torch.bool)),  # would be broadcast over the features
    ):
        with pytest.raises(ValueError, match=r"expected vectors \(\.\.\., 3\) and a boolean mask"):
            norm.update(bad_x, mask)
    assert norm.count.item() == 0


def test_encoder_shapes_and_normalised_output():
    torch.manual_seed(0)
    encoder = FeedForwardEncoder(input_dim=3, hidden=16, output_dim=8)
    x = torch.randn(2, 5, 3)
    e = encoder(x)
    assert e.shape == (2, 5, 8) and encoder(x[0, 0]).shape == (8,)
    torch.testing.assert_close(e.mean(-1), torch.zeros(2, 5), rtol=0, atol=1e-6)
    torch.testing.assert_close(encoder(x[1, 3]), e[1, 3])  # each step on its own


def test_encoder_normalises_its_input():
    "What the encoder sees is the same in other units, once its statistics are."
    torch.manual_seed(0)
    x, mask = torch.randn(50, 3), torch.ones(50, dtype=torch.bool)
    encoder = FeedForwardEncoder(3, 16, 8)
    encoder.norm.update(x, mask)
    plain = encoder(x)
    encoder.norm = RunningNorm(3)
    encoder.norm.update(1000 * x - 7, mask)
    torch.testing.assert_close(encoder(1000 * x - 7), plain, rtol=1e-3, atol=1e-3)
