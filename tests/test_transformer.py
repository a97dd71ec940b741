"""transformer.py: the authors' numbers, cached = full, causality, and what padding may not do."""

import math

import pytest
import torch
import torch.nn.functional as F
from authors import golden, state_dict

from encoders import FeedForwardEncoder
from transformer import CausalTransformer, SigmaReparamLinear, sinusoidal_positions


def close(a, b, rtol=1e-4, atol=2e-5):
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def model_and_window(T=12, layers=2, B=3, I=6, dropout=0.0):
    torch.manual_seed(0)
    model = CausalTransformer(I, d_model=16, d_ff=32, layers=layers, heads=4, dropout=dropout).eval()
    with torch.no_grad():  # away from the initial values that a forgotten parameter would hide behind
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model, torch.randn(B, T, I), torch.arange(T).expand(B, T)


def play(model, x_BTI, time_BT, cache):
    "Step by step through a window, (B, T, I) -> (B, T, D)."
    return torch.stack([model.step(x_BTI[:, t], time_BT[:, t], cache) for t in range(x_BTI.shape[1])], dim=1)


# ------------------------------------------------------------------------------------- sigma-reparam


def golden_layer(data):
    layer = SigmaReparamLinear(12, 20)
    names = {"weight": "weight", "bias": "bias", "gamma": "gamma", "u": "u0", "v": "v0"}
    layer.load_state_dict({ours: data[theirs] for ours, theirs in names.items()})
    return layer


def test_sigma_reparam_matches_the_authors():
    data = golden("sigma_reparam")
    layer = golden_layer(data)
    close(layer.eval()(data["x"]), data["y_eval"])
    close(layer.u, data["u0"])
    layer.train()
    for i in (1, 2):
        y = layer(data["x"])
        close(layer.u, data[f"u{i}"])
        close(layer.v, data[f"v{i}"])
        if i == 1:
            close(y, data["y_train1"])


def test_no_grad_does_not_stop_the_power_iteration_and_evaluation_does():
    data = golden("sigma_reparam")
    layer = golden_layer(data)
    with torch.no_grad():
        layer(data["x"])
    close(layer.u, data["u1"])
    layer.eval()(data["x"])
    close(layer.u, data["u1"])


def test_gradient_reaches_the_weight_through_sigma():
    "y does not depend on the weight's scale, so its gradient has nothing along the weight."
    layer = golden_layer(golden("sigma_reparam")).eval()
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    (layer(x) ** 2).sum().backward()
    along = (layer.weight.grad * layer.weight).sum()
    size = layer.weight.grad.norm() * layer.weight.norm()
    assert size > 1 and abs(along) < 1e-5 * size
    # And against a difference quotient, which holds u and v fixed as well.
    direction = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(1))
    gradient, losses = layer.weight.grad, []
    with torch.no_grad():
        for step in (1e-3, -2e-3):
            layer.weight += step * direction
            losses.append((layer(x) ** 2).sum().item())
    assert (losses[0] - losses[1]) / 2e-3 == pytest.approx((gradient * direction).sum().item(), rel=1e-2)


def test_repeated_training_forwards_share_one_backward():
    "The second forward moves u and v, which the first one's backward still needs."
    layer = SigmaReparamLinear(6, 4).train()
    x = torch.randn(3, 6)
    (layer(x).sum() + layer(x).sum()).backward()
    assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("inputs, outputs", [(8, 8), (8, 24), (24, 8)])
def test_spectral_norm_is_gamma_from_the_start_and_whatever_the_weights(inputs, outputs):
    torch.manual_seed(0)
    layer = SigmaReparamLinear(inputs, outputs, bias=False).eval()
    with torch.no_grad():
        close(torch.linalg.matrix_norm(layer(torch.eye(inputs)), 2), torch.tensor(1.0))
        layer.gamma.fill_(2.5)
        layer.weight.copy_(100 * torch.randn(outputs, inputs))
        layer.train()
        for _ in range(200):
            effective = layer(torch.eye(inputs))
    close(torch.linalg.matrix_norm(effective, 2), torch.tensor(2.5), rtol=1e-3)


