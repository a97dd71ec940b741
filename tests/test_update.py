"""update.py and agent.py: the gradient step in all four variants, and the acting policy."""

import contextlib
import dataclasses

import numpy as np
import pytest
import torch

import update as update_module
from agent import Agent, Policy, ScalarValue, TwoHotValue
from config import Config
from critics import n_step_target, td_target
from crr_actor import Categorical
from presets import preset
from replay import Batch, Replay
from train import make_optimizer
from update import VARIANTS, groups, next_values, update


def small(**changes):
    sizes = {"encoder_hidden": 16, "encoder_dim": 12, "d_model": 16, "d_ff": 32, "layers": 2, "heads": 2}
    sizes |= {"hidden": (16, 16), "bins": 16, "gammas": (0.5, 0.9), "dropout": 0.0, "precision": "float32"}
    sizes |= {"chunk": 256, "steps_per_pass": 2048}
    return Config(**{**sizes, **changes})


def padded(mask_BT, **fields):
    "A batch whose host-side fields follow from its mask."
    lengths = tuple(mask_BT.sum(1).tolist())
    real_S = mask_BT.flatten().nonzero()[:, 0]
    weight_S = torch.full((len(real_S),), 1 / len(real_S))
    return Batch(mask_BT=mask_BT, real_S=real_S, weight_S=weight_S, lengths=lengths, **fields)


def window(B=4, T=9, O=7, A=3, seed=0):
    rng = torch.Generator().manual_seed(seed)
    length_B = torch.tensor([9, 5, 1, 7])
    mask_BT = torch.arange(T) < length_B[:, None]
    return padded(
        obs_BTO=torch.randn(B, T + 1, O, generator=rng),
        action_BT=torch.randint(A, (B, T), generator=rng),
        reward_BT=torch.randn(B, T, generator=rng),
        done_BT=torch.arange(T) == length_B[:, None] - 1,
        mask_BT=mask_BT,
        time_BT=torch.arange(T + 1).expand(B, T + 1) + torch.tensor([[0], [3], [0], [40]]),
        task_B=torch.zeros(B, dtype=torch.long),
    )


class KeepWeights:
    "In place of an optimizer and its schedule: gradients stay where a test can look at them."

    def zero_grad(self):
        pass

    def step(self, *made):
        pass


def losses_of(agent, config, h_SD, next_SD, stored_SA, reward_S, terminated_S):
    "Both losses of some states, as `update` computes them."
    variant, stored_S1A = VARIANTS[config.variant], stored_SA.unsqueeze(1)
    y_SG = td_target(reward_S, terminated_S, next_values(agent, next_SD, variant.reduce), agent.gamma_G)
    agent.popart.update(y_SG)
    critic_loss_CSG, q_CSG, metrics = variant.critic_loss(agent, h_SD, stored_S1A, y_SG)
    policy = agent.policy(agent.actor(h_SD))
    actor_loss_SG, more = variant.actor_loss(agent, config, h_SD, stored_S1A, policy, q_CSG)
    return actor_loss_SG, critic_loss_CSG, metrics | more


def gradients(config, batch, seed=0, num_tasks=1):
    torch.manual_seed(seed)
    agent = Agent(config, observation_dim=7, action_dim=3, discrete=True)
    torch.manual_seed(1)
    metrics = update(agent, KeepWeights(), KeepWeights(), batch, config, num_tasks)
    return agent, metrics, {n: p.grad for n, p in agent.named_parameters() if p.grad is not None}


