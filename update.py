r"""One gradient step, in the order of the paper.

    states       windows -> encoder -> Transformer -> h, one state for each real step
    targets      y = r + gamma Qbar(h', a' ~ pibar(h')), for all discounts
    critic loss  Eq. 3 (classification of two-hot bins) or Eq. 1 (regression on normalised returns)
    actor loss   Eq. 4 (imitate what the filter lets through) or Eq. 2 (maximise the critic)
    backward     through critics and actor in chunks of states, then once through the Transformer
    step         clip the gradient, step the optimizer, move the target networks

Why      each loss exists in two versions, independent of the scale of returns or dependent on it: four variants
Paper    AMAGO-2 section 3, equations 1 to 4, Table 1, Figure 2
Shapes   B windows of T steps and T+1 observations; S real steps of them, flattened in order of time; D state
         width; A action; C critics; G discounts; N bins; K action samples; P parameters with a gradient;
         R rows: all B (T+1) states. Observations, times and states have T+1 columns, also where a name says BT
Notes    the host knows every shape and reads no result here, so it never waits for a GPU
"""

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agent import Agent, Distribution
from critics import draw_subset, move_target, n_step_target, take_subset
from crr_actor import crr_loss, value_loss
from encoders import random_shift
from twohot import cross_entropy, twohot_loss


def update(
    agent: Agent, optimizer, schedule, batch, config, num_tasks: int = 1, mean: Callable | None = None
) -> dict[str, Tensor]:
    """Make one gradient step on a `replay.Batch`; returns metrics, tensors on the batch's device.

    `optimizer` and `schedule` come from `train.make_optimizer`; `mean` averages a tensor over processes that train
    together. Metrics are scalars, but for `filter/<discount>` (G,), `bins/<discount>` (G, N), `share/...`
    (num_tasks,), and `not_finite` (2, P): row 0 of the weights, row 1 of the gradients. Source: Table 1.
    """
    agent.train()
    optimizer.zero_grad()
    # Real are o_0, and o_{t+1} where step t is real. A NaN in padding would spread through attention: 0 * NaN is NaN.
    seen_BT1 = F.pad(batch.mask_BT, (1, 0), value=True)
    batch = batch._replace(obs_BTO=batch.obs_BTO.masked_fill(~seen_BT1.unsqueeze(-1), 0.0))
    agent.encoder.update_statistics(batch.obs_BTO, seen_BT1, *([mean] if mean else []))  # change here alone
    metrics = defaultdict(float)
    by_task = torch.zeros(len(SHARES), num_tasks, device=batch.obs_BTO.device)
    # One group's activations exist at a time; but PopArt, in the other variants, learns from all targets first.
    for part in groups(batch, config) if config.variant == "ind_ind" else [batch]:
        for name, value in add_gradients(agent, part, config, by_task, mean).items():
            metrics[name] += value
    metrics |= dict(zip(SHARES, by_task / by_task.sum(1, keepdim=True).clamp(min=1e-30)))
    metrics |= {"popart/mu": agent.popart.mu[-1].clone(), "popart/sigma": agent.popart.sigma[-1]}

    parameters = [p for p in agent.parameters() if p.grad is not None]
    gradients = [p.grad for p in parameters]
    if mean:  # one message for all of them
        nn.utils.vector_to_parameters(mean(nn.utils.parameters_to_vector(gradients)), gradients)
    norms_2P = torch.stack(torch._foreach_norm([*parameters, *gradients])).view(2, -1)
    norm = norms_2P[1].norm()
    skipped = (~norm.isfinite()).float()
    metrics |= {"gradient_norm": norm, "skipped": skipped, "not_finite": ~norms_2P.isfinite()}

    # A skipped update moves no weight: a fused optimizer reads found_inf, warm-up and targets move by 0. (Clipping
    # by a NaN makes every gradient NaN, but nothing reads them. Statistics and power iterations have moved already.)
    nn.utils.clip_grads_with_norm_(parameters, config.grad_clip, norm)
    optimizer.found_inf = skipped
    optimizer.step()
    schedule.step(1 - skipped)
    share = config.tau * (1 - skipped)
    move_target(agent.target_actor, agent.actor, share)
    move_target(agent.value.target_critics, agent.value.critics, share)
    return dict(metrics)


