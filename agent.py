r"""The agent put together: its networks, the losses of the four variants, and how it acts.

What     `Agent` holds everything that has weights; `VARIANTS` says what of the update each variant takes;
         `next_values` and `losses` are what an update (train.py) is made of; `Policy` plays, one observation
         at a time, with a memory of its own for each environment
Why      the components know nothing of one another: here is where they meet, and the only place
Paper    AMAGO-2 section 3, Figure 2, equations 1 to 4
Shapes   B batch, T time, S states: flattened valid (b, t), a chunk of them at a time; O observation;
         A action; D state width; C critics; G discounts; K action samples; N bins
Config   `config` is the trainer's (config.py), read for sizes and limits
Notes    OFFICIAL, what the paper does not print: the dependent actor takes the least of all critics, and its
         target the less of two drawn; the independent one means (`VARIANTS`). With discrete actions the scalar
         critic puts out every action's value, and the expectation over the policy is exact in target,
         advantage and Eq. 2 (`ScalarValue`); the two-hot critic samples. What an actor's loss asks of a critic
         gives no gradient to the state, either. Decoded values are normalised by PopArt's mean and deviation

    observation (B, T, O) -> encoder (B, T, E) -> Transformer (B, T, D) -> actor (B, T, G, F) -> action
                                                               \-> critics (C, S, G, N or 1) -> value, loss
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from critics import ActionCritics, AllActionCritics, draw_subset, take_subset
from crr_actor import ActorHead, Categorical, TanhGaussian, advantage, crr_loss, value_loss
from encoders import FeedForwardEncoder, GridLanguageEncoder, PixelEncoder
from popart import PopArt
from runtime.episode_buffer import parts
from runtime.wiring import env_arguments
from suites import make_env
from suites.babyai import BABYAI_VOCABULARY
from transformer import CausalTransformer
from twohot import BinSupport, cross_entropy, twohot_loss

Distribution = Categorical | TanhGaussian

# ------------------------------------------------------------------------------------- the two critics


class TwoHotValue(nn.Module):
    """The scale-independent critic: a classifier over return bins. Source: Eq. 3.

    Its methods are what a variant's update asks of a critic, here and in `ScalarValue`. Values (C, S, G)
    are returns. Nothing that an actor's loss asks for gives a gradient to a critic's weights.
    """

    def __init__(self, config, action_dim: int, discrete: bool):
        super().__init__()
        c, self.discrete = config, discrete
        sizes = (c.d_model, action_dim, c.gammas, c.critics, c.hidden, c.bins)
        self.critics, self.target_critics = ActionCritics(*sizes), ActionCritics(*sizes)
        self.support = BinSupport(c.bins, c.bin_low, c.bin_high, c.symlog)
        self.hlgauss = c.value_label == "hlgauss"
        self.gammas = c.gammas

    def next_values(
        self, next_SD: Tensor, policy: Distribution, subset_RSG: Tensor, popart: PopArt
    ) -> Tensor:
        """The drawn target critics' values (R, S, G) of an action drawn from the target policy."""
        return self.support.decode(self.target_critics.drawn(next_SD, policy.sample(1)[0], subset_RSG))

    def loss(self, h_SD: Tensor, stored_S1A: Tensor, y_SG: Tensor, popart: PopArt):
        """Loss (C, S, G), values of the stored actions (C, S, G) without gradient, and what to plot."""
        logits_CSGN = self.critics(h_SD, stored_S1A)
        if self.hlgauss:
            loss_CSG = cross_entropy(logits_CSGN, self.support.hlgauss_labels(y_SG))
        else:
            loss_CSG = twohot_loss(logits_CSGN, *self.support.encode(y_SG))
        logits_CSGN = logits_CSGN.detach()
        # How often each bin is the first critic's likeliest: (N,) shares for each discount (paper, Figure 7 centre).
        bins, likeliest_SG = logits_CSGN.shape[-1], logits_CSGN[0].argmax(-1)
        metrics = {
            f"bins/{g:g}": torch.bincount(likeliest_SG[:, i], minlength=bins) / len(likeliest_SG)
            for i, g in enumerate(self.gammas)
        }
        return loss_CSG, self.support.decode(logits_CSGN), metrics

    @torch.no_grad()
    def advantage(self, h_SD, stored_S1A, q_CSG, policy: Distribution, samples: int) -> Tensor:
        """Advantage (S, G) of the stored actions, of values `q_CSG`, over `samples` K actions of the policy."""
        q_SG, sampled_KSGA = q_CSG.mean(0), policy.sample(samples)
        if not self.discrete:
            return advantage(q_SG, self.support.decode(self.critics(h_SD, sampled_KSGA)).mean(0))
        # Plain: as for continuous actions. But of K samples most are alike once the policy is sharp: each
        # action is scored once, and the stored one not again. That also keeps a tie a tie: two matrix
        # multiplies of different shapes may round differently.
        needed_SGA = (sampled_KSGA > 0).any(0) & (stored_S1A != 1)
        s_M, g_M, a_M = needed_SGA.nonzero(as_tuple=True)
        q_SGA = q_SG.unsqueeze(-1) * stored_S1A
        q_SGA[s_M, g_M, a_M] = self.support.decode(self.critics.chosen(h_SD, s_M, g_M, a_M)).mean(0)
        return advantage(q_SG, (sampled_KSGA * q_SGA).sum(-1))

    def policy_values(self, h_SD: Tensor, policy: Distribution, samples: int, popart: PopArt) -> Tensor:
        """Normalised values (C, S, G) of the policy's own actions, with a gradient to the policy alone."""
        action_KSGA = policy.rsample(samples)
        q_CSG = self.support.decode(frozen(self.critics, h_SD, action_KSGA)).mean(1)
        # This critic has no output layer for PopArt to correct: its returns are normalised as they are.
        return popart.standardise(q_CSG)


