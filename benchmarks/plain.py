r"""The gradient step written as plainly as its equations: update.py has to equal it, and to be faster.

What     the losses of `ind_ind` on a whole batch at once, padding included, and one `backward` through all of
         it: every critic sees [state, discount, action] written out for every sample, a label is a dense
         distribution over bins, and nothing is chunked, factorised or left out
Why      speed is measured as a ratio to honest plain code. This is also the shortest way to read the update
Paper    AMAGO-2 section 3: Eq. 3, Eq. 4 and the target y_t
Shapes   B batch, T time; C critics; G discounts; K action samples; A action; D state width; N bins
Notes    Networks are `agent.Agent`'s own, so that losses and gradients can be compared to the last digits;
         tests/test_learner_benchmark.py does. Draws come in the same order as in update.update with one
         chunk of all states, on a batch without padding: from one seed both see the same samples.
Copy     together with agent.py
Try      python benchmarks/learner.py --shapes small
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from critics import ActionCritics, draw_subset, move_target
from encoders import random_shift


def critic_logits(critics: ActionCritics, h_BTD: Tensor, action_KBTGA: Tensor) -> Tensor:
    """Logits (C, K, B, T, G, N): C independent MLPs on [state, discount, action]."""
    K, B, T, G, _ = action_KBTGA.shape
    h = h_BTD[None, :, :, None].expand(K, B, T, G, -1)
    discount = critics.gamma_feature_G1.expand(K, B, T, G, 1)
    x = torch.cat([h, discount, action_KBTGA.clamp(-0.999, 0.999)], dim=-1)
    x = x.expand(critics.count, *x.shape)
    for layer, (weight, bias) in enumerate(zip(critics.weight, critics.bias)):
        x = F.leaky_relu(x) if layer else x
        x = torch.einsum("ckbtgi,cio->ckbtgo", x, weight) + bias.view(critics.count, 1, 1, 1, 1, -1)
    return x


def plain_losses(agent, config, batch) -> tuple[Tensor, Tensor]:
    """Actor loss (B, T, G) and critic loss (C, B, T, G) of `ind_ind`, not yet masked. Source: Eq. 3 and 4."""
    support, G = agent.value.support, len(config.gammas)
    image_BT = random_shift(batch.image_BT) if config.augment else batch.image_BT
    h_BTD = agent.states(batch.obs_BTO, batch.time_BT, image_BT).float()
    h_BTD, next_BTD = h_BTD[:, :-1], h_BTD[:, 1:]
    stored_BTA = agent.action_vectors(batch.action_BT)
    stored_BTGA = stored_BTA.unsqueeze(2).expand(-1, -1, G, -1)

    # y_t = r_t + gamma Qbar(h_{t+1}, a' ~ pibar(h_{t+1})),  and r_t alone where the task is over
    with torch.no_grad():
        target_policy = agent.policy(agent.target_actor(next_BTD))
        next_logits = critic_logits(agent.value.target_critics, next_BTD, target_policy.sample(1))
        q_next_CBTG = support.decode(next_logits.squeeze(1))
        subset_RBTG = draw_subset(config.critics, (*next_BTD.shape[:2], G), device=h_BTD.device)
        q_next_BTG = q_next_CBTG.gather(0, subset_RBTG).mean(0)
        goes_on_BT1 = (~batch.done_BT).float().unsqueeze(-1)
        reward_BT1 = batch.reward_BT.unsqueeze(-1) * config.reward_scale
        y_BTG = reward_BT1 + agent.gamma_G * goes_on_BT1 * q_next_BTG
        mask_BTG = batch.mask_BT.unsqueeze(-1).expand_as(y_BTG)
        agent.popart.update(y_BTG[batch.mask_BT], mask_BTG[batch.mask_BT])

    # Eq. 3:  L = -twohot(y)^T log Q_B(h, a)
    logits_CBTGN = critic_logits(agent.value.critics, h_BTD, stored_BTGA.unsqueeze(0)).squeeze(1)
    labels_BTGN = support.twohot_labels(y_BTG)
    critic_loss_CBTG = -(labels_BTGN * torch.log_softmax(logits_CBTGN, dim=-1)).sum(-1)

    # Eq. 4:  L = -1{ Q(h_t, a_t) - E_{a' ~ pi}[Q(h_t, a')] > 0 } log pi(a_t | h_t)
    policy = agent.policy(agent.actor(h_BTD))
    with torch.no_grad():
        q_BTG = support.decode(logits_CBTGN).mean(0)
        sampled_KBTGA = policy.sample(config.action_samples)
        sampled_logits = critic_logits(agent.value.critics, h_BTD, sampled_KBTGA)
        q_sampled_KBTG = support.decode(sampled_logits).mean(0)
        # A sample equal to the stored action is a tie, and rounding must not break it.
        same_KBTG = (sampled_KBTGA == stored_BTGA).all(-1)
        q_sampled_KBTG = torch.where(same_KBTG, q_BTG, q_sampled_KBTG)
        keep_BTG = ((q_BTG - q_sampled_KBTG).mean(0) > 0).float()
    actor_loss_BTG = -keep_BTG * policy.log_prob(stored_BTGA)
    return actor_loss_BTG, critic_loss_CBTG


def plain_update(agent, optimizer, schedule, batch, config, num_tasks: int = 1) -> dict[str, Tensor]:
    """One gradient step, as `update.update` makes it for `ind_ind`; returns both losses and the gradient norm."""
    agent.train()
    mask_BT1 = F.pad(batch.mask_BT, (1, 0), value=True)
    agent.encoder.update_statistics(batch.obs_BTO, mask_BT1)
    optimizer.zero_grad()
    actor_loss_BTG, critic_loss_CBTG = plain_losses(agent, config, batch)
    actor_loss = actor_loss_BTG[batch.mask_BT].mean()
    critic_loss = critic_loss_CBTG[:, batch.mask_BT].mean()
    (actor_loss + config.critic_weight * critic_loss).backward()
    norm = nn.utils.clip_grad_norm_(agent.parameters(), config.grad_clip)
    optimizer.step()
    schedule.step(torch.ones_like(norm))
    move_target(agent.target_actor, agent.actor, config.tau)
    move_target(agent.value.target_critics, agent.value.critics, config.tau)
    return {"loss/actor": actor_loss.detach(), "loss/critic": critic_loss.detach(), "gradient_norm": norm}