@pytest.fixture
def no_chance(monkeypatch):
    "Deterministic policies and subsets, so that draws do not depend on how states are grouped."
    monkeypatch.setattr(
        Categorical, "sample", lambda self, k, generator=None: self.mode().expand(k, *self.probs.shape)
    )
    zeros = lambda self, k: torch.zeros(k, *self.probs.shape)
    monkeypatch.setattr(Categorical, "rsample", lambda self, k: self.from_noise(zeros(self, k)))
    monkeypatch.setattr(
        "update.draw_subset", lambda critics, shape, device=None: torch.zeros(2, *shape, dtype=torch.long)
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_chunk_size_changes_nothing(no_chance, variant):
    _, whole, expected = gradients(small(chunk=1000, grad_clip=1e9, variant=variant), window())
    _, parts, got = gradients(small(chunk=5, grad_clip=1e9, variant=variant), window())
    assert abs(whole["loss/critic"] - parts["loss/critic"]) < 1e-5
    assert set(got) == set(expected) and len(got) > 30
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("steps", "parts"), [(1, 4), (20, 2), (1000, 2)])
def test_groups_of_windows_change_nothing(no_chance, variant, steps, parts):
    "One window at a time, two, or all: the same gradients, losses and shares; weights by steps, not by windows."
    batch, config = window(), small(chunk=5, grad_clip=1e9, variant=variant)
    whole_config = dataclasses.replace(config, steps_per_pass=1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update_module, "groups", lambda batch, config: [batch])
        _, whole, expected = gradients(whole_config, batch)
    config = dataclasses.replace(config, steps_per_pass=steps)
    assert len(groups(batch, config)) == parts
    _, split, got = gradients(config, batch)
    assert set(got) == set(expected) and split.keys() == whole.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6)
    # With ind_ind, PopArt serves the log alone, and learns from one group at a time.
    for name in whole.keys() - {"popart/mu", "popart/sigma"}:
        torch.testing.assert_close(split[name], whole[name], rtol=1e-4, atol=1e-6)


