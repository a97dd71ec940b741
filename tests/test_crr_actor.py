"""crr_actor.py: distributions by hand, the filter, and the gradients of both losses."""

import math

import pytest
import torch
import torch.nn.functional as F

from crr_actor import ActorHead, Categorical, TanhGaussian, advantage, crr_loss, value_loss


def test_probabilities_are_clipped_and_renormalised():
    policy = Categorical(torch.tensor([100.0, 0.0, 0.0]), low=0.001, high=0.99)
    total = 0.99 + 2 * 0.001
    torch.testing.assert_close(policy.probs, torch.tensor([0.99, 0.001, 0.001]) / total)
    assert policy.log_prob(torch.tensor([0.0, 1.0, 0.0])).item() == pytest.approx(
        math.log(0.001 / total), rel=1e-5
    )
    assert Categorical(torch.tensor([200.0, 0.0]), 1e-6, 1.0).log_prob(torch.tensor([0.0, 1.0])).isfinite()


def test_categorical_samples_follow_the_probabilities():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]))
    policy = Categorical(logits, 0.0, 1.0)
    sample_KGA = policy.sample(20_000, generator=torch.Generator().manual_seed(0))
    assert sample_KGA.shape == (20_000, 2, 3) and (sample_KGA.sum(-1) == 1).all()
    torch.testing.assert_close(sample_KGA.mean(0), policy.probs, rtol=0, atol=0.015)
    assert policy.mode().argmax(-1).tolist() == [0, 2]
    assert Categorical(torch.tensor([0.0, -2e4]), 0.0, 1.0).entropy().item() == 0  # p log p at p = 0
    assert Categorical(torch.zeros(4), 0.0, 1.0).entropy().item() == pytest.approx(math.log(4), rel=1e-5)


def test_tanh_gaussian_density_integrates_to_one_and_std_is_bounded():
    policy = TanhGaussian(torch.tensor([0.3, -0.5]))
    grid = torch.linspace(-0.99, 0.99, 20_001).unsqueeze(-1)
    inside = torch.trapezoid(policy.log_prob(grid).exp(), grid[:, 0])
    std = policy.log_std.exp().item()
    normal = torch.distributions.Normal(0.3, std)
    assert inside.item() == pytest.approx(
        (normal.cdf(torch.atanh(torch.tensor(0.99))) - normal.cdf(torch.atanh(torch.tensor(-0.99)))).item(),
        abs=1e-4,
    )
    assert TanhGaussian(torch.tensor([0.0, 50.0])).log_std.item() == pytest.approx(2)
    assert TanhGaussian(torch.tensor([0.0, -50.0])).log_std.item() == pytest.approx(-5)
    assert policy.log_prob(torch.tensor([1.0])).isfinite()


def test_tanh_gaussian_samples_and_mode():
    policy = TanhGaussian(torch.tensor([0.3, -0.2, 0.0, 0.5]))
    sample_KA = policy.sample(50_000, generator=torch.Generator().manual_seed(0))
    z = torch.atanh(sample_KA.clamp(-0.999999, 0.999999))
    torch.testing.assert_close(z.mean(0), policy.mean, rtol=0, atol=0.03)
    torch.testing.assert_close(z.std(0), policy.log_std.exp(), rtol=0.02, atol=0)
    torch.testing.assert_close(policy.mode(), torch.tanh(torch.tensor([0.3, -0.2])))


def test_one_policy_for_every_discount():
    head = ActorHead(state_dim=5, features=4, discounts=3, hidden=(8, 8))
    assert head(torch.randn(2, 6, 5)).shape == (2, 6, 3, 4)


def test_advantage_by_hand_and_exactly_zero_at_ties():
    assert advantage(torch.tensor([3.0]), torch.tensor([[1.0], [2.0], [6.0]])).item() == 0
    assert advantage(torch.tensor([2.0]), torch.tensor([[1.0], [1.0], [1.0]])).item() == 1
    q = torch.randn(10_000)
    assert (advantage(q, q.expand(3, -1)) == 0).all()  # the mean of three equal floats can differ from them


def test_the_filter_is_strict_and_independent_of_scale():
    a = torch.tensor([-1.0, -0.0, 0.0, 1e-30, 2.0])
    log_prob = torch.full((5,), -0.7)
    loss, info = crr_loss(log_prob, a)
    assert loss.tolist() == pytest.approx([0, 0, 0, 0.7, 0.7])
    assert info["filter"].tolist() == [0, 0, 0, 1, 1]
    assert torch.equal(crr_loss(log_prob, 100 * a)[0], loss)


def test_filtered_out_actions_contribute_exactly_nothing():
    logits = torch.randn(2, 4, requires_grad=True)
    action = F.one_hot(torch.tensor([1, 2]), 4).float()
    loss, _ = crr_loss(Categorical(logits).log_prob(action), torch.tensor([1.0, -1.0]))
    loss.sum().backward()
    assert logits.grad[0].abs().max() > 0 and torch.equal(logits.grad[1], torch.zeros(4))


