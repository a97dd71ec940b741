"""encoders.py: running statistics against numpy, and what masked entries may not do."""

import numpy as np
import torch

from encoders import FeedForwardEncoder, RunningNorm


def test_statistics_equal_numpy_over_all_real_vectors():
    rng, norm, seen = np.random.default_rng(0), RunningNorm(3, limit=1e9), []
    for scale in (1.0, 5.0, 0.3):
        x = torch.from_numpy(rng.normal(2.0, scale, size=(4, 7, 3)).astype(np.float32))
        mask = torch.from_numpy(rng.random((4, 7)) < 0.6)
        norm.update(x, mask)
        seen.append(x[mask].double().numpy())
    seen = np.concatenate(seen)
    np.testing.assert_allclose(norm.mean_O, seen.mean(0), rtol=1e-6)
    np.testing.assert_allclose(norm.variance_O, seen.var(0), rtol=1e-6)
    x = torch.tensor([1.0, 2.0, 3.0])
    np.testing.assert_allclose(norm(x), (x.numpy() - seen.mean(0)) / seen.std(0), rtol=1e-4)


def test_masked_nan_does_not_leak_and_an_empty_batch_changes_nothing():
    norm = RunningNorm(2)
    x = torch.tensor([[1.0, 2.0], [float("nan"), float("inf")], [3.0, 6.0]])
    norm.update(x, torch.tensor([True, False, True]))
    assert norm.mean_O.tolist() == [2.0, 4.0] and norm.variance_O.tolist() == [1.0, 4.0]
    before = {k: v.clone() for k, v in norm.state_dict().items()}
    norm.update(x, torch.zeros(3, dtype=torch.bool))
    assert all(torch.equal(before[k], v) for k, v in norm.state_dict().items())


def test_identity_before_any_update_and_only_update_changes_statistics():
    norm, x = RunningNorm(2), torch.tensor([[1.0, -2.0]])
    assert torch.equal(norm.train()(x), x)
    assert norm.count == 0


def test_padding_stays_zero_and_does_not_explode_when_it_first_moves():
    norm = RunningNorm(2)
    norm.update(torch.stack([torch.randn(1000), torch.zeros(1000)], -1), torch.ones(1000, dtype=torch.bool))
    assert norm(torch.tensor([0.0, 0.0]))[1] == 0
    assert norm(torch.tensor([0.0, 1.0]))[1] == norm.limit


def test_old_statistics_fade_once_memory_is_full():
    norm = RunningNorm(1, memory=100)
    norm.update(torch.zeros(1000, 1), torch.ones(1000, dtype=torch.bool))
    for _ in range(50):
        norm.update(torch.ones(10, 1), torch.ones(10, dtype=torch.bool))
    assert norm.mean_O.item() > 0.99  # 1 - 0.9^50


def test_statistics_survive_save_and_load():
    encoder = FeedForwardEncoder(3, 8, 4)
    encoder.norm.update(torch.randn(50, 3) * 7, torch.ones(50, dtype=torch.bool))
    other = FeedForwardEncoder(3, 8, 4)
    other.load_state_dict(encoder.state_dict())
    x = torch.randn(5, 3)
    assert torch.equal(encoder(x), other(x))


def test_encoder_output_is_normalised():
    e = FeedForwardEncoder(3, 8, 16)(torch.randn(2, 5, 3) * 100)
    assert e.shape == (2, 5, 16)
    torch.testing.assert_close(e.mean(-1), torch.zeros(2, 5), rtol=0, atol=1e-5)
