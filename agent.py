r"""The agent put together: its networks, the two losses of each variant, and how it acts.

What     `Agent` holds everything that has weights; `VARIANTS` maps a variant's name to its actor and critic
         loss; `Policy` plays, one observation at a time, with a memory of its own for each environment
Why      the components know nothing of one another: here is where they meet, and the only place
Paper    AMAGO-2 section 3, Figure 2, equations 3 and 4
Shapes   B batch, T time, S states: flattened valid (b, t), a chunk of them at a time; O observation;
         A action; D state width; C critics; G discounts; K action samples; N bins
Config   `config` is the trainer's (train.py), read for sizes and limits

    observation (B, T, O) -> encoder (B, T, E) -> Transformer (B, T, D) -> actor (B, T, G, F) -> action
                                                               \-> critics (C, S, G, N) -> value, loss
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from critics import TwoHotCritics, draw_subset, take_subset, td_target
from crr_actor import ActorHead, Categorical, TanhGaussian, advantage, crr_loss
from encoders import FeedForwardEncoder
from envs import make_env
from transformer import CausalTransformer
from twohot import BinSupport, twohot_loss


class Agent(nn.Module):
    """Everything that has weights: timestep encoder, Transformer, actor, critics, and the two targets.

    The networks' sizes come from `config`; `observation_dim` O and `action_dim` A from the environment,
    whose observation already holds the previous action, reward and flags. Source: paper, Figure 2.
    """

    def __init__(self, config, observation_dim: int, action_dim: int, discrete: bool):
        super().__init__()
        c = config
        self.discrete, self.action_dim = discrete, action_dim
        self.prob_limits = (c.prob_low, c.prob_high)
        self.encoder = FeedForwardEncoder(observation_dim, c.encoder_hidden, c.encoder_dim)
        self.transformer = CausalTransformer(c.encoder_dim, c.d_model, c.d_ff, c.layers, c.heads, c.dropout)
        features = action_dim if discrete else 2 * action_dim
        self.actor = ActorHead(c.d_model, features, len(c.gammas), c.hidden)
        self.critics = TwoHotCritics(c.d_model, action_dim, c.gammas, c.critics, c.hidden, c.bins)
        # Targets exist for the heads only: states always come from the online Transformer.
        self.target_actor = ActorHead(c.d_model, features, len(c.gammas), c.hidden)
        self.target_critics = TwoHotCritics(c.d_model, action_dim, c.gammas, c.critics, c.hidden, c.bins)
        self.target_actor.load_state_dict(self.actor.state_dict())
        self.target_critics.load_state_dict(self.critics.state_dict())
        self.target_actor.requires_grad_(False)
        self.target_critics.requires_grad_(False)
        self.support = BinSupport(c.bins, c.bin_low, c.bin_high, c.symlog)
        self.register_buffer("gamma_G", torch.tensor(c.gammas), persistent=False)

    def states(self, obs_BTO: Tensor, time_BT: Tensor) -> Tensor:
        """Observations (B, T, O) at their rollouts' timesteps (B, T) -> states h (B, T, D)."""
        return self.transformer(self.encoder(obs_BTO), time_BT)

    def policy(self, features: Tensor) -> Categorical | TanhGaussian:
        """The distribution over actions that an actor head's output (..., F) describes."""
        return Categorical(features, *self.prob_limits) if self.discrete else TanhGaussian(features)

    def action_vectors(self, action: Tensor) -> Tensor:
        """Actions as the critics take them, (..., A): one-hot where they are discrete."""
        return F.one_hot(action.long(), self.action_dim).float() if self.discrete else action.float()