class ScalarValue(nn.Module):
    """The scale-dependent critic: regression on returns that PopArt normalises. Source: Eq. 1.

    OFFICIAL: discrete actions get one output each, and the policy's expectation is exact, where Eq. 2 and y_t
    print a sample; continuous ones are inputs, and it is sampled. See `TwoHotValue` for what the methods are for.
    """

    def __init__(self, config, action_dim: int, discrete: bool):
        super().__init__()
        c, self.discrete = config, discrete
        if discrete:
            make, sizes = AllActionCritics, (c.d_model, action_dim, len(c.gammas), c.critics, c.hidden)
        else:
            make, sizes = ActionCritics, (c.d_model, action_dim, c.gammas, c.critics, c.hidden, 1)
        self.critics, self.target_critics = make(*sizes), make(*sizes)

    def next_values(
        self, next_SD: Tensor, policy: Distribution, subset_RSG: Tensor, popart: PopArt
    ) -> Tensor:
        if self.discrete:
            raw_CSG = (self.target_critics(next_SD) * policy.probs).sum(-1)
        else:
            raw_CSG = self.target_critics(next_SD, policy.sample(1)[0]).squeeze(-1)
        return take_subset(popart.denormalised(raw_CSG.float()), subset_RSG)

    def loss(self, h_SD: Tensor, stored_S1A: Tensor, y_SG: Tensor, popart: PopArt):
        if self.discrete:
            raw_CSG = (self.critics(h_SD) * stored_S1A).sum(-1)
        else:
            raw_CSG = self.critics(h_SD, stored_S1A).squeeze(-1)
        raw_CSG = raw_CSG.float()
        # Eq. 1:  L = (Q(h, a) - y)^2, both normalised
        loss_CSG = (popart.normalised(raw_CSG) - popart.standardise(y_SG)) ** 2
        return loss_CSG, popart.denormalised(raw_CSG.detach()), {}

    @torch.no_grad()
    def advantage(self, h_SD, stored_S1A, q_CSG, policy: Distribution, samples: int) -> Tensor:
        # In raw units: PopArt's scale is positive, and the filter asks for the sign alone.
        if self.discrete:
            q_SGA = self.critics(h_SD).float().mean(0)
            q_SG1 = (q_SGA * stored_S1A).sum(-1, keepdim=True)
            # sum_a pi(a) (Q(stored) - Q(a)): exactly 0 where the policy always takes the stored action
            return (policy.probs * (q_SG1 - q_SGA)).sum(-1)
        q_SG = self.critics(h_SD, stored_S1A).squeeze(-1).float().mean(0)
        return advantage(q_SG, self.critics(h_SD, policy.sample(samples)).squeeze(-1).float().mean(0))

    def policy_values(self, h_SD: Tensor, policy: Distribution, samples: int, popart: PopArt) -> Tensor:
        if self.discrete:
            raw_CSG = (frozen(self.critics, h_SD) * policy.probs).sum(-1)
        else:  # one sample, as in the authors' code
            raw_CSG = frozen(self.critics, h_SD, policy.rsample(1)[0]).squeeze(-1)
        return popart.normalised(raw_CSG.float())


def frozen(module: nn.Module, *inputs: Tensor) -> Tensor:
    "`module(*inputs)` with a gradient to the inputs, and none to the weights."
    return functional_call(module, {name: p.detach() for name, p in module.named_parameters()}, inputs)


# -------------------------------------------------------------------------------------- the two actors


