"""critics.py: the factorised ensemble against plain concatenation, subsets, targets, chunks."""

import pytest
import torch
import torch.nn.functional as F

from critics import (
    ActionCritics,
    AllActionCritics,
    draw_subset,
    move_target,
    n_step_target,
    take_subset,
    td_target,
)

GAMMAS = (0.1, 0.9, 0.99)


def plain(critics, c, state_D, action_A, g):
    "One critic, one state, one discount: the layers on the concatenated input."
    x = torch.cat([state_D, critics.gamma_feature_G1[g], action_A.clamp(-0.999, 0.999)])
    for layer in range(len(critics.weight)):
        x = F.leaky_relu(x) if layer else x
        x = x @ critics.weight[layer][c] + critics.bias[layer][c, 0]
    return x


def test_factorised_first_layer_equals_concatenation():
    critics = ActionCritics(5, 4, GAMMAS, critics=2, hidden=(8, 6), outputs=7)
    state_SD, sampled_KSGA = torch.randn(3, 5), torch.randn(2, 3, 3, 4)
    logits_CKSGN = critics(state_SD, sampled_KSGA)
    stored_CSGN = critics(state_SD, sampled_KSGA[0, :, :1])
    assert logits_CKSGN.shape == (2, 2, 3, 3, 7) and stored_CSGN.shape == (2, 3, 3, 7)
    for c in range(2):
        for s in range(3):
            for g in range(3):
                for k in range(2):
                    expected = plain(critics, c, state_SD[s], sampled_KSGA[k, s, g], g)
                    torch.testing.assert_close(logits_CKSGN[c, k, s, g], expected)
                expected = plain(critics, c, state_SD[s], sampled_KSGA[0, s, 0], g)
                torch.testing.assert_close(stored_CSGN[c, s, g], expected)


def test_discount_feature_is_symlog_of_the_horizon():
    critics = ActionCritics(2, 1, (0.0, 0.9, 0.999), critics=1, hidden=(4,), outputs=3)
    expected = torch.tensor([2.0, 11.0, 1001.0]).log()
    torch.testing.assert_close(critics.gamma_feature_G1[:, 0], expected, rtol=1e-4, atol=0)


def test_chunks_with_immediate_backward_give_the_gradients_of_one_large_loss():
    torch.manual_seed(0)
    critics = ActionCritics(5, 3, GAMMAS, critics=4, hidden=(8, 8), outputs=6)
    trunk = torch.nn.Linear(2, 5)
    inputs, action_SA = torch.randn(50, 2), torch.randn(50, 3)

    def gradients():
        parameters = [*critics.parameters(), *trunk.parameters()]
        grads = [p.grad.clone() for p in parameters]
        for p in parameters:
            p.grad = None
        return grads

    critics(trunk(inputs), action_SA.unsqueeze(1)).square().mean().backward()
    whole = gradients()
    state_SD = trunk(inputs)
    grad_SD = torch.empty_like(state_SD)
    for part in torch.arange(50).split(16):
        h = state_SD[part].detach().requires_grad_()
        (critics(h, action_SA[part].unsqueeze(1)).square().mean() * len(part) / 50).backward()
        grad_SD[part] = h.grad
    state_SD.backward(grad_SD)
    for a, b in zip(gradients(), whole):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


def test_subset_is_drawn_per_element_with_replacement():
    subset_RSG = draw_subset(4, (4000, 3), generator=torch.Generator().manual_seed(0))
    assert subset_RSG.shape == (2, 4000, 3)
    assert torch.bincount(subset_RSG.flatten()).min() > 5500  # of 6,000 expected for each critic
    assert 0.2 < (subset_RSG[0] == subset_RSG[1]).float().mean() < 0.3  # a quarter are pairs of one critic
    q_CSG = torch.arange(4.0)[:, None, None].expand(4, 4000, 3)
    assert torch.equal(take_subset(q_CSG, subset_RSG), subset_RSG.float())