def test_nothing_above_zero_gives_loss_zero_and_finite_gradients():
    logits = torch.full((3, 4), -1e4)
    logits[:, 0] = 1e4
    logits.requires_grad_()
    policy = Categorical(logits, low=0.0, high=1.0)  # log pi of the stored action is -inf
    loss, _ = crr_loss(policy.log_prob(F.one_hot(torch.ones(3, dtype=torch.long), 4).float()), torch.zeros(3))
    assert loss.tolist() == [0, 0, 0]
    logits = torch.randn(3, 4, requires_grad=True)
    loss, _ = crr_loss(Categorical(logits).log_prob(torch.eye(4)[:3]), -torch.ones(3))
    loss.mean().backward()
    assert torch.equal(logits.grad, torch.zeros(3, 4))


def test_the_loss_gives_the_advantage_no_gradient():
    a = torch.ones(3, requires_grad=True)
    loss, _ = crr_loss(torch.zeros(3, requires_grad=True), a)
    loss.sum().backward()
    assert a.grad is None


def test_straight_through_gumbel_softmax():
    "Samples are one-hot with the policy's frequencies; the gradient is that of the softmax."
    torch.manual_seed(0)
    logits = torch.log(torch.tensor([0.5, 0.3, 0.2])).requires_grad_()
    policy = Categorical(logits, 0.0, 1.0)
    sample_KA = policy.rsample(20_000)
    hard_KA = sample_KA.detach().round()
    assert (sample_KA - hard_KA).abs().max() < 1e-6 and (hard_KA.sum(-1) == 1).all()
    torch.testing.assert_close(hard_KA.mean(0), policy.probs.detach(), rtol=0, atol=0.015)
    noise, worth = torch.tensor([0.2, -0.1, 0.4]), torch.tensor([1.0, 2.0, 4.0])
    (straight,) = torch.autograd.grad((policy.from_noise(noise) * worth).sum(), logits, retain_graph=True)
    soft = torch.softmax((policy.probs.log() + noise) / 0.5, -1)
    (expected,) = torch.autograd.grad((soft * worth).sum(), logits)
    torch.testing.assert_close(straight, expected)


def test_a_probability_of_zero_gives_finite_gradients():
    logits = torch.tensor([0.0, -2e4, 0.0], requires_grad=True)
    sample_KA = Categorical(logits, 0.0, 1.0).rsample(100)
    (sample_KA * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert logits.grad.isfinite().all() and sample_KA[:, 1].max() == 0


def test_reparameterised_gaussian_actions_carry_the_gradient_of_tanh():
    features = torch.tensor([0.3, -0.5], requires_grad=True)
    policy = TanhGaussian(features)
    noise = torch.tensor([0.7])
    action = policy.from_noise(noise)
    action.sum().backward()
    a, std = action.item(), policy.log_std.exp().item()
    slope = 7 / 2 * (1 - math.tanh(-0.5) ** 2)  # of log std, by the raw feature
    by_hand = [1 - a**2, (1 - a**2) * 0.7 * std * slope]  # d tanh(mu + std noise)
    assert features.grad.tolist() == pytest.approx(by_hand, rel=1e-4)
    assert policy.rsample(5).requires_grad and not policy.sample(5).requires_grad


def test_value_loss_is_minus_the_least_of_all_critics():
    q_C = torch.tensor([[3.0, 1.0], [2.0, 5.0]], requires_grad=True)
    loss, info = value_loss(q_C)
    assert loss.tolist() == [-2.0, -1.0] and info["policy_value"].tolist() == [2.0, 1.0]
    loss.sum().backward()
    assert q_C.grad.tolist() == [[0.0, -1.0], [-1.0, 0.0]]


@pytest.mark.parametrize("kind, features", [(Categorical, 4), (TanhGaussian, 8)])
def test_policies_and_losses_run_on_the_meta_device(kind, features):
    "A branch on a tensor's values would raise there, and make a GPU wait."
    head = ActorHead(state_dim=5, features=features, discounts=3, hidden=(8,)).to("meta")
    policy, stored = kind(head(torch.empty(7, 5, device="meta"))), torch.empty(7, 1, 4, device="meta")
    assert policy.sample(2).shape == policy.rsample(2).shape == (2, 7, 3, 4)
    assert policy.mode().shape == (7, 3, 4) and policy.entropy().shape == (7, 3)
    q_sampled_K = policy.rsample(2).sum(-1)
    loss, _ = crr_loss(policy.log_prob(stored), advantage(q_sampled_K[0], q_sampled_K))
    loss = loss + value_loss(q_sampled_K)[0]
    assert loss.shape == (7, 3)
    loss.mean().backward()
