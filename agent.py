r"""The agent: its networks, and how it acts.

What     `Agent` holds everything that has weights; `TwoHotValue` and `ScalarValue` are its two critics; `Policy`
         acts in environments and keeps a memory of its own for each of them
Why      the components know nothing of one another: they meet here, and in the gradient step (update.py)
Paper    AMAGO-2 section 3 and Figure 2
Shapes   B batch, T time, S states: real (b, t) pairs, flattened; O observation; A action; D state width;
         E embedding; F features of a policy; C critics; G discounts; K action samples; N bins
Config   `config` is the trainer's (config.py), read for sizes and limits
Notes    OFFICIAL: with discrete actions the scalar critic has one output for each action, and the expectation over
         the policy is exact in target, advantage and Eq. 2 (`ScalarValue`); the two-hot critic samples
Copy     together with the components that it imports

    observation (B, T, O) -> encoder (B, T, E) -> Transformer (B, T, D) -> actor (B, T, G, F) -> action
                                                               \-> critics (C, S, G, N or 1) -> value
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from critics import ActionCritics, AllActionCritics
from crr_actor import ActorHead, Categorical, TanhGaussian, advantage
from encoders import FeedForwardEncoder, GridLanguageEncoder, PixelEncoder
from popart import PopArt
from transformer import CausalTransformer
from twohot import BinSupport

Distribution = Categorical | TanhGaussian

# ------------------------------------------------------------------------------------- the two critics


class TwoHotValue(nn.Module):
    """The scale-independent critic: a classifier over return bins. Source: Eq. 3.

    `ScalarValue` has the same methods, so that the gradient step (update.py) can call either. Values (C, S, G) are
    returns. `advantage` and `policy_values` serve the actor's losses, and give no gradient to a critic's weights.
    """

    def __init__(self, config, action_dim: int, discrete: bool):
        super().__init__()
        c, self.discrete = config, discrete
        sizes = (c.d_model, action_dim, c.gammas, c.critics, c.hidden, c.bins)
        self.critics, self.target_critics = ActionCritics(*sizes), ActionCritics(*sizes)
        self.support = BinSupport(c.bins, c.bin_low, c.bin_high, c.symlog)
        self.hlgauss = c.value_label == "hlgauss"

    def target_values(self, next_SD: Tensor, policy: Distribution, popart: PopArt) -> Tensor:
        """All target critics' values (C, S, G) of an action drawn from the target policy."""
        return self.support.decode(self.target_critics(next_SD, policy.sample(1)[0]))

    @torch.no_grad()
    def advantage(self, h_SD, stored_S1A, q_CSG, policy: Distribution, samples: int) -> Tensor:
        """Advantage (S, G) of the stored actions, whose values are `q_CSG`, over `samples` K of the policy's."""
        q_SG, sampled_KSGA = q_CSG.mean(0), policy.sample(samples)
        q_KSG = self.support.decode(self.critics(h_SD, sampled_KSGA)).mean(0)
        # A sample equal to the stored action is a tie. Its value is the stored one's own: two matrix multiplies of
        # different shapes may round differently, and half of all ties would pass the filter.
        same_KSG = (sampled_KSGA == stored_S1A).all(-1)
        return advantage(q_SG, torch.where(same_KSG, q_SG, q_KSG))

    def policy_values(self, h_SD: Tensor, policy: Distribution, samples: int, popart: PopArt) -> Tensor:
        """Normalised values (C, S, G) of the policy's own actions, with a gradient to the policy alone."""
        # OFFICIAL: the mean over K samples with a straight-through gradient; Eq. 2 prints one action.
        action_KSGA = policy.rsample(samples)
        q_CSG = self.support.decode(frozen(self.critics, h_SD, action_KSGA)).mean(1)
        # This critic has no output layer for PopArt to correct: its returns are normalised as they are. OFFICIAL: the
        # paper does not print how.
        return popart.standardise(q_CSG)