def imitate(agent: "Agent", config, h_SD, stored_S1A, policy: Distribution, q_CSG) -> tuple[Tensor, dict]:
    """Scale-independent actor loss (S, G): clone the stored actions that the filter lets through. Eq. 4."""
    advantage_SG = agent.value.advantage(h_SD.detach(), stored_S1A, q_CSG, policy, config.action_samples)
    loss_SG, info = crr_loss(policy.log_prob(stored_S1A), advantage_SG)
    metrics = {f"filter/{g:g}": info["filter"][:, i].mean() for i, g in enumerate(config.gammas)}
    return loss_SG, metrics | {"filter": info["filter"].mean()}


def maximise(agent: "Agent", config, h_SD, stored_S1A, policy: Distribution, q_CSG) -> tuple[Tensor, dict]:
    """Scale-dependent actor loss (S, G): minus the value of the policy's own action. Eq. 2."""
    # The state is detached: what the actor's loss teaches the Transformer comes through the policy alone.
    q_CSG = agent.value.policy_values(h_SD.detach(), policy, config.action_samples, agent.popart)
    loss_SG, info = value_loss(q_CSG)
    return loss_SG, {name: value.mean() for name, value in info.items()}


class Variant(NamedTuple):
    """What a variant decides; encoder, Transformer, replay and training loop are the same for all four."""

    actor_loss: Callable  # imitate, or maximise
    critic: type  # TwoHotValue, or ScalarValue: head and loss of the critic
    reduce: Callable  # of the drawn critics' values, for the target: see `critics.take_subset`


# The four updates, actor first, by whether a loss depends on the scale of returns: the one place where
# variants differ.
VARIANTS = {
    "ind_ind": Variant(imitate, TwoHotValue, torch.mean),
    "ind_dep": Variant(imitate, ScalarValue, torch.mean),
    "dep_ind": Variant(maximise, TwoHotValue, torch.amin),
    "dep_dep": Variant(maximise, ScalarValue, torch.amin),
}


# ----------------------------------------------------------------------------------------- the agent


class Agent(nn.Module):
    """Everything that has weights: timestep encoder, Transformer, actor, critics, and the two targets.

    The networks' sizes come from `config`; `observation_dim` O and `action_dim` A from the environment,
    whose observation already holds the previous action, reward and flags; so do `image_shape` (H, W, 3) where
    there are pixels, and `layout`, which names the slices of the vector. Source: paper, Figure 2.
    """

    def __init__(
        self, config, observation_dim: int, action_dim: int, discrete: bool, image_shape=None, layout=None
    ):
        super().__init__()
        c = config
        self.discrete, self.action_dim, self.variant = discrete, action_dim, VARIANTS[c.variant]
        self.critics = c.critics
        self.prob_limits = (c.prob_low, c.prob_high)
        self.encoder = make_encoder(c, observation_dim, image_shape, layout)
        self.transformer = CausalTransformer(c.encoder_dim, c.d_model, c.d_ff, c.layers, c.heads, c.dropout)
        features = action_dim if discrete else 2 * action_dim
        self.actor = ActorHead(c.d_model, features, len(c.gammas), c.hidden)
        self.value = self.variant.critic(c, action_dim, discrete)
        # Targets exist for the heads only: states always come from the online Transformer.
        self.target_actor = ActorHead(c.d_model, features, len(c.gammas), c.hidden)
        self.target_actor.load_state_dict(self.actor.state_dict())
        self.value.target_critics.load_state_dict(self.value.critics.state_dict())
        self.target_actor.requires_grad_(False)
        self.value.target_critics.requires_grad_(False)
        # Kept by all variants, for the log; only the dependent losses read it.
        self.popart = PopArt(len(c.gammas), c.popart_beta)
        self.register_buffer("gamma_G", torch.tensor(c.gammas), persistent=False)

    def embed(self, obs: Tensor, image: Tensor | None = None) -> Tensor:
        """Vectors (..., O), and images (..., H, W, 3) where there are pixels -> embeddings (..., E)."""
        return self.encoder(obs) if image is None else self.encoder(obs, image)

    def states(self, obs_BTO: Tensor, time_BT: Tensor, image_BT: Tensor | None = None) -> Tensor:
        """Observations (B, T, ...) at their rollouts' timesteps (B, T) -> states h (B, T, D)."""
        return self.transformer(self.embed(obs_BTO, image_BT), time_BT)

    def policy(self, features: Tensor) -> Distribution:
        """The distribution over actions that an actor head's output (..., F) describes."""
        return Categorical(features, *self.prob_limits) if self.discrete else TanhGaussian(features)

    def action_vectors(self, action: Tensor) -> Tensor:
        """Actions as the critics take them, (..., A): one-hot where they are discrete."""
        return F.one_hot(action.long(), self.action_dim).float() if self.discrete else action.float()