def losses_ind_ind(agent: Agent, config, h_SD, next_SD, stored_SA, reward_S, terminated_S):
    """Actor loss (S, G) and critic loss (C, S, G) for one chunk of states, and what to plot of them.

    Both are classification losses, so neither depends on the scale of returns. Source: Eq. 3 and 4.
    """
    decode = agent.support.decode
    with torch.no_grad():
        # y = r + gamma Qbar(h', a' ~ pibar(h')), from a pair of critics drawn for each state and discount
        next_action_SGA = agent.policy(agent.target_actor(next_SD)).sample(1)[0]
        q_next_CSG = decode(agent.target_critics(next_SD, next_action_SGA))
        subset_RSG = draw_subset(*q_next_CSG.shape[:1], q_next_CSG.shape[1:], device=h_SD.device)
        q_next_SG = take_subset(q_next_CSG, subset_RSG).mean(0)
        y_SG = td_target(reward_S, terminated_S, q_next_SG, agent.gamma_G)

    stored_S1A = stored_SA.unsqueeze(1)  # one action, scored for every discount
    logits_CSGN = agent.critics(h_SD, stored_S1A)
    critic_loss_CSG = twohot_loss(logits_CSGN, *agent.support.encode(y_SG))

    policy = agent.policy(agent.actor(h_SD))
    with torch.no_grad():  # nothing of the actor's loss may reach a critic, or the states through one
        q_SG = decode(logits_CSGN).mean(0)
        sampled_KSGA = policy.sample(config.action_samples)
        q_sampled_KSG = decode(agent.critics(h_SD, sampled_KSGA)).mean(0)
        # A sample equal to the stored action has the stored action's value, to the last bit: two
        # matrix multiplies of different shapes may round differently, and would break a tie at random.
        same_KSG = (sampled_KSGA == stored_S1A).all(-1)
        advantage_SG = advantage(q_SG, torch.where(same_KSG, q_SG, q_sampled_KSG))
    actor_loss_SG, info = crr_loss(policy.log_prob(stored_S1A), advantage_SG)

    metrics = {f"filter/{g:g}": info["filter"][:, i] for i, g in enumerate(config.gammas)}
    metrics["filter"] = info["filter"]
    metrics["entropy"] = policy.entropy()[:, -1].detach()
    metrics["value"] = q_SG[:, -1] / config.reward_scale
    return actor_loss_SG, critic_loss_CSG, metrics


# Actor and critic loss, by the scale they depend on: the one place where variants differ.
VARIANTS = {"ind_ind": losses_ind_ind}


class Policy:
    """A trained agent to play with: it keeps its own memory, one per environment.

        policy = train.load("runs/my_run/best.pt")
        env = policy.make_env()
        obs, info = env.reset()
        policy.reset()
        while not done:
            obs, reward, terminated, truncated, info = env.step(policy(obs))
            done = terminated or truncated

    Arguments: `agent`, its `config`, `num_envs` environments side by side (B), `seed` of its draws; `greedy`
    takes the mode of the last discount's policy instead of a sample.
    """

    def __init__(self, agent: Agent, config, num_envs: int = 1, seed: int = 0, greedy: bool = False):
        self.agent, self.config, self.greedy = agent, config, greedy
        self.device = next(agent.parameters()).device
        self.time_B = torch.zeros(num_envs, dtype=torch.long, device=self.device)
        self.cache = agent.transformer.init_cache(num_envs, config.context, self.device)
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def reset(self, which_B=None) -> None:
        """Forget: everything, or the environments where `which_B` (B,) is True. Call at each new rollout."""
        if which_B is None:
            which_B = torch.ones(len(self.time_B), dtype=torch.bool)
        which_B = torch.as_tensor(which_B, device=self.device)
        self.time_B[which_B] = 0
        self.agent.transformer.reset(self.cache, which_B)

    @torch.inference_mode()
    def __call__(self, obs):
        """Observation (O,) or (B, O) -> action: an int or (B,) where discrete, else (A,) or (B, A)."""
        obs_BO = torch.as_tensor(np.asarray(obs), dtype=torch.float32, device=self.device)
        single = obs_BO.ndim == 1
        if self.agent.training:
            self.agent.eval()  # no dropout, no power iterations; `update` switches back
        embedding_BE = self.agent.encoder(obs_BO.view(len(self.time_B), -1))
        h_BD = self.agent.transformer.step(embedding_BE, self.time_B, self.cache)
        # Of the policies for all discounts, the one for the longest horizon acts.
        policy = self.agent.policy(self.agent.actor(h_BD)[:, -1])
        action_BA = policy.mode() if self.greedy else policy.sample(1, generator=self.generator)[0]
        self.time_B += 1
        action = (action_BA.argmax(-1) if self.agent.discrete else action_BA).cpu().numpy()
        return action[0] if single else action

    def make_env(self, **kwargs):
        """The environment that this policy was trained on. `kwargs` override `envs.make_env`'s arguments."""
        return make_env(**{**env_arguments(self.config), **kwargs})


def env_arguments(config) -> dict:
    "What of a configuration describes its environment."
    return {
        "env": config.env,
        "tasks": config.tasks,
        "attempts": config.attempts,
        "store_executed": config.store_executed,
    }
