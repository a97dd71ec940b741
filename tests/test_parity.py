"""One whole update of each variant against the authors' numbers: what it computes, every gradient, and first weights."""

import json

import pytest
import torch
from authors import GOLDEN, golden, ours, state_dict
from test_update import KeepWeights, padded

import update as update_module
from agent import Agent
from config import Config
from crr_actor import Categorical, TanhGaussian
from presets import preset
from runtime.captured import compile_networks
from transformer import SigmaReparamLinear
from update import VARIANTS, update

FILES = ["ind_ind_discrete", "ind_dep_discrete", "dep_ind_discrete", "dep_dep_discrete"]
FILES += ["ind_ind_continuous", "ind_dep_continuous", "dep_dep_continuous"]


def build(data, name, compiled=False):
    "Our agent with the recorded weights, and its configuration."
    actor, critic, kind = name.split("_")
    sizes = {"encoder_hidden": 16, "encoder_dim": 12, "d_model": 16, "d_ff": 32, "layers": 2, "heads": 2}
    config = Config(
        **sizes,
        hidden=(16, 16),
        critics=4,
        bins=32,
        gammas=tuple(round(g, 6) for g in data["gammas"].tolist()),
        variant=f"{actor}_{critic}",
        prob_low=0.001,
        prob_high=0.99,
        reward_scale=float(data["reward_multiplier"]),
        dropout=0.0,
        precision="float32",
        grad_clip=1e9,
        tau=0.0,
        chunk=1000,
        steps_per_pass=2048,
    )
    inputs, actions = data["obs"].shape[-1] + data["rl2s"].shape[-1], data["actions"].shape[-1]
    agent = Agent(config, inputs, actions, discrete=kind == "discrete")
    missing = agent.load_state_dict(state_dict(data), strict=False)
    assert not missing.unexpected_keys
    assert all(key.startswith("encoder.norm.") for key in missing.missing_keys)
    # Theirs has no input statistics. Ours at 0 and 1 let everything within +-10 pass as it is.
    agent.encoder.norm.update = lambda x, mask: None
    if compiled:
        compile_networks(agent)
    return agent, config


def feed_draws(data, name, agent, monkeypatch):
    "The recorded draws in the order in which they were made, in place of new ones."
    valid = data["valid"]
    recorded = [v for k, v in sorted(data.items()) if k.startswith("draw") and "subset" not in k]
    now = lambda draw_BTGA: draw_BTGA[:, :-1][valid]  # of the state itself
    following = lambda draw_BTGA: draw_BTGA[:, 1:][valid]  # of the next one
    if name.startswith("ind_ind"):
        target, samples = following(recorded[0][0]), torch.stack([now(d) for d in recorded[1]])
    elif name == "dep_ind_discrete":
        target, samples = following(recorded[0][0]), torch.stack([now(d) for d in recorded[1::2]])
        hard = torch.stack([now(d) for d in recorded[2::2]])
    elif name.endswith("dep_continuous"):
        target, samples = following(recorded[-1]), torch.stack([now(d) for d in recorded[:-1]])
    else:
        target, samples = None, None  # expectations are exact

    queue = [target.unsqueeze(0), samples] if samples is not None else []

    def sample(policy, count, generator=None):
        draw = queue.pop(0)
        assert len(draw) == count
        return draw

    def rsample_continuous(policy, count, generator=None):
        "The recorded action again, from the noise that must have made it."
        action = sample(policy, count)
        noise = ((torch.atanh(action) - policy.mean) / policy.log_std.exp()).detach()
        torch.testing.assert_close(policy.from_noise(noise), action, rtol=1e-4, atol=1e-5)
        return policy.from_noise(noise)

    def rsample_discrete(policy, count, generator=None):
        action = policy.from_noise(sample(policy, count))
        torch.testing.assert_close(action, hard)
        return action

    for distribution in (Categorical, TanhGaussian):
        monkeypatch.setattr(distribution, "sample", sample)
    monkeypatch.setattr(TanhGaussian, "rsample", rsample_continuous)
    monkeypatch.setattr(Categorical, "rsample", rsample_discrete)
    (subset,) = (v for k, v in data.items() if "subset" in k)
    subset_RSG = subset[valid].squeeze(-1).movedim(1, 0)
    monkeypatch.setattr("update.draw_subset", lambda critics, shape, device=None: subset_RSG)
    stored_SA = data["actions"][valid]
    if agent.discrete:  # the authors' clip of stored one-hots, kept for this comparison alone
        clipped = stored_SA.clamp(0.001, 0.99)
        stored_SA = clipped / clipped.sum(-1, keepdim=True)
    agent.action_vectors = lambda action: stored_SA
    return queue