def make_encoder(config, observation_dim: int, image_shape, layout) -> nn.Module:
    """The timestep encoder that `config` names. ValueError if it does not fit the environment's observations."""
    c, pixels, language = config, image_shape is not None, "tokens" in (layout or {})
    fitting = ("impala", "nature") if pixels else ("grid_language",) if language else ("ff",)
    if c.encoder not in fitting:
        raise ValueError(f"--encoder {c.encoder} does not fit --env {c.env}: say {' or '.join(fitting)}")
    if pixels:
        sizes = (observation_dim, image_shape, c.encoder_dim, c.encoder, c.encoder_depths, c.encoder_hidden)
        return PixelEncoder(*sizes, frames_per_pass=c.steps_per_pass)
    if language:
        return GridLanguageEncoder(
            observation_dim,
            layout["grid"],
            layout["tokens"],
            BABYAI_VOCABULARY,
            c.encoder_dim,
            c.encoder_hidden,
        )
    return FeedForwardEncoder(observation_dim, c.encoder_hidden, c.encoder_dim)


@torch.no_grad()
def next_values(agent: Agent, next_SD: Tensor) -> Tensor:
    """Qbar(h', a' ~ pibar(h')), (S, G), from a pair of critics drawn for each state and discount."""
    policy = agent.policy(agent.target_actor(next_SD))
    subset_RSG = draw_subset(agent.critics, (len(next_SD), len(agent.gamma_G)), device=next_SD.device)
    return agent.variant.reduce(agent.value.next_values(next_SD, policy, subset_RSG, agent.popart), 0)


def losses(agent: Agent, config, h_SD, stored_SA, y_SG) -> tuple[Tensor, Tensor, dict]:
    """Actor loss (S, G) and critic loss (C, S, G) for one chunk of states, and what to plot of them.

    Source: Eq. 1 or 3 for the critic, 2 or 4 for the actor, as the variant says.
    """
    stored_S1A = stored_SA.unsqueeze(1)  # one action, scored for every discount
    critic_loss_CSG, q_CSG, critic_metrics = agent.value.loss(h_SD, stored_S1A, y_SG, agent.popart)
    policy = agent.policy(agent.actor(h_SD))
    actor_loss_SG, actor_metrics = agent.variant.actor_loss(agent, config, h_SD, stored_S1A, policy, q_CSG)
    metrics = {
        "entropy": policy.entropy()[:, -1].detach().mean(),
        "value": q_CSG[..., -1].mean() / config.reward_scale,
    }
    return actor_loss_SG, critic_loss_CSG, metrics | critic_metrics | actor_metrics


class Policy:
    """A trained agent to play with: it keeps its own memory, one per environment.

        policy = train.load("runs/my_run/best.pt")
        env = policy.make_env()
        obs, info = env.reset()
        policy.reset()
        done = False
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

    def state_dict(self) -> dict:
        """The memory of all environments, their clocks, and the state of the draws: tensors, for a checkpoint."""
        memory = {"time": self.time_B, "key": self.cache.key, "value": self.cache.value}
        memory |= {"count": self.cache.count_B, "generator": self.generator.get_state()}
        return {name: tensor.cpu().clone() for name, tensor in memory.items()}

    def load_state_dict(self, state: dict) -> None:
        """Go on from a `state_dict`: the next actions are those that would have been taken."""
        # On another kind of device the draws could not be the same in any case.
        if state["generator"].shape == self.generator.get_state().shape:
            self.generator.set_state(state["generator"])
        for name, tensor in (("time", self.time_B), ("count", self.cache.count_B)):
            tensor.copy_(state[name])
        self.cache.key.copy_(state["key"]), self.cache.value.copy_(state["value"])

    @torch.inference_mode()
    def __call__(self, obs):
        """Observation -> action: an int, or (A,) where continuous. With B environments: (B,), or (B, A).

        The observation is a vector (O,) or (B, O), or a dictionary of "vector" and "image" (B, H, W, 3).
        """
        obs = parts(obs)
        obs_BO = torch.as_tensor(np.asarray(obs["vector"]), dtype=torch.float32, device=self.device)
        single, image_B = obs_BO.ndim == 1, obs.get("image")
        if image_B is not None:
            image_B = torch.as_tensor(np.asarray(image_B), device=self.device)
            image_B = image_B.view(len(self.time_B), *image_B.shape[-3:])
        if self.agent.training:
            self.agent.eval()  # no dropout, no power iterations; `update` switches back
        embedding_BE = self.agent.embed(obs_BO.view(len(self.time_B), -1), image_B)
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
