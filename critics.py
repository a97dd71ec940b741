r"""An ensemble of critics over all discounts at once, and the targets they learn.

What     Q(h, a, gamma) for C independent critics and G discounts in one batched pass: `ActionCritics` score
         given actions, by logits over N return bins or by one number; `AllActionCritics` put out one
         number for every discrete action. Random pairs of critics for targets; one-step and n-step TD
         targets; the moving average of a target network
Why      in each state K + 1 actions, the stored one and K samples, are scored by every critic for every
         discount: at the paper's sizes most of the FLOPs of an update, and almost all of its memory
Paper    AMAGO-2 section 3 (y_t, and the ensemble over discounts) and Table 1 (C = 4, G = 7, tau). N bins:
         the scale-independent critic, Eq. 3; one number: the scale-dependent one, Eq. 1.
         Authors' code: github.com/UT-Austin-RPL/amago
Shapes   S states: flattened valid (b, t), a chunk of them at a time; C critics, of which R make a target;
         G discounts; K action samples; A action; D state width; N bins; H hidden width
Notes    The first layer is linear in (state, discount, action), so its state part is computed once a
         state, its discount part once, and both are added to the action part of every sample.
         Nothing here is chunked: the caller loops over chunks of states and calls backward for each
         (see "Use" below), so that nothing of size C x B x T x G x N ever exists.
Copy     this file alone; needs torch. The loss, and values from N bins, are the caller's (twohot.py)
Try      python critics.py

Use: targets, where `value` decodes N logits (twohot.py) or takes [..., 0] of one output:

    q_CSG = value(target(next_SD, action_SGA))                         # the policy's next actions
    q_SG = take_subset(q_CSG, draw_subset(C, (S, G))).mean(0)          # or .amin(0)
    y_SG = td_target(reward_S, terminated_S, q_SG, gamma_G)

and the loss in chunks, with gradients equal to those of one large loss:

    for part in torch.arange(S).split(256):
        h = state_SD[part].detach().requires_grad_()
        loss = loss_of(critics(h, action_SA[part, None])).sum() / S
        loss.backward()                   # this chunk's activations are freed here
        grad_SD[part] = h.grad
    state_SD.backward(grad_SD)            # one pass through whatever made the states
"""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LIMIT = 0.999  # actions reach a critic within +- this much | authors' code


def stacked_layers(critics: int, widths: list[int]) -> tuple[nn.ParameterList, nn.ParameterList]:
    """Weights (C, in, out) and biases (C, 1, out) of C >= 1 independent MLPs of the given widths.

    OFFICIAL: weights are uniform with variance 1 / in, biases uniform within 1 / sqrt(in) (authors' code).
    """
    if critics < 1:
        raise ValueError(f"critics must be at least 1, got {critics}")
    weight, bias = nn.ParameterList(), nn.ParameterList()
    for fan_in, fan_out in itertools.pairwise(widths):
        bound = 1 / math.sqrt(fan_in)
        # A uniform distribution within +-b has the variance b^2 / 3.
        widest = math.sqrt(3) * bound
        weight.append(nn.Parameter(torch.empty(critics, fan_in, fan_out).uniform_(-widest, widest)))
        bias.append(nn.Parameter(torch.empty(critics, 1, fan_out).uniform_(-bound, bound)))
    return weight, bias


def after_first_layer(x: Tensor, weight: nn.ParameterList, bias: nn.ParameterList) -> Tensor:
    "The rest of the MLPs, (C, rows, H) -> (C, rows, out): a batched matrix multiply a layer. Overwrites `x`."
    for weight_l, bias_l in zip(weight[1:], bias[1:]):
        # In place: the pre-activation is not needed again, and large temporaries cost a CPU more than
        # arithmetic does.
        x = torch.baddbmm(bias_l, F.leaky_relu(x, inplace=True), weight_l)
    return x