def test_target_by_hand_terminated_cuts_the_bootstrap():
    y_SG = td_target(
        torch.tensor([1.0, 1.0]),
        torch.tensor([False, True]),
        torch.full((2, 2), 10.0),
        torch.tensor([0.5, 0.9]),
    )
    assert y_SG.tolist() == [[6.0, 10.0], [1.0, 1.0]]


def test_n_step_targets_equal_a_slow_loop():
    "Sums of at most n rewards, cut at a window's end and at a termination, windows of many lengths."
    torch.manual_seed(0)
    lengths, gamma_G = [7, 1, 4, 2], torch.tensor([0.5, 0.9])
    S = sum(lengths)
    reward_S, q_next_SG, terminated_S = torch.randn(S), torch.randn(S, 2), torch.zeros(S, dtype=torch.bool)
    last = torch.tensor(lengths).cumsum(0) - 1
    terminated_S[last[2]] = True  # one window ends with its rollout, the others go on or are truncated
    follows_S = torch.ones(S, dtype=torch.bool)
    follows_S[last] = False
    for n in (1, 2, 3, 20):
        y_SG = n_step_target(reward_S, terminated_S, q_next_SG, gamma_G, follows_S, n)
        for s in range(S):
            end = int(last[last >= s][0])
            stop = min(s + n - 1, end)  # the last step whose reward is summed
            for g, gamma in enumerate(gamma_G.tolist()):
                expected = sum(gamma ** (t - s) * reward_S[t].item() for t in range(s, stop + 1))
                if not terminated_S[stop]:
                    expected += gamma ** (stop - s + 1) * q_next_SG[stop, g].item()
                assert y_SG[s, g].item() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert torch.equal(
        n_step_target(reward_S, terminated_S, q_next_SG, gamma_G, follows_S, 1),
        td_target(reward_S, terminated_S, q_next_SG, gamma_G),
    )


def test_all_action_critics_equal_plain_networks():
    critics = AllActionCritics(5, action_dim=4, discounts=3, critics=2, hidden=(8, 6))
    state_SD = torch.randn(6, 5)
    q_CSGA = critics(state_SD)
    assert q_CSGA.shape == (2, 6, 3, 4)
    for c in range(2):
        x = state_SD
        for layer, (weight, bias) in enumerate(zip(critics.weight, critics.bias)):
            x = F.leaky_relu(x) if layer else x
            x = x @ weight[c] + bias[c]
        # discount-major: all actions of the first discount, then those of the second
        torch.testing.assert_close(q_CSGA[c, :, 1], x[:, 4:8])


def test_scalar_critics_of_continuous_actions_are_those_with_one_output():
    critics = ActionCritics(5, 3, GAMMAS, critics=2, hidden=(8,), outputs=1)
    assert critics(torch.randn(6, 5), torch.randn(4, 6, 3, 3)).shape == (2, 4, 6, 3, 1)


def test_moving_average():
    target, online = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    before = target.weight.clone()
    move_target(target, online, tau=0.25)
    torch.testing.assert_close(target.weight, 0.75 * before + 0.25 * online.weight)
    assert target.weight.grad is None


def test_stored_and_sampled_actions_reach_the_critic_in_one_form():
    critics = ActionCritics(5, 3, GAMMAS, critics=2, hidden=(8,), outputs=4)
    state_SD, one_hot = torch.randn(6, 5), F.one_hot(torch.tensor([0, 1, 2, 0, 1, 2]), 3).float()
    stored = critics(state_SD, one_hot.unsqueeze(1))
    sampled = critics(state_SD, one_hot[None, :, None].expand(1, 6, 3, 3))[:, 0]
    torch.testing.assert_close(stored, sampled)
    torch.testing.assert_close(stored, critics(state_SD, (one_hot * 0.999).unsqueeze(1)))  # the clamp


def test_bad_arguments_raise():
    with pytest.raises(ValueError, match="discounts"):
        ActionCritics(2, 2, (1.5,))
    with pytest.raises(ValueError, match="at least 1"):
        ActionCritics(2, 2, GAMMAS, critics=0)
    with pytest.raises(ValueError, match="at least 1"):
        AllActionCritics(2, 2, discounts=3, critics=0)
