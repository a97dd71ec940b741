"""The paper's claims, each small enough to check by hand: what becomes of a loss when returns grow 100-fold."""

import pytest
import torch
import torch.nn.functional as F

from crr_actor import Categorical, advantage, crr_loss, value_loss
from popart import PopArt
from twohot import BinSupport, twohot_loss

VALUES = torch.tensor([20.0, -35.0, 90.0, 300.0])


@pytest.mark.parametrize("error", [-0.5, -0.2, 0.3, 1.0])
def test_the_same_relative_error_costs_a_classifier_the_same_and_a_regression_10_000_times_more(error):
    support = BinSupport(bins=128)

    def losses(target):
        prediction = (1 + error) * target
        # A two-hot prediction would share no bin with its target: it gets the width of an HL-Gauss label.
        logits = support.hlgauss_labels(prediction).clamp(min=1e-12).log()
        return twohot_loss(logits, *support.encode(target)), (prediction - target) ** 2

    (crossed, squared), (crossed_100, squared_100) = losses(VALUES), losses(100 * VALUES)
    assert ((crossed_100 / crossed > 0.5) & (crossed_100 / crossed < 2)).all()
    torch.testing.assert_close(squared_100 / squared, torch.full((4,), 1e4))


def test_the_filter_decides_the_same_and_so_does_its_gradient():
    torch.manual_seed(0)
    q_S, q_sampled_KS = torch.randn(1000), torch.randn(3, 1000)
    logits_SA = torch.randn(1000, 4, requires_grad=True)
    action_SA = F.one_hot(torch.randint(4, (1000,)), 4).float()

    def loss_and_gradient(factor):
        loss_S, info = crr_loss(
            Categorical(logits_SA).log_prob(action_SA), advantage(factor * q_S, factor * q_sampled_KS)
        )
        return info["filter"], *torch.autograd.grad(loss_S.sum(), logits_SA)

    for a, b in zip(loss_and_gradient(1.0), loss_and_gradient(100.0), strict=True):
        assert torch.equal(a, b)
    assert 0.3 < loss_and_gradient(1.0)[0].mean() < 0.7


def actor_gradient(normalise, q_A):
    "Size of the dependent actor's gradient in one state, whose actions are worth q_A to both critics."
    logits_A = torch.zeros(len(q_A), requires_grad=True)
    value = (Categorical(logits_A, 0.0, 1.0).probs * q_A).sum(-1, keepdim=True)
    loss, _ = value_loss(normalise(value).expand(2, 1))
    return torch.autograd.grad(loss.sum(), logits_A)[0].norm().item()


def test_the_dependent_actors_gradient_grows_with_the_returns():
    q_A = torch.tensor([1.0, 2.0, 4.0])
    plain = [actor_gradient(lambda q: q, factor * q_A) for factor in (1.0, 100.0)]
    assert plain[1] / plain[0] == pytest.approx(100, rel=1e-4)


def test_popart_sets_the_size_of_that_gradient_and_keeps_the_ratio_between_tasks():
    "Two tasks, one worth 100 times more: normalised together, one still has 100 times the gradient."
    torch.manual_seed(0)
    q_A, sizes = torch.tensor([1.0, 2.0, 4.0]), {}
    for factor in (1.0, 100.0):
        popart = PopArt(1, beta=0.1)
        for _ in range(200):
            small, large = factor * torch.randn(64, 1), factor * 100 * torch.randn(64, 1)
            popart.update(torch.cat([small, large]))
        sizes[factor] = [actor_gradient(popart.standardise, factor * scale * q_A) for scale in (1.0, 100.0)]
        assert sizes[factor][1] / sizes[factor][0] == pytest.approx(100, rel=1e-3)
    # Everything times 100: the gradients of both tasks are what they were, within what noise leaves.
    assert sizes[100.0][1] / sizes[1.0][1] == pytest.approx(1, abs=0.3)