SHARES = ("share/states", "share/actor", "share/critic", "share/gradient")  # logged for each task


def groups(batch, config) -> list:
    """Split a batch into groups of up to `steps_per_pass` steps or one window, each trimmed to its longest window.

    Sorted by length, they leave out most padding; one window is not split. DEVIATION: each group draws dropout and
    makes power iterations; the authors do so once an update.
    """
    parts, first, longest = [], 0, batch.lengths[0]
    for end, length in enumerate(batch.lengths):
        full = (end - first + 1) * (longest + 1) > config.steps_per_pass
        # A window shorter than half of the longest would be mostly padding.
        if end > first and (full or 2 * length < longest):
            parts.append(batch.windows(first, end))
            first, longest = end, length
    return [*parts, batch.windows(first, len(batch.lengths))]


def states(agent: Agent, batch, config) -> Tensor:
    """States h (B, T+1, D) of a batch's observations: encoder and Transformer, one group after another."""
    h, T = [], batch.mask_BT.shape[1]
    for group in groups(batch, config):
        image_BT = random_shift(group.image_BT) if config.augment else group.image_BT
        h_BTD = agent.states(group.obs_BTO, group.time_BT, image_BT).float()
        h.append(F.pad(h_BTD, (0, 0, 0, T + 1 - h_BTD.shape[1])))
    return torch.cat(h)