class ScalarValue(nn.Module):
    """The scale-dependent critic: regression on returns that PopArt normalises. Source: Eq. 1.

    OFFICIAL: discrete actions get one output each, and the policy's expectation is exact, where Eq. 2 and y_t
    print a sample. Continuous actions are inputs, and the expectation is sampled. Methods: see `TwoHotValue`.
    """

    def __init__(self, config, action_dim: int, discrete: bool):
        super().__init__()
        c, self.discrete = config, discrete
        if discrete:
            make, sizes = AllActionCritics, (c.d_model, action_dim, len(c.gammas), c.critics, c.hidden)
        else:
            make, sizes = ActionCritics, (c.d_model, action_dim, c.gammas, c.critics, c.hidden, 1)
        self.critics, self.target_critics = make(*sizes), make(*sizes)

    def raw(self, h_SD: Tensor, stored_S1A: Tensor) -> Tensor:
        """Outputs (C, S, G) for the stored actions (S, 1, A), before PopArt's scale: what Eq. 1 learns."""
        if self.discrete:
            return (self.critics(h_SD) * stored_S1A).sum(-1).float()
        return self.critics(h_SD, stored_S1A).squeeze(-1).float()

    def target_values(self, next_SD: Tensor, policy: Distribution, popart: PopArt) -> Tensor:
        if self.discrete:
            raw_CSG = (self.target_critics(next_SD) * policy.probs).sum(-1)
        else:
            raw_CSG = self.target_critics(next_SD, policy.sample(1)[0]).squeeze(-1)
        return popart.denormalised(raw_CSG.float())

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


# ----------------------------------------------------------------------------------------- the agent


class Agent(nn.Module):
    """Everything that has weights: timestep encoder, Transformer, actor, critics, and the two targets.

    The networks' sizes come from `config`; `observation_dim` O and `action_dim` A from the environment,
    whose observation already holds the previous action, reward and flags. `image_shape` (H, W, 3) is given where
    there are pixels; `layout` {name: slice of the vector} and `vocabulary`, a number of tokens, where there are
    instructions. Source: paper, Figure 2.
    """

    def __init__(
        self,
        config,
        observation_dim: int,
        action_dim: int,
        discrete: bool,
        image_shape: tuple[int, int, int] | None = None,
        layout: dict[str, slice] | None = None,
        vocabulary: int | None = None,
    ):
        super().__init__()
        c = config
        self.discrete, self.action_dim = discrete, action_dim
        self.prob_limits = (c.prob_low, c.prob_high)
        self.encoder = make_encoder(c, observation_dim, image_shape, layout, vocabulary)
        self.transformer = CausalTransformer(c.encoder_dim, c.d_model, c.d_ff, c.layers, c.heads, c.dropout)
        features = action_dim if discrete else 2 * action_dim
        self.actor = ActorHead(c.d_model, features, len(c.gammas), c.hidden)
        # A variant names its actor loss first, then its critic loss: ind_dep has the scale-dependent critic.
        self.value = (TwoHotValue if c.variant.endswith("_ind") else ScalarValue)(c, action_dim, discrete)
        # OFFICIAL: targets exist for the heads only: states always come from the online Transformer.
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


def make_encoder(config, observation_dim: int, image_shape, layout, vocabulary) -> nn.Module:
    """The timestep encoder that `config` names. ValueError if it does not fit the environment's observations."""
    c = config
    fitting = ("impala", "nature") if image_shape else ("grid_language",) if vocabulary else ("ff",)
    if c.encoder not in fitting:
        raise ValueError(f"--encoder {c.encoder} does not fit --env {c.env}: say {' or '.join(fitting)}")
    if image_shape:
        sizes = (observation_dim, image_shape, c.encoder_dim, c.encoder, c.encoder_depths, c.encoder_hidden)
        return PixelEncoder(*sizes, frames_per_pass=c.steps_per_pass)
    if vocabulary:
        places = (layout["observation/grid"], layout["observation/tokens"])
        return GridLanguageEncoder(observation_dim, *places, vocabulary, c.encoder_dim, c.encoder_hidden)
    return FeedForwardEncoder(observation_dim, c.encoder_hidden, c.encoder_dim)