@pytest.mark.parametrize("change", ["update", "load", "gamma", "power iteration", "graph"])
def test_acting_scales_a_weight_once_and_never_uses_a_stale_one(monkeypatch, change):
    torch.manual_seed(0)
    layer, x = SigmaReparamLinear(6, 4), torch.randn(3, 6)
    calls, scaled = [], SigmaReparamLinear.scaled
    monkeypatch.setattr(SigmaReparamLinear, "scaled", lambda self: (calls.append(1), scaled(self))[1])

    @torch.inference_mode()
    def act():
        if layer.training:  # as a policy does: a change of mode forgets the kept weight
            layer.eval()
        return layer(x)

    def move():
        if change == "update":
            layer.weight.grad = torch.randn(4, 6)
            torch.optim.AdamW([layer.weight], lr=0.1).step()
        elif change == "load":
            layer.load_state_dict(SigmaReparamLinear(6, 4).state_dict())
        elif change == "graph":  # a replay moves no version counter; what replays it calls `train`
            layer.weight.data.mul_(torch.rand(4, 1))
            layer.train()
        elif change == "gamma":
            torch.nn.init.constant_(layer.gamma, 2.0)
        else:
            with torch.no_grad():
                layer.weight.mul_(torch.rand(4, 1))  # seen by the forward, which moves u and v
                act()
                layer.train()(x)

    layer.eval()
    before = [act() for _ in range(5)]
    assert len(calls) == 1 and all(torch.equal(y, before[0]) for y in before)
    move()
    after = act()
    assert not torch.equal(after, before[0])
    assert torch.equal(after, F.linear(x, scaled(layer), layer.bias).detach())
    assert layer(x).requires_grad  # evaluation mode with gradient still gives one


def test_sigma_is_exact_under_autocast(monkeypatch):
    "In training mode: the power iteration is a matrix product, which autocast would round to bfloat16."
    data, weights, linear = golden("sigma_reparam"), [], F.linear
    monkeypatch.setattr(F, "linear", lambda x, w, b: (weights.append(w), linear(x, w, b))[1])
    assert golden_layer(data).train()(data["x"]).dtype == torch.float32
    half = golden_layer(data).train()
    with torch.autocast("cpu", torch.bfloat16):
        assert half(data["x"]).dtype == torch.bfloat16
    assert weights[1].dtype == half.u.dtype == half.v.dtype == torch.float32 and torch.equal(*weights)


# ------------------------------------------------------------------------------ the authors' network


def golden_network():
    "The authors' timestep encoder and Transformer, in ours."
    data = golden("agent_ind_ind_discrete")
    encoder, model = FeedForwardEncoder(10, 16, 12), CausalTransformer(12, 16, 32, layers=2, heads=2)
    parts = torch.nn.ModuleDict({"encoder": encoder, "transformer": model})
    weights = {k: v for k, v in state_dict(data).items() if k.startswith(("encoder.", "transformer."))}
    missing = parts.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys and all(
        key.startswith("encoder.norm.") for key in missing.missing_keys
    )
    return data, encoder, model


def golden_states(data, encoder, model):
    "Ours and the authors' states, where they mean something: a window of n real steps has n + 1 states."
    h_BTD = model(encoder(torch.cat([data["obs"], data["rl2s"]], -1)), data["time_idxs"][..., 0])
    mask_BT = F.pad(data["valid"], (1, 0), value=True)
    assert (~mask_BT).any() and mask_BT.sum() > 10
    return h_BTD[mask_BT], data["expect/state_rep"][mask_BT]


def test_states_match_the_authors():
    data, encoder, model = golden_network()
    close(*golden_states(data, encoder, model.train()))


@pytest.mark.parametrize(
    "name", ["head_scale", "qkv.weight", "out.bias", "out.gamma", "norm2.bias", "norm4.weight", "ff1.bias"]
)
def test_states_depend_on_every_kind_of_parameter(name):
    "Parity would be empty of meaning for a part that the authors' numbers cannot see."
    data, encoder, model = golden_network()
    with torch.no_grad():
        model.blocks[0].get_parameter(name).view(-1)[0] += 0.2
    ours, theirs = golden_states(data, encoder, model.train())
    assert not torch.allclose(ours, theirs, rtol=1e-4, atol=2e-5)


def test_positions_by_hand():
    # width 4: rates 1 and 1/100
    expected = [math.sin(3), math.cos(3), math.sin(0.03), math.cos(0.03)]
    close(sinusoidal_positions(torch.tensor([0, 3]), 4), torch.tensor([[0.0, 1.0, 0.0, 1.0], expected]))


# -------------------------------------------------------------------------------- cached = full


def test_cached_equals_full_inside_the_window():
    model, x_BTI, time_BT = model_and_window()
    cache = model.init_cache(batch=3, context=12)
    close(play(model, x_BTI, time_BT, cache), model(x_BTI, time_BT), rtol=0, atol=1e-5)


