r"""An ensemble of critics over all discounts at once, and the targets they learn.

What     Q(h, a, gamma) for C independent critics and G discounts in one batched pass: `ActionCritics` score
         given actions, by logits over N return bins or by one number; `AllActionCritics` put out one
         number for every discrete action. The drawn pair of critics behind a target; one-step and n-step
         TD targets; the moving average of a target network
Why      in each state K + 1 actions, the stored one and K samples, are scored by every critic for every
         discount: at the paper's sizes most of the FLOPs of an update, and almost all of its memory
Paper    AMAGO-2 section 3 (y_t, and the ensemble over discounts) and Table 1 (C = 4, G = 7, tau). N bins:
         the scale-independent critic, Eq. 3; one number: the scale-dependent one, Eq. 1.
         Authors' code: github.com/UT-Austin-RPL/amago
Shapes   S states: flattened valid (b, t), a chunk of them at a time; C critics, R of them drawn;
         G discounts; K action samples; A action; D state width; N bins; H hidden width; M single actions
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
    "Weights (C, in, out) and biases (C, 1, out) of C independent MLPs of the given widths."
    weight, bias = nn.ParameterList(), nn.ParameterList()
    for fan_in, fan_out in itertools.pairwise(widths):
        bound = 1 / math.sqrt(fan_in)
        weight.append(nn.Parameter(torch.empty(critics, fan_in, fan_out).uniform_(-bound, bound)))
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
        if critics < 1:
            raise ValueError(f"critics must be at least 1, got {critics}")
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
        from_state = (
            state_SD @ weight_s
        )  # under autocast narrower than the bias, and added to it in that type
        from_state = from_state + self.bias[0].to(from_state.dtype)  # (C, S, H)
        from_gamma = self.gamma_feature_G1 @ weight_g  # (C, G, H)
        # Plain: x = cat([state, discount, action]) @ weight + bias, with every state repeated G (K) times.
        from_action = torch.einsum("...a,cah->c...h", action.clamp(-LIMIT, LIMIT), weight_a)
        x = from_state.unsqueeze(2) + from_gamma.unsqueeze(1)  # (C, S, G, H)
        x = from_action + x.unflatten(0, (-1, *(1,) * len(action.shape[:-3])))  # (C, ..., S, G, H)
        return after_first_layer(x.flatten(1, -2), self.weight, self.bias).view(*x.shape[:-1], -1)


class AllActionCritics(nn.Module):
    """C critics of all discrete actions at once, state -> one number for each discount and action.

    With every action's value at hand, the policy's expectation needs no samples. Arguments: `state_dim` D,
    `action_dim` A, `discounts` G, `critics` C, `hidden` widths. Raises ValueError for fewer than one
    critic. Source: the authors' code, for discrete actions with the scale-dependent critic.
    """

    def __init__(self, state_dim, action_dim, discounts, critics=4, hidden=(256, 256)):
        super().__init__()
        if critics < 1:
            raise ValueError(f"critics must be at least 1, got {critics}")
        self.discounts = discounts
        self.weight, self.bias = stacked_layers(critics, [state_dim, *hidden, discounts * action_dim])

    def forward(self, state_SD: Tensor) -> Tensor:
        """States (S, D) -> values (C, S, G, A)."""
        x = state_SD @ self.weight[0] + self.bias[0]  # (C, S, H)
        return after_first_layer(x, self.weight, self.bias).unflatten(-1, (self.discounts, -1))


def draw_subset(critics: int, shape: tuple, size: int = 2, generator=None, device=None) -> Tensor:
    """Indices of the critics behind each target, (size, *shape): drawn per element, with replacement.

    Source: REDQ (Chen et al. 2021), as the authors' code draws it: 2 of 4, anew for each b, t and discount.
    """
    return torch.randint(critics, (size, *shape), generator=generator, device=device)


def take_subset(q_C: Tensor, subset_R: Tensor) -> Tensor:
    """Values (C, ...) and indices (R, ...) -> the drawn critics' values (R, ...).

    OFFICIAL, the paper prints neither: the caller reduces them. For the scale-independent actor that is the
    mean: no term maximises Q, so there is no over-estimation to guard against, and a minimum would sink every
    target (authors' code).
    The scale-dependent actor does maximise Q, and takes the minimum.
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

    `follows_S` (S,) is True where the next row is the next step of the same window. Where it is False,
    at the end of a window or rollout (the last row's must be), fewer rewards are summed and the rest is
    bootstrapped. Nothing corrects for the policy having changed since. Source: Sutton and Barto 2018, chapter 7.
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
    gamma_G = torch.tensor(gammas)
    critics = ActionCritics(state_dim=8, action_dim=3, gammas=gammas, critics=4, hidden=(16, 16), outputs=32)
    state_SD = torch.randn(5, 8)
    stored_S1A = F.one_hot(torch.randint(3, (5, 1)), 3).float()
    sampled_KSGA = F.one_hot(torch.randint(3, (2, 5, 3)), 3).float()
    q_CSGA = AllActionCritics(8, action_dim=3, discounts=3, critics=4, hidden=(16, 16))(state_SD)
    print("4 critics, 5 states, 3 discounts, 3 actions, 32 bins")
    print("  stored action, all discounts: (C, S, G, N)   =", tuple(critics(state_SD, stored_S1A).shape))
    print("  K=2 sampled actions:          (C, K, S, G, N) =", tuple(critics(state_SD, sampled_KSGA).shape))
    print("  every action at once:         (C, S, G, A)    =", tuple(q_CSGA.shape))
    sizes = "4 x ((8 + 1 + 3) x 16 + 16  +  16 x 16 + 16  +  16 x 32 + 32)"
    print(f"  parameters {sum(p.numel() for p in critics.parameters())}: by hand {sizes} = 4096")
    features = [round(x, 3) for x in critics.gamma_feature_G1[:, 0].tolist()]
    print(f"  discounts {list(gammas)} enter as {features}: ln(1 + 1.11), ln(1 + 10), ln(1 + 100)")

    row = torch.cat([state_SD[4], critics.gamma_feature_G1[2], stored_S1A[4, 0].clamp(-0.999, 0.999)])
    for layer, (weight, bias) in enumerate(zip(critics.weight, critics.bias)):
        row = F.leaky_relu(row) if layer else row
        row = row @ weight[1] + bias[1, 0]
    gap = (row - critics(state_SD, stored_S1A)[1, 4, 2]).abs().max().item()
    print(f"  critic 1, state 4, discount .99, written out in full: largest difference {gap:.1e}")

    print("\na target, by hand: two of the critics' values 1, 2, 3, 4 are drawn")
    q_CSG = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(4, 1, 1)
    pair = take_subset(q_CSG, torch.tensor([1, 3]).view(2, 1, 1))
    print(f"  numbers 1 and 3: mean {pair.mean(0).item()}, minimum {pair.amin(0).item()}")
    for terminated in (False, True):
        y = td_target(torch.tensor([1.0]), torch.tensor([terminated]), torch.full((1, 3), 10.0), gamma_G)
        shown = [round(x, 3) for x in y[0].tolist()]
        print(f"  reward 1, next value 10, terminated {terminated!s:5}: {shown} for discounts {list(gammas)}")
    follows_S = torch.tensor([True, True, False])
    y_SG = n_step_target(
        torch.ones(3), torch.zeros(3), torch.full((3, 1), 10.0), torch.tensor([0.5]), follows_S, n=3
    )
    print(f"  3 steps, discount .5, rewards 1, next values 10: {y_SG[:, 0].tolist()}")
    print("  by hand: 1 + .5 (1 + .5 (1 + .5 x 10)) = 3, then 4 and 6 as the window ends")
    target, online = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    nn.init.zeros_(target.weight), nn.init.ones_(online.weight)
    for _ in range(3):
        move_target(target, online, tau=0.1)
    print(f"  a target's weight 0, moved 3 times by .1 towards 1: {target.weight.item():.3f} = 1 - .9^3")
