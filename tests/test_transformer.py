"""transformer.py: the authors' numbers, cached = full, causality, and the corners of the cache."""

from pathlib import Path

import numpy as np
import pytest
import torch

from transformer import CausalTransformer, SigmaReparamLinear, sinusoidal_positions

GOLDEN = Path(__file__).parent / "golden"


def model(layers=2, **kwargs):
    torch.manual_seed(0)
    net = CausalTransformer(6, d_model=16, d_ff=32, layers=layers, heads=4, **kwargs).eval()
    with torch.no_grad():  # away from initial values at which mistakes would not show
        for p in net.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return net


def steps(net, x_BTI, time_BT, context):
    "The same inputs, one step at a time."
    cache = net.init_cache(len(x_BTI), context)
    return torch.stack([net.step(x_BTI[:, t], time_BT[:, t], cache) for t in range(x_BTI.shape[1])], dim=1)


def test_sigma_reparam_equals_the_authors_numbers():
    g = {k: torch.as_tensor(v) for k, v in np.load(GOLDEN / "sigma_reparam.npz").items()}
    layer = SigmaReparamLinear(g["weight"].shape[1], g["weight"].shape[0])
    with torch.no_grad():
        layer.weight.copy_(g["weight"]), layer.bias.copy_(g["bias"]), layer.gamma.copy_(g["gamma"])
        layer.u.copy_(g["u0"]), layer.v.copy_(g["v0"])
    close = {"rtol": 1e-4, "atol": 2e-5}
    torch.testing.assert_close(layer.eval()(g["x"]), g["y_eval"], **close)
    torch.testing.assert_close(layer.train()(g["x"]), g["y_train1"], **close)
    torch.testing.assert_close(layer.u, g["u1"], **close)
    torch.testing.assert_close(layer.v, g["v1"], **close)
    layer(g["x"])
    torch.testing.assert_close(layer.u, g["u2"], **close)
    torch.testing.assert_close(layer.v, g["v2"], **close)


def test_sigma_reparam_bounds_the_spectral_norm_whatever_the_weights():
    layer = SigmaReparamLinear(12, 20)
    with torch.no_grad():
        layer.weight.copy_(100 * torch.randn(20, 12))
        for _ in range(200):
            layer(torch.zeros(12))
        sigma = torch.linalg.matrix_norm(layer.weight, 2)
    x = torch.randn(7, 12)
    torch.testing.assert_close(layer.eval()(x), x @ layer.weight.T / sigma, rtol=1e-4, atol=1e-5)


def test_evaluation_leaves_the_singular_vectors_alone():
    layer = SigmaReparamLinear(4, 4).eval()
    with torch.no_grad():
        layer.weight.add_(torch.randn(4, 4))
    before = layer.u.clone()
    layer(torch.zeros(4))
    assert torch.equal(layer.u, before)


def test_positions_by_hand():
    torch.testing.assert_close(
        sinusoidal_positions(torch.tensor([0, 3]), 4),
        torch.tensor([[0.0, 1.0, 0.0, 1.0], [np.sin(3), np.cos(3), np.sin(0.03), np.cos(0.03)]], dtype=torch.float32),
    )


@pytest.mark.parametrize("length", [7, 8])
def test_cached_equals_full_inside_the_window(length):
    net, x_BTI = model(), torch.randn(3, length, 6)
    time_BT = torch.arange(length) + torch.tensor([[0], [5], [300]])
    torch.testing.assert_close(steps(net, x_BTI, time_BT, context=8), net(x_BTI, time_BT), rtol=0, atol=1e-5)


def test_one_layer_equals_the_windowed_full_forward_past_the_limit():
    "With one layer a ring of L slots is a window of L steps, also after it has wrapped around."
    net, x_BTI, context = model(layers=1), torch.randn(2, 20, 6), 8
    time_BT = torch.arange(20).expand(2, 20)
    cached = steps(net, x_BTI, time_BT, context)
    for t in (context - 2, context - 1, context, context + 1, 19):
        window = slice(max(0, t - context + 1), t + 1)
        full = net(x_BTI[:, window], time_BT[:, window])[:, -1]
        torch.testing.assert_close(cached[:, t], full, rtol=0, atol=1e-5)


def test_two_layers_see_further_than_the_window():
    "The documented difference: what left the cache still acts through the second layer's old keys."
    net, x_BTI, context = model(layers=2), torch.randn(1, 10, 6), 8
    time_BT = torch.arange(10).expand(1, 10)
    changed = x_BTI.clone()
    changed[:, 0] += 1.0
    moved = (steps(net, x_BTI, time_BT, context) - steps(net, changed, time_BT, context))[:, -1]
    assert moved.abs().max() > 1e-4


def test_an_environment_reset_in_mid_batch():
    net, x_BTI, context = model(), torch.randn(3, 9, 6), 12
    cache, out, time_B = net.init_cache(3, context), [], torch.zeros(3, dtype=torch.long)
    for t in range(9):
        if t == 4:
            which = torch.tensor([False, True, False])
            net.reset(cache, which)
            time_B[which] = 0
        out.append(net.step(x_BTI[:, t], time_B, cache))
        time_B += 1
    whole = net(x_BTI, torch.arange(9).expand(3, 9))
    again = net(x_BTI[1:2, 4:], torch.arange(5).expand(1, 5))
    torch.testing.assert_close(torch.stack(out, 1)[[0, 2]], whole[[0, 2]], rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.stack(out[4:], 1)[1:2], again, rtol=0, atol=1e-5)


def test_causality_and_padding():
    net, x_BTI, time_BT = model(), torch.randn(2, 9, 6), torch.arange(9).expand(2, 9)
    changed = x_BTI.clone()
    changed[:, 5:] = 1e3 * torch.randn(2, 4, 6)
    torch.testing.assert_close(net(changed, time_BT)[:, :5], net(x_BTI, time_BT)[:, :5], rtol=0, atol=1e-5)
    assert (net(changed, time_BT)[:, 5:] - net(x_BTI, time_BT)[:, 5:]).abs().max() > 0.1


def test_garbage_behind_the_window_moves_no_gradient():
    net, x_BTI, time_BT = model(), torch.randn(2, 9, 6), torch.arange(9).expand(2, 9)
    gradients = []
    for garbage in (0.0, 1e6):
        padded = x_BTI.clone()
        padded[:, 6:] = garbage
        net.zero_grad()
        net(padded, time_BT)[:, :6].square().sum().backward()
        gradients.append([p.grad.clone() for p in net.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_dropout_only_in_training():
    net, x_BTI, time_BT = model(dropout=0.5), torch.randn(1, 4, 6), torch.arange(4)[None]
    assert torch.equal(net(x_BTI, time_BT), net(x_BTI, time_BT))
    net.train()
    assert not torch.equal(net(x_BTI, time_BT), net(x_BTI, time_BT))


def test_bad_sizes_raise():
    with pytest.raises(ValueError, match="multiple of heads"):
        CausalTransformer(4, d_model=10, d_ff=8, layers=1, heads=4)
