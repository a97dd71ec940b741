"""agent.py: the paper's method against the authors' numbers, and what the assembled update must not do."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from agent import VARIANTS, Agent, Policy, losses_ind_ind
from crr_actor import Categorical
from train import Config, update

GOLDEN = Path(__file__).parent / "golden"


def small(**changes):
    sizes = {"encoder_hidden": 16, "encoder_dim": 12, "d_model": 16, "d_ff": 32, "layers": 2, "heads": 2}
    sizes |= {"hidden": (16, 16), "bins": 16, "gammas": (0.5, 0.9), "dropout": 0.0, "precision": "float32"}
    return Config(**{**sizes, **changes})


def window(B=4, T=9, O=7, A=3, seed=0):
    rng = torch.Generator().manual_seed(seed)
    length_B = torch.tensor([9, 5, 1, 7])
    mask_BT = torch.arange(T) < length_B[:, None]
    return SimpleNamespace(
        obs_BTO=torch.randn(B, T + 1, O, generator=rng),
        action_BT=torch.randint(A, (B, T), generator=rng),
        reward_BT=torch.randn(B, T, generator=rng),
        done_BT=torch.arange(T) == length_B[:, None] - 1,
        mask_BT=mask_BT,
        time_BT=torch.arange(T + 1).expand(B, T + 1) + torch.tensor([[0], [3], [0], [40]]),
    )


class KeepWeights:
    "In place of an optimizer: gradients stay where a test can look at them."

    def zero_grad(self):
        pass

    def step(self):
        pass


def gradients(config, batch, seed=0):
    torch.manual_seed(seed)
    agent = Agent(config, observation_dim=7, action_dim=3, discrete=True)
    torch.manual_seed(1)
    metrics = update(agent, KeepWeights(), KeepWeights(), batch, config)
    return agent, metrics, {n: p.grad for n, p in agent.named_parameters() if p.grad is not None}


@pytest.fixture
def no_chance(monkeypatch):
    "Deterministic policies and subsets, so that draws do not depend on how states are grouped."
    monkeypatch.setattr(
        Categorical, "sample", lambda self, k, generator=None: self.mode().expand(k, *self.probs.shape)
    )
    monkeypatch.setattr(
        "agent.draw_subset", lambda critics, shape, device=None: torch.zeros(2, *shape, dtype=torch.long)
    )


def test_chunk_size_changes_nothing(no_chance):
    _, whole, expected = gradients(small(chunk=1000, grad_clip=1e9), window())
    _, parts, got = gradients(small(chunk=1000, grad_clip=1e9), window())
    _, parts, got = gradients(small(chunk=5, grad_clip=1e9), window())
    assert abs(whole["loss/critic"] - parts["loss/critic"]) < 1e-5
    assert set(got) == set(expected) and len(got) > 30
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-6)


def test_the_update_has_the_gradients_of_one_plain_loss(no_chance):
    "Chunks, detached states and two backward passes, against loss.backward() on everything at once."
    config, batch = small(chunk=5, grad_clip=1e9), window()
    _, _, got = gradients(config, batch)
    torch.manual_seed(0)
    agent = Agent(config, observation_dim=7, action_dim=3, discrete=True)
    agent.encoder.norm.update(batch.obs_BTO, torch.nn.functional.pad(batch.mask_BT, (1, 0), value=True))
    h_BTD, mask_BT = agent.states(batch.obs_BTO, batch.time_BT), batch.mask_BT
    actor_loss_SG, critic_loss_CSG, _ = losses_ind_ind(
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


def test_padding_changes_nothing():
    "Garbage in masked steps must not move the loss, any gradient, or the input statistics."
    clean, dirty = window(), window()
    real_BT1 = torch.nn.functional.pad(dirty.mask_BT, (1, 0), value=True)
    dirty.obs_BTO[~real_BT1] = 1e6
    dirty.reward_BT[~dirty.mask_BT] = 1e6
    dirty.action_BT[~dirty.mask_BT] = 2
    agent_a, a, grads_a = gradients(small(), clean)
    agent_b, b, grads_b = gradients(small(), dirty)
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6)
    for name in grads_a:
        torch.testing.assert_close(grads_a[name], grads_b[name], rtol=1e-4, atol=1e-6)
    assert torch.equal(agent_a.encoder.norm.mean_O, agent_b.encoder.norm.mean_O)


def test_no_gradient_from_the_actor_loss_to_critics_and_none_to_targets():
    config = small()
    agent = Agent(config, 7, 3, True)
    h_SD = torch.randn(20, 16, requires_grad=True)
    stored_SA = torch.eye(3)[torch.randint(3, (20,))]
    actor_loss, _, _ = losses_ind_ind(
        agent,
        config,
        h_SD,
        torch.randn(20, 16),
        stored_SA,
        torch.randn(20),
        torch.zeros(20, dtype=torch.bool),
    )
    actor_loss.mean().backward()
    assert all(p.grad is None for p in agent.value.critics.parameters())
    assert agent.actor.layers[0].weight.grad.abs().max() > 0
    _, _, grads = gradients(config, window())
    assert not [name for name in grads if name.startswith("target")]


def test_a_policy_that_always_takes_the_stored_action_has_advantage_exactly_zero():
    config = small(prob_low=0.0, prob_high=1.0)
    agent = Agent(config, 7, 3, True)
    with torch.no_grad():
        agent.actor.layers[-1].weight.zero_()
        agent.actor.layers[-1].bias.copy_(torch.tensor([0.0, 1e4, 0.0] * 2))
    stored_SA = torch.eye(3)[torch.ones(50, dtype=torch.long)]
    actor_loss, _, metrics = losses_ind_ind(
        agent, config, torch.randn(50, 16), torch.randn(50, 16), stored_SA, torch.randn(50), torch.zeros(50)
    )
    assert metrics["filter"].sum() == 0 and actor_loss.abs().max() == 0

    # Also where the critics' two passes round differently, here as far as they can.
    class Noisy(torch.nn.Module):
        def forward(self, state_SD, action):
            return torch.randn(4, *action.shape[:-2], 2, 16, requires_grad=True)

    agent.value.critics = Noisy()
    _, _, metrics = losses_ind_ind(
        agent, config, torch.randn(50, 16), torch.randn(50, 16), stored_SA, torch.randn(50), torch.zeros(50)
    )
    assert metrics["filter"].sum() == 0


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
    losses_ind_ind(
        agent, config, torch.randn(5, 16), torch.randn(5, 16), stored_SA, torch.randn(5), torch.zeros(5)
    )
    assert (valued[0].argmax(-1) == 2).all() and valued[0].shape == (5, 2, 3)


def test_truncation_bootstraps_and_termination_does_not():
    config = small()
    torch.manual_seed(0)
    agent = Agent(config, 7, 3, True)
    inputs = (
        torch.randn(30, 16),
        torch.randn(30, 16),
        torch.eye(3)[torch.randint(3, (30,))],
        torch.zeros(30),
    )
    with torch.no_grad():  # a target critic that is sure of a large value
        agent.value.target_critics.bias[-1].zero_()
        agent.value.target_critics.bias[-1][..., -1] = 50.0

    def mean_critic_loss(terminated):
        return losses_ind_ind(agent, config, *inputs, torch.full((30,), terminated))[1].mean()

    with torch.no_grad():  # and an online one that is sure of 0
        agent.value.critics.weight[-1].zero_(), agent.value.critics.bias[-1].fill_(-50.0)
        agent.value.critics.bias[-1][..., 7:9] = 0.0
    assert mean_critic_loss(True) < 1
    assert mean_critic_loss(False) > 20


def test_a_gradient_that_is_not_finite_skips_the_update(monkeypatch):
    def broken(*args):
        actor_loss, critic_loss, metrics = losses_ind_ind(*args)
        return actor_loss * float("nan"), critic_loss, metrics

    monkeypatch.setitem(VARIANTS, "ind_ind", broken)
    agent = Agent(small(), 7, 3, True)
    optimizer = torch.optim.AdamW([p for p in agent.parameters() if p.requires_grad], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    before = [p.clone() for p in agent.parameters()]
    assert update(agent, optimizer, schedule, window(), small())["skipped"] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, agent.parameters(), strict=True))
    monkeypatch.undo()
    assert update(agent, optimizer, schedule, window(), small())["skipped"] == 0
    assert not all(torch.equal(a, b) for a, b in zip(before, agent.parameters(), strict=True))


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
    for lane, first in ((0, 0), (1, 3)):
        alone = Policy(agent, config, greedy=True)
        assert [int(alone(obs_TBO[t, lane])) for t in range(first, 8)] == [
            int(a[lane]) for a in actions[first:]
        ]