def run_update(name, monkeypatch, compiled=False):
    "One update with everything recorded fed in; what was computed on the way, and the agent after it."
    data = golden(f"agent_{name}")
    agent, config = build(data, name, compiled)
    queue = feed_draws(data, name, agent, monkeypatch)
    seen = {}

    def watch(module, function):
        original = getattr(module, function)

        def watched(*args):
            seen[function] = (args, original(*args))
            return seen[function][1]

        monkeypatch.setattr(module, function, watched)

    for function in ("n_step_target", "crr_loss"):
        watch(update_module, function)
    variant = VARIANTS[config.variant]
    watched = {"actor_loss": None, "critic_loss": None}
    for kind in watched:
        original = getattr(variant, kind)
        watched[kind] = lambda *args, kind=kind, original=original: seen.setdefault(kind, original(*args))
    monkeypatch.setitem(VARIANTS, config.variant, variant._replace(**watched))
    batch = padded(
        obs_BTO=torch.cat([data["obs"], data["rl2s"]], -1),
        action_BT=data["actions"],
        reward_BT=data["rewards"].squeeze(-1),
        done_BT=data["dones"].squeeze(-1),
        mask_BT=data["valid"],
        time_BT=data["time_idxs"].squeeze(-1),
        task_B=torch.zeros(len(data["valid"]), dtype=torch.long),
    )
    metrics = update(agent, KeepWeights(), KeepWeights(), batch, config)
    assert not queue, "every recorded draw was used"
    return data, agent, config, seen, metrics


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FILES)
def test_one_update_equals_the_authors(name, compiled, monkeypatch):
    "TD targets, advantages, unreduced losses, their total, PopArt's statistics, and every gradient."
    data, agent, config, seen, metrics = run_update(name, monkeypatch, compiled)
    valid = data["valid"]
    close(seen["n_step_target"][1], data["expect/td_target"][valid][:, 0, :, 0])
    actor_loss_SG, critic_loss_CSG = seen["actor_loss"][0], seen["critic_loss"][0]
    close(actor_loss_SG, data["expect/actor_loss_BTG"][valid].squeeze(-1))
    close(critic_loss_CSG, data["expect/critic_loss_BTCG"][valid].squeeze(-1).movedim(1, 0))
    close(metrics["loss/actor"] + config.critic_weight * metrics["loss/critic"], data["expect/total_loss"])
    if name.startswith("ind"):
        advantage_SG = data["expect/advantage"][:, : valid.shape[1]][valid].squeeze(-1)
        close(seen["crr_loss"][0][1], advantage_SG)
    for statistic in ("mu", "nu", "w", "b"):
        close(getattr(agent.popart, statistic), data[f"expect/popart_{statistic}_after"].view(-1))

    expected = state_dict(data, "grad/")
    got = {key: p.grad for key, p in agent.named_parameters() if p.grad is not None}
    assert set(got) == set(expected) == {key for key, p in agent.named_parameters() if p.requires_grad}
    largest_gamma = max(g.abs().item() for key, g in expected.items() if key.endswith("gamma"))
    for key, gradient in expected.items():
        atol = 1e-4 * gradient.abs().max().item()
        if key.endswith("gamma"):
            # One number, a sum of terms that may cancel: it has the rounding errors of its terms, whose size the other
            # gammas show. dep_dep_continuous has one of 4e-4 beside others of .7; its last digits depend on the CPU.
            atol = max(atol, 1e-6 * largest_gamma)
        torch.testing.assert_close(
            got[key], gradient, rtol=0, atol=atol, msg=lambda m, key=key: f"{key}: {m}"
        )


# ------------------------------------------------------------------------------------------ first weights


@pytest.fixture(scope="module")
def fresh_agent():
    "An untrained agent of the POPGym preset, with the recorded agent's 57 inputs and 27 actions."
    torch.manual_seed(0)
    return Agent(Config(**preset("popgym")), 57, 27, discrete=True)


def test_first_weights_follow_the_authors_laws(fresh_agent):
    "Deviation and largest value of every parameter. Sampling errors shrink with the number n of values."
    recorded, compared = json.loads((GOLDEN / "init.json").read_text()), set()
    parameters = dict(fresh_agent.named_parameters())
    for theirs, law in recorded.items():
        if (pair := ours(theirs, torch.zeros(law["shape"]), heads=8)) is None:
            continue
        name, n = pair[0], pair[1].numel()
        mine = parameters[name].detach()
        assert mine.shape == pair[1].shape, name
        compared.add(name)
        if law["std"] == 0:
            assert (mine == law["mean"]).all(), name
            continue
        assert abs(mine.mean()) < 5 * law["std"] / n**0.5, name
        assert mine.std().item() == pytest.approx(law["std"], rel=5 / n**0.5), name
        # The largest of n uniform numbers lies close to their limit; that of n normal ones varies more.
        normal = law["absmax"] > 3 * law["std"]
        assert mine.abs().max().item() == pytest.approx(law["absmax"], rel=0.25 if normal else 12 / n), name
    assert compared == set(parameters)


def test_fresh_sigma_reparam_layers_know_their_norm(fresh_agent):
    "u and v are the first singular vectors, and outputs on normalised inputs deviate as the authors' do."
    deviations = {"qkv": 0.37, "out": 0.51, "ff1": 0.34, "ff2": 0.67}
    fresh_agent.eval()
    for name, layer in fresh_agent.transformer.named_modules():
        if isinstance(layer, SigmaReparamLinear):
            sigma = torch.linalg.matrix_norm(layer.weight.detach(), 2)
            torch.testing.assert_close(layer.u @ layer.weight.detach() @ layer.v, sigma)
            torch.testing.assert_close(torch.stack([layer.u.norm(), layer.v.norm()]), torch.ones(2))
            x = torch.randn(500, layer.weight.shape[1])
            expected = deviations[name.rsplit(".", 1)[-1]]
            assert layer(x).std().item() == pytest.approx(expected, abs=0.02), name