class ActionCritics(nn.Module):
    """C critics with one or more hidden layers, (state, discount, action) -> N outputs.

    Arguments: `state_dim` D, `action_dim` A, `gammas` G discounts in [0, 1), `critics` C, `hidden` widths,
    `outputs` N: bins of a two-hot critic, or 1 for a scalar one. Weights are stacked over critics,
    (C, in, out), in the order [state, discount, action].
    Raises ValueError for discounts outside [0, 1) and for fewer than one critic.
    Source: paper section 3 and Table 2 (two hidden layers of 256).
    """

    def __init__(self, state_dim, action_dim, gammas, critics=4, hidden=(256, 256), outputs=64):
        super().__init__()
        if not all(0 <= g < 1 for g in gammas):
            raise ValueError(f"discounts must lie in [0, 1), got {list(gammas)}")
        self.state_dim, self.action_dim, self.count = state_dim, action_dim, critics
        self.weight, self.bias = stacked_layers(critics, [state_dim + 1 + action_dim, *hidden, outputs])
        # A discount enters as (the log of) its effective horizon: .99 and .999 are then about as far apart as
        # .9 and .99, where the plain numbers would differ by a hundredth.
        # symlog(1 / (1 - gamma)) = ln(1 + 1 / (1 - gamma))
        feature_G = torch.tensor([math.log1p(1 / max(1 - g, 1e-6)) for g in gammas], dtype=torch.float32)
        self.register_buffer("gamma_feature_G1", feature_G[:, None], persistent=False)

    def forward(self, state_SD: Tensor, action: Tensor) -> Tensor:
        """Score actions: state_SD (S, D) and action (..., S, G, A) -> outputs (C, ..., S, G, N).

        The discount axis of `action` may be 1, where one action is scored for all discounts. Actions are
        one-hot vectors or continuous ones in [-1, 1]; both are clamped to +-LIMIT as in the authors'
        code. DEVIATION: stored and sampled ones alike (the authors clip stored one-hots like probabilities).
        """
        weight_s, weight_g, weight_a = self.weight[0].split([self.state_dim, 1, self.action_dim], dim=1)
        # Under autocast the product is narrower than the bias; the bias is added in the product's type.
        from_state = state_SD @ weight_s
        from_state = from_state + self.bias[0].to(from_state.dtype)  # (C, S, H)
        from_gamma = self.gamma_feature_G1 @ weight_g  # (C, G, H)
        # Plain: x = cat([state, discount, action]) @ weight + bias, with every state repeated G (K) times.
        from_action = torch.einsum("...a,cah->c...h", action.clamp(-LIMIT, LIMIT), weight_a)
        x = from_state.unsqueeze(2) + from_gamma.unsqueeze(1)  # (C, S, G, H)
        x = x.unflatten(0, (-1, *(1,) * len(action.shape[:-3])))
        # Plain: from_action + x. In place where there is an action for each discount: over K samples this is the
        # largest tensor of an update, and a second one like it would cost a CPU 10% of the update's time.
        every = from_action.shape[-2] == x.shape[-2]
        x = from_action.add_(x) if every else from_action + x  # (C, ..., S, G, H)
        return after_first_layer(x.flatten(1, -2), self.weight, self.bias).view(*x.shape[:-1], -1)


class AllActionCritics(nn.Module):
    """C critics of all discrete actions at once, state -> one number for each discount and action.

    With every action's value at hand, the policy's expectation needs no samples. Arguments: `state_dim` D,
    `action_dim` A, `discounts` G, `critics` C, `hidden` widths. Raises ValueError for fewer than one
    critic. Source: the authors' code, for discrete actions with the scale-dependent critic.
    """

    def __init__(self, state_dim, action_dim, discounts, critics=4, hidden=(256, 256)):
        super().__init__()
        self.discounts = discounts
        self.weight, self.bias = stacked_layers(critics, [state_dim, *hidden, discounts * action_dim])

    def forward(self, state_SD: Tensor) -> Tensor:
        """States (S, D) -> values (C, S, G, A)."""
        x = state_SD @ self.weight[0] + self.bias[0]  # (C, S, H)
        return after_first_layer(x, self.weight, self.bias).unflatten(-1, (self.discounts, -1))


def draw_subset(critics: int, shape: tuple, size: int = 2, generator=None, device=None) -> Tensor:
    """Random indices of the critics for each target, (size, *shape): per element, with replacement.

    Source: REDQ (Chen et al. 2021), as the authors' code draws it: 2 of 4, anew for each b, t and discount.
    """
    return torch.randint(critics, (size, *shape), generator=generator, device=device)