class Policy:
    """An agent that acts: it keeps a memory for each environment, from one call to the next.

        policy.reset()
        while not done:
            obs, reward, terminated, truncated, info = env.step(policy(obs))
            done = terminated or truncated

    Arguments: `agent`, its `config`, `num_envs` environments side by side (B), `seed` of its draws; `greedy`
    takes the mode of the last discount's policy instead of a sample. `evaluate.load` makes one from a checkpoint.
    """

    def __init__(self, agent: Agent, config, num_envs: int = 1, seed: int = 0, greedy: bool = False):
        self.agent, self.config, self.greedy = agent, config, greedy
        self.device = next(agent.parameters()).device
        self.time_B = torch.zeros(num_envs, dtype=torch.long, device=self.device)
        # A GPU reads the whole cache at each step: half as many bytes. A CPU has few instructions for bf16.
        half = self.device.type != "cpu" and config.precision == "bf16"
        dtype = torch.bfloat16 if half else torch.float32
        self.cache = agent.transformer.init_cache(num_envs, config.context, self.device, dtype)
        self.generator = torch.Generator(self.device).manual_seed(seed)

    def reset(self, which_B=None) -> None:
        """Forget: everything, or the environments where `which_B` (B,) is True. Call at each new rollout."""
        if which_B is None:
            which_B = torch.ones(len(self.time_B), dtype=torch.bool)
        which_B = torch.as_tensor(which_B)
        self.time_B.masked_fill_(which_B.to(self.device, non_blocking=True), 0)
        self.agent.transformer.reset(self.cache, which_B)

    def state_dict(self) -> dict:
        """The memory of all environments, their clocks, and the state of the draws: tensors, for a checkpoint."""
        memory = {"time": self.time_B, "key": self.cache.key, "value": self.cache.value}
        memory |= {"count": self.cache.count_B, "generator": self.generator.get_state()}
        return {name: tensor.cpu().clone() for name, tensor in memory.items()}

    def load_state_dict(self, state: dict) -> None:
        """Restore a `state_dict`: the next actions are those that would have been taken."""
        # Another kind of device draws other numbers in any case.
        if state["generator"].shape == self.generator.get_state().shape:
            self.generator.set_state(state["generator"])
        for name, tensor in (("time", self.time_B), ("count", self.cache.count_B)):
            tensor.copy_(state[name])
        self.cache.steps = state["count"].tolist()
        self.cache.key.copy_(state["key"]), self.cache.value.copy_(state["value"])

    @torch.inference_mode()
    def __call__(self, obs):
        """Observation -> action: an int, or (A,) where continuous. With B environments: (B,), or (B, A).

        The observation is a vector (O,) or (B, O), or a dictionary of "vector" and "image" (B, H, W, 3).
        """
        obs = obs if isinstance(obs, dict) else {"vector": obs}
        moved = lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)
        vector, image_B, count = np.asarray(obs["vector"], np.float32), obs.get("image"), len(self.time_B)
        single, obs_BO = vector.ndim == 1, moved(vector).view(count, -1)
        if image_B is not None:
            image_B = moved(image_B).view(count, *np.shape(image_B)[-3:])
        if self.agent.training:
            self.agent.eval()  # no dropout, no power iterations; `update` switches back
        action = self.act(obs_BO, image_B).cpu().numpy()  # here the host waits for a GPU
        return action[0] if single else action

    def act(self, obs_BO: Tensor, image_B: Tensor | None) -> Tensor:
        """What happens on the device: observations (B, O) and images (B, H, W, 3) -> actions (B,) or (B, A)."""
        h_BD = self.agent.transformer.step(self.agent.embed(obs_BO, image_B), self.time_B, self.cache)
        # Of the policies for all discounts, the one for the longest horizon acts.
        policy = self.agent.policy(self.agent.actor(h_BD)[:, -1])
        action_BA = policy.mode() if self.greedy else policy.sample(1, generator=self.generator)[0]
        self.time_B += 1
        return action_BA.argmax(-1) if self.agent.discrete else action_BA