def test_time_counts_from_the_rollouts_start_in_both():
    model, x_BTI, time_BT = model_and_window()
    late = play(model, x_BTI, time_BT + 500, model.init_cache(3, 12))
    close(late, model(x_BTI, time_BT + 500), rtol=0, atol=1e-5)
    assert (late - model(x_BTI, time_BT)).abs().max() > 0.1


def test_one_environment_starts_anew_amid_the_others():
    model, x_BTI, time_BT = model_and_window()
    time_BT = time_BT.clone()
    time_BT[1, 5:] -= 5  # a new rollout, with a new clock
    cache = model.init_cache(3, context=12)
    before = play(model, x_BTI[:, :5], time_BT[:, :5], cache)
    model.reset(cache, torch.tensor([False, True, False]))
    after = play(model, x_BTI[:, 5:], time_BT[:, 5:], cache)
    full = model(x_BTI, time_BT)
    close(before, full[:, :5], rtol=0, atol=1e-5)
    close(after[[0, 2]], full[[0, 2], 5:], rtol=0, atol=1e-5)
    close(after[1:2], model(x_BTI[1:2, 5:], time_BT[1:2, 5:]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_slots_that_a_sequence_has_not_written_do_not_touch_it(garbage):
    "Whatever they hold: memory that was never written, or the steps of another sequence before a reset."
    model, x_BTI, time_BT = model_and_window()
    foreign = model.init_cache(3, context=12)
    foreign.key.fill_(garbage), foreign.value.fill_(garbage)
    bad_BTI, ended_B = x_BTI.clone(), torch.tensor([False, True, False])
    bad_BTI[1] = garbage
    for cache, first_BTI in ((foreign, x_BTI), (model.init_cache(3, context=12), bad_BTI)):
        before = play(model, first_BTI[:, :5], time_BT[:, :5], cache)
        close(before[[0, 2]], model(x_BTI, time_BT)[[0, 2], :5], rtol=0, atol=1e-5)
        assert first_BTI is x_BTI or garbage == 1e30 or before[1].isnan().all()  # where it is seen, it shows
        model.reset(cache, ended_B)  # from now on shorter than the others
        after = play(model, x_BTI[:, :3], time_BT[:, :3], cache)
        close(after[1:2], model(x_BTI, time_BT)[1:2, :3], rtol=0, atol=1e-5)


def test_a_reset_where_nothing_ended_changes_nothing():
    model, x_BTI, time_BT = model_and_window()
    cache = model.init_cache(3, context=12)
    for t in range(12):
        h_BD = model.step(x_BTI[:, t], time_BT[:, t], cache)
        model.reset(cache, torch.zeros(3, dtype=torch.bool))
    close(h_BD, model(x_BTI, time_BT)[:, -1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("past", [-1, 0, 1, 5, 13])
def test_one_layer_past_the_context_equals_the_window_of_the_last_steps(past):
    L = 6
    T = L + past
    model, x_BTI, time_BT = model_and_window(T=T, layers=1)
    cached = play(model, x_BTI, time_BT, model.init_cache(3, context=L))
    for t in range(T):
        window = slice(max(0, t + 1 - L), t + 1)
        close(cached[:, t], model(x_BTI[:, window], time_BT[:, window])[:, -1], rtol=0, atol=1e-5)


def test_two_layers_agree_up_to_the_context_and_see_further_past_it():
    L = 6
    model, x_BTI, time_BT = model_and_window(T=L + 1)
    cached, full = play(model, x_BTI, time_BT, model.init_cache(3, context=L)), model(x_BTI, time_BT)
    for t in (L - 2, L - 1):
        close(cached[:, t], full[:, t], rtol=0, atol=1e-5)
    assert (cached[:, L] - full[:, L]).abs().max() > 1e-4  # the first step has left the ring
    # What the first step was still moves the output, through keys of the second block made while it was in.
    other = x_BTI.clone()
    other[:, 0] += 1
    moved = play(model, other, time_BT, model.init_cache(3, context=L))[:, L] - cached[:, L]
    windowed = model(other[:, 1:], time_BT[:, 1:]) - model(x_BTI[:, 1:], time_BT[:, 1:])
    assert moved.abs().max() > 1e-4 and (windowed == 0).all()


def test_each_environment_has_its_own_ring():
    "One wraps around while another has just begun."
    L = 4
    model, x_BTI, time_BT = model_and_window(T=7, layers=1)
    cache = model.init_cache(3, context=L)
    play(model, x_BTI[:, :5], time_BT[:, :5], cache)
    model.reset(cache, torch.tensor([False, False, True]))
    last = play(model, x_BTI[:, 5:], time_BT[:, 5:], cache)[:, -1]
    close(last[:2], model(x_BTI[:2, 3:], time_BT[:2, 3:])[:, -1], rtol=0, atol=1e-5)
    close(last[2:], model(x_BTI[2:, 5:], time_BT[2:, 5:])[:, -1], rtol=0, atol=1e-5)
    assert cache.count_B.tolist() == [7, 7, 2]


def test_step_under_autocast_and_with_a_half_precision_cache():
    model, x_BTI, time_BT = model_and_window()
    full = model(x_BTI, time_BT)
    half = play(model, x_BTI, time_BT, model.init_cache(3, 12, dtype=torch.bfloat16))
    close(half, full, rtol=0, atol=0.15)
    with torch.autocast("cpu", torch.bfloat16):
        close(play(model, x_BTI, time_BT, model.init_cache(3, 12)), full, rtol=0, atol=0.15)


# ------------------------------------------------------------------------------------ properties


def test_the_future_changes_nothing():
    model, x_BTI, time_BT = model_and_window()
    full, other = model(x_BTI, time_BT), x_BTI.clone()
    other[:, 7:] = 1e3
    close(model(other, time_BT)[:, :7], full[:, :7], rtol=0, atol=1e-6)
    assert (model(other, time_BT)[:, 7:] - full[:, 7:]).abs().amax(dim=(0, 2)).min() > 0.1


def test_the_past_is_seen_from_afar():
    model, x_BTI, time_BT = model_and_window()
    other = x_BTI.clone()
    other[:, 0] += 1
    moved = (model(other, time_BT) - model(x_BTI, time_BT)).abs().amax(dim=(0, 2))
    assert (moved > 1e-4).all()


def test_padding_changes_neither_states_nor_gradients():
    model, x_BTI, time_BT = model_and_window()
    mask_BT = torch.arange(12) < torch.tensor([[12], [5], [1]])

    def update(garbage):
        x = torch.where(mask_BT.unsqueeze(-1), x_BTI, garbage)
        time = torch.where(mask_BT, time_BT, 0)
        model.zero_grad()
        h_BTD = model(x, time)
        (h_BTD[mask_BT] ** 3).mean().backward()
        return [h_BTD[mask_BT].detach()] + [p.grad.clone() for p in model.parameters()]

    for clean, dirty in zip(update(0.0), update(1e6)):
        assert clean.isfinite().all() and clean.abs().max() > 0
        close(clean, dirty, rtol=1e-5, atol=1e-6)


def test_dropout_acts_in_training_alone(monkeypatch):
    plain, x_BTI, time_BT = model_and_window()
    model, _, _ = model_and_window(dropout=0.5)
    # In training mode u and v move as well, and two forwards would differ for that reason alone.
    monkeypatch.setattr(SigmaReparamLinear, "power_iteration", lambda layer: (layer.u, layer.v))
    assert torch.equal(plain.train()(x_BTI, time_BT), plain(x_BTI, time_BT))
    assert torch.equal(model(x_BTI, time_BT), model(x_BTI, time_BT))
    model.train()
    assert 0.4 < (model.embed(x_BTI, time_BT) == 0).float().mean() < 0.6  # on embeddings
    # And once in the feed-forward, after its second layer: what it adds is dropped, or doubled as a whole.
    block, nothing = model.blocks[0], torch.zeros(3, 12, 4, 4)
    x_BTD = torch.randn(3, 12, 16)
    before = x_BTD + block.norm2(block.out(nothing.flatten(-2)))
    added = block.after_attention(x_BTD, nothing) - before
    whole = block.eval().after_attention(x_BTD, nothing) - before
    dropped = added.abs() < 1e-6
    assert 0.4 < dropped.float().mean() < 0.6
    close(added[~dropped], 2 * whole[~dropped])


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="d_model=10 and heads=4: try d_model=8"):
        CausalTransformer(3, 10, 16, 1, heads=4)
    model, x_BTI, time_BT = model_and_window()
    with pytest.raises(ValueError, match=r"inputs \(3, 12, 6\) and timesteps \(3, 11\)"):
        model(x_BTI, time_BT[:, :-1])
    with pytest.raises(ValueError, match="width 6"):
        model(x_BTI[..., :5], time_BT)
    with pytest.raises(ValueError, match="got 0"):
        model.init_cache(3, context=0)
    with pytest.raises(ValueError, match="3 sequences got one step of 1"):
        model.step(x_BTI[:1, 0], time_BT[:1, 0], model.init_cache(3, 12))