def take_subset(q_C: Tensor, subset_R: Tensor) -> Tensor:
    """Values (C, ...) and indices (R, ...) -> the values of these critics (R, ...).

    The caller reduces them. OFFICIAL: the paper does not print the reduction. The scale-independent actor
    takes the mean: no term maximises Q, so there is no over-estimation to guard against, and a minimum would
    lower every target (authors' code). The scale-dependent actor does maximise Q, and takes the minimum.
    """
    return q_C.gather(0, subset_R)


def td_target(reward_S: Tensor, terminated_S: Tensor, q_next_SG: Tensor, gamma_G: Tensor) -> Tensor:
    """One-step targets y (S, G) from rewards (S,), end flags (S,) and next values (S, G).

    `terminated` is the task's own end; a truncated step is not one, and bootstraps from its last
    observation. OFFICIAL: the paper prints no end flag. Source: paper section 3.
    """
    # y_t = r_t + gamma Qbar(h_{t+1}, a' ~ pibar(h_{t+1})),  and r_t alone where the task is over
    goes_on_S1 = (~terminated_S.bool()).float().unsqueeze(-1)
    return reward_S.unsqueeze(-1) + gamma_G * goes_on_S1 * q_next_SG


def n_step_target(
    reward_S: Tensor, terminated_S: Tensor, q_next_SG: Tensor, gamma_G: Tensor, follows_S: Tensor, n: int
) -> Tensor:
    """n-step targets y (S, G) of states in order of time; `n` = 1 is `td_target`.

    `follows_S` (S,) is True where the next row is the next step of the same window. It is False at the end of
    a window or rollout, and in the last row: there fewer rewards are summed and the rest is bootstrapped.
    Rewards of an older policy are not corrected. Source: Sutton and Barto 2018, chapter 7.
    """
    # y^(1)_t = r_t + gamma Q'_{t+1},   y^(n)_t = r_t + gamma y^(n-1)_{t+1}
    y_SG = td_target(reward_S, terminated_S, q_next_SG, gamma_G)
    for _ in range(n - 1):
        next_SG = torch.where(follows_S.unsqueeze(-1), y_SG.roll(-1, dims=0), q_next_SG)
        y_SG = td_target(reward_S, terminated_S, next_SG, gamma_G)
    return y_SG


@torch.no_grad()
def move_target(target: nn.Module, online: nn.Module, tau: float | Tensor) -> None:
    """Move each parameter of `target` the share `tau` of the way to `online`. Source: Table 1 (tau = .003)."""
    # Qbar <- (1 - tau) Qbar + tau Q
    for old, new in zip(target.parameters(), online.parameters(), strict=True):
        old.lerp_(new, tau)


if __name__ == "__main__":
    torch.manual_seed(0)
    gammas = (0.1, 0.9, 0.99)
    critics = ActionCritics(state_dim=8, action_dim=3, gammas=gammas, critics=4, hidden=(16, 16), outputs=32)
    state_SD, sampled_KSGA = torch.randn(5, 8), F.one_hot(torch.randint(3, (2, 5, 3)), 3).float()
    print("4 critics, 2 sampled actions, 5 states, 3 discounts, 32 bins:", end=" ")
    print("(C, K, S, G, N) =", tuple(critics(state_SD, sampled_KSGA).shape))
    features = [round(x, 3) for x in critics.gamma_feature_G1[:, 0].tolist()]
    print(f"discounts {list(gammas)} enter as {features}")
    print("  by hand: ln(1 + 1.11), ln(1 + 10), ln(1 + 100)")

    print("targets: every reward is 1, and every next value 10")
    gamma_G, terminated_S = torch.tensor(gammas), torch.tensor([False, True])
    y_SG = td_target(torch.ones(2), terminated_S, torch.full((2, 3), 10.0), gamma_G)
    print(f"  one step: {[round(y, 3) for y in y_SG[0].tolist()]}; at the task's end: {y_SG[1].tolist()}")
    print("  by hand: 1 + gamma 10, and the reward alone")
    follows_S, q_next_SG = torch.tensor([True, True, False]), torch.full((3, 1), 10.0)
    y_SG = n_step_target(torch.ones(3), torch.zeros(3), q_next_SG, torch.tensor([0.5]), follows_S, n=3)
    print(f"  three steps, in a window of three, discount .5: {y_SG[:, 0].tolist()}")
    print("  by hand: 1 + .5 (1 + .5 (1 + .5 x 10)) = 3, then 4 and 6 as the window ends")