def test_a_group_is_trimmed_to_its_longest_window():
    batch = window()
    length_B = torch.tensor([9, 8, 5, 2])
    mask_BT = torch.arange(9) < length_B[:, None]
    batch = batch._replace(mask_BT=mask_BT, real_S=mask_BT.flatten().nonzero()[:, 0], lengths=(9, 8, 5, 2))
    parts = groups(batch, small(steps_per_pass=1000))
    assert [part.lengths for part in parts] == [(9, 8, 5), (2,)]
    assert parts[1].obs_BTO.shape == (1, 3, 7) and torch.equal(parts[1].reward_BT, batch.reward_BT[3:, :2])
    for part in parts:
        assert part.mask_BT.shape[1] == max(part.lengths)
        assert torch.equal(part.real_S, part.mask_BT.flatten().nonzero()[:, 0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_update_has_the_gradients_of_one_plain_loss(no_chance, variant):
    "Chunks, detached states and two backward passes, against loss.backward() on everything at once."
    config, batch = small(chunk=5, grad_clip=1e9, variant=variant), window()
    _, _, got = gradients(config, batch)
    torch.manual_seed(0)
    agent = Agent(config, observation_dim=7, action_dim=3, discrete=True)
    agent.encoder.norm.update(batch.obs_BTO, torch.nn.functional.pad(batch.mask_BT, (1, 0), value=True))
    h_BTD, mask_BT = agent.states(batch.obs_BTO, batch.time_BT), batch.mask_BT
    actor_loss_SG, critic_loss_CSG, _ = losses_of(
        agent,
        config,
        h_BTD[:, :-1][mask_BT],
        h_BTD[:, 1:][mask_BT],
        agent.action_vectors(batch.action_BT[mask_BT]),
        batch.reward_BT[mask_BT] * config.reward_scale,
        batch.done_BT[mask_BT],
    )
    (actor_loss_SG.mean() + config.critic_weight * critic_loss_CSG.mean()).backward()
    expected = {name: p.grad for name, p in agent.named_parameters() if p.grad is not None}
    assert set(got) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("garbage", [1e6, float("nan"), float("inf")])
def test_padding_changes_nothing(garbage):
    "Garbage in masked steps must not move the loss, any gradient, or the input statistics."
    clean, dirty = window(), window()
    real_BT1 = torch.nn.functional.pad(dirty.mask_BT, (1, 0), value=True)
    dirty.obs_BTO[~real_BT1] = garbage
    dirty.reward_BT[~dirty.mask_BT] = garbage
    dirty.action_BT[~dirty.mask_BT] = 2
    agent_a, a, grads_a = gradients(small(), clean)
    agent_b, b, grads_b = gradients(small(), dirty)
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6)
    for name in grads_a:
        torch.testing.assert_close(grads_a[name], grads_b[name], rtol=1e-4, atol=1e-6)
    assert torch.equal(agent_a.encoder.norm.mean_O, agent_b.encoder.norm.mean_O)


KINDS = [(variant, discrete) for variant in VARIANTS for discrete in (True, False)]


def states_and_actions(discrete, S=20):
    stored_SA = torch.eye(3)[torch.randint(3, (S,))] if discrete else torch.rand(S, 3) * 2 - 1
    return torch.randn(S, 16), torch.randn(S, 16), stored_SA, torch.randn(S), torch.zeros(S, dtype=torch.bool)


@pytest.mark.parametrize(("variant", "discrete"), KINDS)
def test_no_critic_learns_from_an_actor_loss_and_no_target_from_anything(variant, discrete):
    torch.manual_seed(0)
    config = small(variant=variant)
    agent = Agent(config, 7, 3, discrete)
    h_SD, *rest = states_and_actions(discrete)
    h_SD.requires_grad_()
    actor_loss_SG, critic_loss_CSG, _ = losses_of(agent, config, h_SD, *rest)
    actor_loss_SG.mean().backward(retain_graph=True)
    assert all(p.grad is None for p in agent.value.parameters())
    assert agent.actor.layers[0].weight.grad.abs().max() > 0 and h_SD.grad.abs().max() > 0
    critic_loss_CSG.mean().backward()
    assert all(p.grad.abs().max() > 0 for p in agent.value.critics.parameters())
    targets = [*agent.target_actor.parameters(), *agent.value.target_critics.parameters()]
    assert all(p.grad is None and not p.requires_grad for p in targets)


@pytest.mark.parametrize("variant", ["dep_ind", "dep_dep"])
@pytest.mark.parametrize("discrete", [True, False])
def test_the_actor_loss_reaches_the_states_through_the_policy_alone(variant, discrete, monkeypatch):
    "With the policy's parameters cut off from the state, nothing is left of the actor's gradient."
    torch.manual_seed(0)
    config = small(variant=variant)
    agent = Agent(config, 7, 3, discrete)
    agent.actor.register_forward_pre_hook(lambda module, inputs: (inputs[0].detach(),))
    h_SD, *rest = states_and_actions(discrete)
    h_SD.requires_grad_()
    losses_of(agent, config, h_SD, *rest)[0].mean().backward()
    assert h_SD.grad is None


@pytest.mark.parametrize("variant", ["ind_ind", "ind_dep"])
def test_nothing_above_zero_gives_loss_zero_and_an_actor_gradient_of_exactly_zero(variant, monkeypatch):
    torch.manual_seed(0)
    critic = TwoHotValue if variant == "ind_ind" else ScalarValue
    monkeypatch.setattr(critic, "advantage", lambda self, h, a, q, policy, k: torch.zeros(q.shape[1:]))
    agent, metrics, got = gradients(small(variant=variant), window())
    assert metrics["loss/actor"] == 0 and metrics["filter"] == 0 and metrics["skipped"] == 0
    assert all(gradient.isfinite().all() for gradient in got.values())
    assert all(not p.grad.any() for p in agent.actor.parameters())


@pytest.mark.parametrize("variant", ["ind_ind", "ind_dep"])
def test_a_filtered_out_action_contributes_exactly_nothing(variant, monkeypatch):
    "The actor's gradient with one action let through is that of a batch which holds no other."
    torch.manual_seed(0)
    config = small(variant=variant)
    agent = Agent(config, 7, 3, True)
    inputs = states_and_actions(True)
    only = torch.arange(20) == 4
    critic = TwoHotValue if variant == "ind_ind" else ScalarValue
    monkeypatch.setattr(critic, "advantage", lambda self, h, a, q, policy, k: self.forced)

    def gradient(advantage_SG, rows):
        agent.value.forced = advantage_SG
        loss_SG = losses_of(agent, config, *(x[rows] for x in inputs))[0]
        return torch.autograd.grad(loss_SG.sum(), list(agent.actor.parameters()))

    filtered = gradient(torch.where(only[:, None], 1.0, -1.0).expand(20, 2), torch.arange(20))
    alone = gradient(torch.ones(1, 2), only)
    for a, b in zip(filtered, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("variant", ["ind_ind", "ind_dep"])
def test_a_policy_that_always_takes_the_stored_action_has_advantage_exactly_zero(variant):
    config = small(prob_low=0.0, prob_high=1.0, variant=variant)
    agent = Agent(config, 7, 3, True)
    with torch.no_grad():
        agent.actor.layers[-1].weight.zero_()
        agent.actor.layers[-1].bias.copy_(torch.tensor([0.0, 1e4, 0.0] * 2))
    stored_SA = torch.eye(3)[torch.ones(50, dtype=torch.long)]
    actor_loss, _, metrics = losses_of(
        agent, config, torch.randn(50, 16), torch.randn(50, 16), stored_SA, torch.randn(50), torch.zeros(50)
    )
    assert metrics["filter"].max() == 0 and actor_loss.abs().max() == 0

    if variant == "ind_dep":  # one pass for all actions
        return

    # Also where the critics' two passes round differently, here as far as they can.
    class Noisy(torch.nn.Module):
        def forward(self, state_SD, action):
            return torch.randn(4, *action.shape[:-2], 2, 16, requires_grad=True)

    agent.value.critics = Noisy()
    _, _, metrics = losses_of(
        agent, config, torch.randn(50, 16), torch.randn(50, 16), stored_SA, torch.randn(50), torch.zeros(50)
    )
    assert metrics["filter"].max() == 0


def test_the_target_values_the_target_actors_action():
    config = small(prob_low=0.0, prob_high=1.0)
    agent = Agent(config, 7, 3, True)
    with torch.no_grad():
        for actor, action in ((agent.actor, 0), (agent.target_actor, 2)):
            actor.layers[-1].weight.zero_()
            actor.layers[-1].bias.copy_(1e4 * torch.eye(3)[action].repeat(2))
    valued = []
    agent.value.target_critics.register_forward_pre_hook(lambda module, inputs: valued.append(inputs[1]))
    stored_SA = torch.eye(3)[torch.zeros(5, dtype=torch.long)]
    losses_of(
        agent, config, torch.randn(5, 16), torch.randn(5, 16), stored_SA, torch.randn(5), torch.zeros(5)
    )
    assert (valued[0].argmax(-1) == 2).all() and valued[0].shape == (5, 2, 3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_truncation_bootstraps_and_termination_does_not(variant, monkeypatch):
    "Windows from whole rollouts and from their middle, by way of the replay and the update."
    torch.manual_seed(0)
    config = small(variant=variant, reward_scale=1.0)
    agent = Agent(config, 7, 3, True)
    replay = Replay(7, (), np.int64, max_length=12, capacity_trajectories=4, seed=0)
    rng = np.random.default_rng(0)
    for task, terminated in enumerate([True, False]):  # rewards tell time and rollout apart
        obs_TO, action_T = rng.normal(size=(13, 7)), rng.integers(3, size=12)
        replay.add(obs_TO, action_T, np.arange(12) + 100.0 * task, terminated, start=30, task=task)
    monkeypatch.setattr(
        update_module, "next_values", lambda agent, next_SD, reduce: torch.full((len(next_SD), 2), 1000.0)
    )
    seen = []
    record = lambda *args: seen.append((args[0], n_step_target(*args))) or seen[-1][1]
    monkeypatch.setattr(update_module, "n_step_target", record)
    started = set()
    for _ in range(10):
        batch = replay.sample(8, 5)
        started |= set(batch.time_BT[:, 0].tolist())
        update(agent, KeepWeights(), KeepWeights(), batch, config, 2)
    assert 30 in started and max(started) > 34
    ends = 0
    for reward, y_G in zip(torch.cat([r for r, _ in seen]), torch.cat([y for _, y in seen]), strict=True):
        over = reward == 11.0  # the last step of the rollout that terminated; 111: of the truncated one
        ends += over
        expected_G = reward + (0.0 if over else 1000.0) * agent.gamma_G
        torch.testing.assert_close(y_G, expected_G)
    assert ends > 5


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_task_of_a_rollout_is_for_reports_only(no_chance, variant):
    batch, relabelled = window(), window()
    relabelled = relabelled._replace(task_B=torch.tensor([3, 1, 0, 2]))
    _, a, grads_a = gradients(small(variant=variant), batch)
    _, b, grads_b = gradients(small(variant=variant), relabelled, num_tasks=4)
    assert all(torch.equal(grads_a[name], grads_b[name]) for name in grads_a)
    assert a["share/states"].tolist() == [1.0]
    lengths = torch.tensor([9, 5, 1, 7]) / 22
    torch.testing.assert_close(b["share/states"][relabelled.task_B], lengths)
    for name in ("critic", "actor", "gradient"):
        assert b[f"share/{name}"].sum().item() == pytest.approx(1) or b["loss/actor"] == 0


def test_losses_of_a_task_are_counted_under_its_number(no_chance):
    "A task whose rewards are 1000 times larger takes nearly all of a squared error, and not of a cross-entropy."
    batch = window()._replace(task_B=torch.tensor([0, 1, 1, 1]))
    batch.reward_BT[0] *= 1000
    squared, crossed = (
        gradients(small(variant=v), batch, num_tasks=2)[1]["share/critic"] for v in ("ind_dep", "ind_ind")
    )
    assert squared[0] > 0.95 and 0.3 < crossed[0] < 0.8


def test_the_likeliest_bins_are_counted_by_discount():
    "Critics that are sure of bin 5 for the first discount, and of bin 2 or 9, half and half, for the second."

    class Sure(torch.nn.Module):
        def forward(self, state_SD, action):
            bins_CSG = torch.full((4, 20, 2), 5)
            bins_CSG[:, :10, 1], bins_CSG[:, 10:, 1] = 2, 9
            return torch.nn.functional.one_hot(bins_CSG, 16).float()

    agent = Agent(small(), 7, 3, True)
    agent.value.critics = Sure()
    critic_loss = VARIANTS["ind_ind"].critic_loss
    _, _, metrics = critic_loss(agent, torch.randn(20, 16), torch.eye(3)[:1], torch.zeros(20, 2))
    first_N, second_N = metrics["bins/<discount>"].float().mean(0)
    assert first_N.tolist() == [0.0] * 5 + [1.0] + [0.0] * 10
    assert [second_N[bin].item() for bin in (2, 5, 9)] == [0.5, 0.0, 0.5]


def test_hlgauss_labels_are_the_loss_when_asked_for():
    torch.manual_seed(0)
    inputs = states_and_actions(True)
    agent = Agent(small(value_label="hlgauss"), 7, 3, True)
    y_SG, stored_S1A = torch.randn(20, 2) * 10, inputs[2].unsqueeze(1)
    loss_CSG, _, _ = VARIANTS["ind_ind"].critic_loss(agent, inputs[0], stored_S1A, y_SG)
    labels = agent.value.support.hlgauss_labels(y_SG)
    expected = -(labels * agent.value.critics(inputs[0], stored_S1A).log_softmax(-1)).sum(-1)
    torch.testing.assert_close(loss_CSG, expected)


def test_a_gradient_that_is_not_finite_skips_the_update(monkeypatch):
    "Weights, optimizer, schedule and targets stay as they are; the next update is the first."
    config = small(learning_rate=0.1, warmup_updates=10)
    agents = [Agent(config, 7, 3, True) for _ in range(2)]
    agents[1].load_state_dict(agents[0].state_dict())
    (agent, other), steps = agents, [make_optimizer(agent, config) for agent in agents]
    before = {name: value.clone() for name, value in agent.state_dict().items() if "popart" not in name}
    variant = VARIANTS["ind_ind"]
    broken = lambda *args: (variant.actor_loss(*args)[0] * float("nan"), {})
    monkeypatch.setitem(VARIANTS, "ind_ind", variant._replace(actor_loss=broken))
    metrics = update(agent, *steps[0], window(), config)
    assert metrics["skipped"] == 1
    named = [name for name, p in agent.named_parameters() if p.grad is not None]
    weights, gradients = metrics["not_finite"].tolist()
    assert not any(weights) and gradients[named.index("actor.layers.0.weight")]
    assert not gradients[named.index("value.critics.weight.0")]  # the actor's loss does not reach it
    moved = ("encoder.norm", ".u", ".v")  # input statistics and power iterations, which no gradient makes
    same = [name for name in before if not name.startswith(moved[0]) and not name.endswith(moved[1:])]
    assert all(torch.equal(before[name], agent.state_dict()[name]) for name in same)
    monkeypatch.undo()
    for agent, (optimizer, schedule) in zip(agents, steps):
        agent.load_state_dict(before, strict=False)
        torch.manual_seed(0)
        assert update(agent, optimizer, schedule, window(), config)["skipped"] == 0
        assert schedule.made == 1 and optimizer.param_groups[0]["lr"].item() == pytest.approx(0.02)
    for name in same:
        assert torch.equal(agents[0].state_dict()[name], other.state_dict()[name]), name
    assert not all(torch.equal(before[name], other.state_dict()[name]) for name in same)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("env", ["popgym", "metaworld", "procgen-easy"])
def test_an_update_never_makes_a_gpu_wait(env, variant, monkeypatch):
    "On the meta device tensors have shapes and no numbers: reading one, or mixing devices, raises."
    sizes = {
        "popgym": (57, 27, True),
        "metaworld": (46, 4, False),
        "procgen-easy": (19, 15, True, (64, 64, 3)),
    }[env]
    config = Config(
        **{"env": env, **preset(env, "paper", variant), "variant": variant, "precision": "float32"}
    )
    config = dataclasses.replace(config, chunk=500, steps_per_pass=2048, encoder_depths=(4, 4), n_step=2)
    agent = Agent(config, *sizes).to("meta")
    mask_BT = torch.arange(40) < torch.tensor([40, 39, 7, 1])[:, None]
    action_BT = torch.zeros(4, 40, dtype=torch.long) if sizes[2] else torch.zeros(4, 40, sizes[1])
    image_BT = None if len(sizes) == 3 else torch.zeros(4, 41, *sizes[3], dtype=torch.uint8)
    batch = padded(
        mask_BT,
        obs_BTO=torch.zeros(4, 41, sizes[0]),
        action_BT=action_BT,
        reward_BT=torch.zeros(4, 40),
        done_BT=torch.zeros(4, 40, dtype=torch.bool),
        time_BT=torch.arange(41).expand(4, 41),
        task_B=torch.zeros(4, dtype=torch.long),
        image_BT=image_BT,
    )
    monkeypatch.setattr(
        torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext()
    )  # has none for meta
    metrics = update(agent, KeepWeights(), KeepWeights(), batch.to("meta"), config, 5)
    assert len(metrics) > 10 and all(value.device.type == "meta" for value in metrics.values())


def test_a_target_that_is_not_finite_does_not_stay_in_popart():
    broken = window()
    broken.reward_BT[0, 0] = float("nan")
    agent, metrics, _ = gradients(small(variant="dep_dep"), broken)
    assert metrics["skipped"] == 1
    assert all(value.isfinite().all() for value in agent.popart.state_dict().values())
    agent.zero_grad()
    assert update(agent, KeepWeights(), KeepWeights(), window(), small(variant="dep_dep"))["skipped"] == 0


def test_policy_remembers_its_own_rollout_only():
    "A batch of environments, one of them reset in between, acts as each would alone."
    config = small(context=6)
    torch.manual_seed(0)
    agent = Agent(config, 7, 3, True)
    obs_TBO = np.random.default_rng(0).normal(size=(8, 2, 7)).astype(np.float32)
    together = Policy(agent, config, num_envs=2, greedy=True)
    actions = []
    for t in range(8):
        if t == 3:
            together.reset([False, True])
        actions.append(together(obs_TBO[t]))
    for e, first in ((0, 0), (1, 3)):
        alone = Policy(agent, config, greedy=True)
        assert [int(alone(obs_TBO[t, e])) for t in range(first, 8)] == [int(a[e]) for a in actions[first:]]