def add_gradients(agent: Agent, batch, config, by_task: Tensor, mean: Callable | None) -> dict[str, Tensor]:
    """Add a batch's gradients to the parameters, and its losses to `by_task` (len(SHARES), num_tasks); returns metrics."""
    variant, real_S, (_, T) = VARIANTS[config.variant], batch.real_S, batch.mask_BT.shape
    autocast = torch.autocast(real_S.device.type, torch.bfloat16, enabled=config.precision == "bf16")

    # ---- States. From here on they are flat: S real steps, in order of time, without padding.
    with autocast:
        h_BTD = states(agent, batch, config)
    h_RD = h_BTD.detach().flatten(0, 1)
    row_S = real_S + real_S.div(T, rounding_mode="floor")  # a window has T + 1 states
    h_SD, next_SD = h_RD.index_select(0, row_S), h_RD.index_select(0, row_S + 1)
    follows_BT = F.pad(batch.mask_BT[:, 1:], (0, 1))  # is the next step a real one, too?
    task_BT = batch.task_B.unsqueeze(1).expand_as(batch.mask_BT)
    fields = (batch.action_BT, batch.reward_BT, batch.done_BT, follows_BT, task_BT)
    action_S, reward_S, done_S, follows_S, task_S = (x.flatten(0, 1).index_select(0, real_S) for x in fields)
    stored_SA, counts_S = agent.action_vectors(action_S), batch.weight_S > 0
    chunks = [slice(i, i + config.chunk) for i in range(0, len(real_S), config.chunk)]

    # ---- Targets, for all states of this part: PopArt learns from them before any loss is computed.
    with autocast:
        q_next_SG = torch.cat([next_values(agent, next_SD[part], variant.reduce) for part in chunks])
    # y_t = r_t + gamma Qbar(h_{t+1}, a' ~ pibar(h_{t+1})),  and r_t alone where the task is over
    # OFFICIAL: the multiplier comes from the authors' scripts; with symlog bins it decides how fine they are.
    reward_S = reward_S * config.reward_scale
    y_SG = n_step_target(reward_S, done_S, q_next_SG, agent.gamma_G, follows_S, config.n_step)
    # A value whose square overflows would corrupt PopArt's statistics for good. With ind_ind they are for the log
    # alone, and processes may have different numbers of groups: no pooling.
    pool = [mean] if mean and config.variant != "ind_ind" else []
    agent.popart.update(y_SG, (y_SG.abs() < 1e15) & counts_S.unsqueeze(1), *pool)

    # ---- Losses, and the backward pass as far as the states.
    # L = L_Actor + lambda L_Critic. OFFICIAL: a mean over real steps, discounts and critics, where the paper
    # prints a sum over a window.
    # Plain: loss = actor_loss(h).mean() + lambda * critic_loss(h).mean(); loss.backward(). The same gradients,
    # but only `chunk` states' worth of actor and critic activations exist at a time: on a CPU that is the
    # difference between cache and memory.
    grad_SD, metrics, losses = torch.empty_like(h_SD), defaultdict(float), []
    for part in chunks:
        h, stored_S1A, weight_S = (
            h_SD[part].requires_grad_(),
            stored_SA[part].unsqueeze(1),
            batch.weight_S[part],
        )
        with autocast:
            critic_loss_CSG, q_CSG, logged = variant.critic_loss(agent, h, stored_S1A, y_SG[part])
            policy = agent.policy(agent.actor(h))
            actor_loss_SG, more = variant.actor_loss(agent, config, h, stored_S1A, policy, q_CSG)
        actor_loss_S, critic_loss_S = actor_loss_SG.mean(1), critic_loss_CSG.mean((0, 2))
        (weight_S @ (actor_loss_S + config.critic_weight * critic_loss_S)).backward()
        grad_SD[part] = h.grad
        losses.append((actor_loss_SG.detach().abs().mean(1), critic_loss_S.detach()))
        logged |= more | {"loss/actor": actor_loss_S.detach(), "loss/critic": critic_loss_S.detach()}
        logged |= {"entropy": policy.entropy()[:, -1].detach()}  # of the policy that acts
        logged |= {"value": q_CSG[..., -1].mean(0) / config.reward_scale}
        for name, value in logged.items():
            metrics[name] += torch.tensordot(weight_S, value.float(), 1)

    # For the log alone: learning never sees a task's number.
    actor_S, critic_S = (torch.cat(parts) for parts in zip(*losses))
    parts_4S = torch.stack([torch.ones_like(actor_S), actor_S, critic_S, grad_SD.norm(dim=1)])
    by_task.index_add_(1, task_S, parts_4S * counts_S)

    # ---- The backward pass through Transformer and encoder: one for all chunks.
    row_S = torch.where(counts_S, row_S, len(h_RD))  # padding writes behind the last row
    grad_RD = h_RD.new_zeros(len(h_RD) + 1, h_RD.shape[1]).index_copy_(0, row_S, grad_SD)
    h_BTD.backward(grad_RD[:-1].view_as(h_BTD))
    return metrics


@torch.no_grad()
def next_values(agent: Agent, next_SD: Tensor, reduce: Callable) -> Tensor:
    """Values (S, G) of the target policy's actions in the next states, from two target critics."""
    # Qbar(h', a' ~ pibar(h')), reduced over two critics, drawn with replacement for each state and discount
    policy = agent.policy(agent.target_actor(next_SD))
    q_CSG = agent.value.target_values(next_SD, policy, agent.popart)
    subset_RSG = draw_subset(len(q_CSG), q_CSG.shape[1:], device=next_SD.device)
    return reduce(take_subset(q_CSG, subset_RSG), 0)


# Critic losses take states (S, D), stored actions (S, 1, A) and targets (S, G). They return the loss (C, S, G), the
# stored actions' values (C, S, G) without gradient, and metrics (S, ...).


def classification_loss(agent: Agent, h_SD: Tensor, stored_S1A: Tensor, y_SG: Tensor):
    """Scale-independent critic loss (C, S, G): cross-entropy with two-hot targets (S, G). Source: Eq. 3."""
    support, logits_CSGN = agent.value.support, agent.value.critics(h_SD, stored_S1A)
    # Eq. 3:  L = -twohot(y)^T log Q_B(h, a)
    if agent.value.hlgauss:
        loss_CSG = cross_entropy(logits_CSGN, support.hlgauss_labels_unchecked(y_SG))
    else:
        loss_CSG = twohot_loss(logits_CSGN, *support.encode_unchecked(y_SG))
    logits_CSGN = logits_CSGN.detach()
    # How often each bin is the first critic's most likely one (paper, Figure 7 centre).
    bin_N = torch.arange(logits_CSGN.shape[-1], device=logits_CSGN.device)
    chosen_SGN = logits_CSGN[0].argmax(-1, keepdim=True) == bin_N
    return loss_CSG, support.decode(logits_CSGN), {"bins/<discount>": chosen_SGN}


def regression_loss(agent: Agent, h_SD: Tensor, stored_S1A: Tensor, y_SG: Tensor):
    """Scale-dependent critic loss (C, S, G): squared error of normalised returns (S, G). Source: Eq. 1."""
    popart, raw_CSG = agent.popart, agent.value.raw(h_SD, stored_S1A)
    # Eq. 1:  L = (Q(h, a) - y)^2, both normalised
    loss_CSG = (popart.normalised(raw_CSG) - popart.standardise(y_SG)) ** 2
    return loss_CSG, popart.denormalised(raw_CSG.detach()), {}


# Actor losses also take the policy (S, G, A) and the stored actions' values. They return the loss (S, G)
# and metrics (S, ...).


def imitate(agent: Agent, config, h_SD: Tensor, stored_S1A: Tensor, policy: Distribution, q_CSG: Tensor):
    """Scale-independent actor loss (S, G): clone the stored actions that the filter lets through. Eq. 4."""
    # Eq. 4:  L = -1{ Q(h, a) - E_{a' ~ pi}[Q(h, a')] > 0 } log pi(a | h)
    advantage_SG = agent.value.advantage(h_SD.detach(), stored_S1A, q_CSG, policy, config.action_samples)
    loss_SG, info = crr_loss(policy.log_prob(stored_S1A), advantage_SG)
    return loss_SG, {"filter": info["filter"].mean(1), "filter/<discount>": info["filter"]}


def maximise(agent: Agent, config, h_SD: Tensor, stored_S1A: Tensor, policy: Distribution, q_CSG: Tensor):
    """Scale-dependent actor loss (S, G): minus the value of the policy's own action. Source: Eq. 2."""
    # Eq. 2:  L = -Q(h, a ~ pi(h)).  OFFICIAL: the state is detached, so that the Transformer learns from the actor's
    # loss through the policy alone.
    q_CSG = agent.value.policy_values(h_SD.detach(), policy, config.action_samples, agent.popart)
    loss_SG, info = value_loss(q_CSG)
    return loss_SG, {name: value_SG.mean(1) for name, value_SG in info.items()}


class Variant(NamedTuple):
    """The losses of a variant, and how the drawn critics' values make one target (`critics.take_subset`)."""

    actor_loss: Callable
    critic_loss: Callable
    reduce: Callable


# Actor first; `ind` is independent of the scale of returns, `dep` depends on it. Variants differ here, and in the
# critic that `Agent` builds; encoder, Transformer, replay and training loop are the same. OFFICIAL: the paper does not
# print the target's reduction, mean or minimum.
VARIANTS = {
    "ind_ind": Variant(imitate, classification_loss, torch.mean),
    "ind_dep": Variant(imitate, regression_loss, torch.mean),
    "dep_ind": Variant(maximise, classification_loss, torch.amin),
    "dep_dep": Variant(maximise, regression_loss, torch.amin),
}
