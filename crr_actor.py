r"""The policy and its two losses: filtered imitation (CRR) and maximisation of the critic's value.

What     an actor head with one policy for every discount (categorical, or tanh-Gaussian for continuous
         actions), the advantage of replayed actions, the scale-independent actor loss (CRR), and the
         scale-dependent one (maximise the critic's value of the policy's own action)
Why      -Q(h, a ~ pi) grows with a task's returns; log pi(a | h), multiplied by 0 or 1, does not. The filter
         uses only the sign of the advantage, which stays the same when rewards are multiplied by 100
Paper    AMAGO-2 section 3, equations 2 (dependent) and 4; CRR-Binary-Mean, Wang et al. 2020.
         Authors' code: github.com/UT-Austin-RPL/amago
Shapes   B batch, T time, or S states where they are flattened; G discounts; C critics; K samples; A action;
         D width; F features of a policy. All functions take any leading dimensions: (..., G, F)
Notes    Probabilities are clipped to [low, high] and renormalised: log pi is finite, and every action keeps
         some probability. A clipped probability has no gradient. The defaults [0.001, 0.99] are the authors'.
         Distributions and the losses of their log-probabilities compute in float32, also under autocast.
Use      head = ActorHead(D, features=A, discounts=G)             # 2A for TanhGaussian
         policy = Categorical(head(state))         # (..., G, A)
         a = advantage(q(stored), q(policy.sample(3)))            # q: mean of your critics, without gradient
         loss, metrics = crr_loss(policy.log_prob(stored), a)     # stored (..., 1, A), one-hot; loss (..., G)
         loss[mask].mean().backward()              # mask: real steps, not padding
Copy     this file alone; needs torch
Try      python crr_actor.py
"""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ActorHead(nn.Module):
    """MLP from states to the parameters of G policies: (..., D) -> (..., G, F).

    Arguments: `state_dim` D; `features` F, the number of actions for `Categorical` and twice the action
    dimension for `TanhGaussian`; `discounts` G; `hidden`, the widths of the hidden layers. Leaky ReLU between
    layers. Source: paper, section 3 and Table 2 (256, 256).
    """

    def __init__(self, state_dim, features, discounts, hidden=(256, 256)):
        super().__init__()
        widths = [state_dim, *hidden, discounts * features]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(widths))
        self.discounts = discounts

    def forward(self, state: Tensor) -> Tensor:
        """States (..., D) -> features (..., G, F)."""
        *hidden, last = self.layers
        for layer in hidden:
            state = F.leaky_relu(layer(state))
        return last(state).unflatten(-1, (self.discounts, -1))


class Categorical:
    """Discrete policies from logits (..., A); probabilities are clipped to [low, high] and renormalised.

    Actions are one-hot vectors (..., A), as the critics take them. Source: authors' code.
    """

    def __init__(self, logits: Tensor, low: float = 0.001, high: float = 0.99):
        probs = torch.softmax(logits.float(), dim=-1).clamp(low, high)
        self.probs = probs / probs.sum(-1, keepdim=True)

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-probability (...) of one-hot actions (..., A), which broadcast to the policies' shape."""
        index = action.argmax(-1).expand(self.probs.shape[:-1])
        return self.probs.gather(-1, index.unsqueeze(-1)).squeeze(-1).log()

    def sample(self, samples: int, generator=None) -> Tensor:
        """Draw K = `samples` one-hot actions (K, ..., A) of each policy, without gradient.

        A uniform number is looked up in the cumulative distribution.
        """
        cdf = self.probs.detach().cumsum(-1)
        draw = torch.rand(*cdf.shape[:-1], samples, generator=generator, device=cdf.device)
        # Rounding leaves the last entry of the cdf slightly off 1. Scaling by it keeps every draw in range.
        index = torch.searchsorted(cdf, draw * cdf[..., -1:], right=True).clamp_(max=cdf.shape[-1] - 1)
        return F.one_hot(index.movedim(-1, 0), cdf.shape[-1]).float()

    def rsample(self, samples: int, temperature: float = 0.5, generator=None) -> Tensor:
        """Draw K = `samples` one-hot actions (K, ..., A) with the gradient of a softmax.

        Source: straight-through Gumbel-softmax (Jang et al. 2017, Maddison et al. 2017), with the temperature
        of the authors' code.
        """
        shape = (samples, *self.probs.shape)
        exponential = torch.empty(shape, device=self.probs.device).exponential_(generator=generator)
        return self.from_noise(-exponential.clamp(min=1e-30).log(), temperature)

    def from_noise(self, gumbel: Tensor, temperature: float = 0.5) -> Tensor:
        """The one-hot action (..., A) for given Gumbel noise (..., A); see `rsample`."""
        # soft = softmax((log p + noise) / temperature). Forward: its largest entry, one-hot; backward: soft.
        # Clamped: with low = 0 a probability can be exactly 0, and the gradient of its log would be NaN.
        soft = torch.softmax((self.probs.clamp(min=1e-30).log() + gumbel) / temperature, dim=-1)
        hard = F.one_hot(soft.argmax(-1), soft.shape[-1]).to(soft.dtype)
        return hard + (soft - soft.detach())

    def mode(self) -> Tensor:
        """The most probable action, one-hot (..., A)."""
        return F.one_hot(self.probs.argmax(-1), self.probs.shape[-1]).float()

    def entropy(self) -> Tensor:
        """Entropy (...) in nats."""
        return torch.special.entr(self.probs).sum(-1)  # -p log p, and 0 at p = 0


class TanhGaussian:
    """Continuous policies from features (..., 2A): a = tanh(mu + std * noise), every coordinate in [-1, 1].

    std = exp(log_low + (log_high - log_low) / 2 * (tanh(raw) + 1)) is in [e^-5, e^2]. Source: authors' code.
    """

    LOG_STD = (-5.0, 2.0)

    def __init__(self, features: Tensor):
        self.mean, raw = features.float().chunk(2, dim=-1)
        low, high = self.LOG_STD
        self.log_std = low + (high - low) / 2 * (torch.tanh(raw) + 1)

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-density (...) of actions (..., A), summed over A.

        Actions are clipped to [-0.99, 0.99] first: atanh is infinite at -1 and 1.
        """
        action = action.clamp(-0.99, 0.99)
        z = (torch.atanh(action) - self.mean) * torch.exp(-self.log_std)
        # Change of variables, for each coordinate: log p(a) = log N(atanh a; mu, std) - log(1 - a^2)
        log_normal = -0.5 * z**2 - self.log_std - 0.5 * math.log(2 * math.pi)
        return (log_normal - torch.log1p(-(action**2))).sum(-1)

    def sample(self, samples: int, generator=None) -> Tensor:
        """Draw K = `samples` actions (K, ..., A) of each policy, without gradient."""
        return self.rsample(samples, generator=generator).detach()

    def rsample(self, samples: int, generator=None) -> Tensor:
        """Draw K = `samples` actions (K, ..., A) with a gradient: the noise is drawn, then transformed."""
        shape = (samples, *self.mean.shape)
        return self.from_noise(torch.randn(shape, generator=generator, device=self.mean.device))

    def from_noise(self, normal: Tensor) -> Tensor:
        """The action (..., A) for given standard normal noise (..., A); see `rsample`."""
        return torch.tanh(self.mean + self.log_std.exp() * normal)

    def mode(self) -> Tensor:
        """The tanh of the mean (..., A)."""
        return torch.tanh(self.mean)

    def entropy(self) -> Tensor:
        """Entropy (...) in nats of the Gaussian before the tanh: after the tanh there is no closed form."""
        return (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


def advantage(q_stored: Tensor, q_sampled_K: Tensor) -> Tensor:
    """Advantage (...) of stored actions: their values (...) minus the mean value of K samples (K, ...).

    The K samples estimate the expectation over the policy. Source: Eq. 4.
    """
    # Eq. 4:  A = Q(h_t, a_t) - E_{a' ~ pi(h_t)}[Q(h_t, a')]
    # A mean of differences, not a difference of means: where every sample is the stored action, each
    # difference is exactly 0. A mean of K equal numbers can be rounded, and half of the ties would pass.
    return (q_stored - q_sampled_K).mean(0)


def crr_loss(log_prob: Tensor, advantage: Tensor) -> tuple[Tensor, dict]:
    """The scale-independent actor loss, elementwise (...), and its metrics: `filter` (...), 1 where kept.

    The gradient goes through `log_prob` (...) of the stored actions. `advantage` (...) is detached, so the
    loss cannot train a critic. The loss is exactly 0 where the advantage is not above 0, or is NaN.
    Source: Eq. 4.
    """
    # Eq. 4:  L = -1{ A > 0 } log pi(a_t | h_t)
    keep = advantage.detach() > 0  # strict: an action as good as the policy's own adds nothing to imitate
    # `where`, not a product: 0 times an infinite log pi is NaN.
    loss = torch.where(keep, -log_prob, 0.0)
    return loss, {"filter": keep.float()}


def value_loss(q_C: Tensor) -> tuple[Tensor, dict]:
    """The scale-dependent actor loss, elementwise (...), and its metrics: `policy_value` (...).

    `q_C` (C, ...) are the critics' normalised values of the policy's own action. Their gradient goes through
    that action (or its probabilities); the caller must block gradients to the critics. The smallest of the C
    values is used. OFFICIAL: the paper does not print this minimum. Source: Eq. 2.
    """
    # Eq. 2:  L = -Q(h_t, a ~ pi(h_t))
    q = q_C.amin(0)
    return -q, {"policy_value": q.detach()}


if __name__ == "__main__":
    rounded = lambda values: [round(x, 3) for x in values.tolist()]
    logits_SA = torch.zeros(4, 4, requires_grad=True)
    policy, q_A = Categorical(logits_SA), torch.tensor([1.0, 2.0, 3.0, 4.0])
    print("4 states, a uniform policy over 4 actions of value 1, 2, 3, 4; state i stores action i.")
    print("The samples have the values 2, 4, 1, so the policy's value is about 2.333.")
    log_prob_S = policy.log_prob(torch.eye(4))
    for factor in (1, 100):
        sampled_K1 = torch.tensor([[2.0], [4.0], [1.0]])
        loss_S, metrics = crr_loss(log_prob_S, advantage(factor * q_A, factor * sampled_K1))
        (gradient_SA,) = torch.autograd.grad(loss_S.sum(), logits_SA, retain_graph=True)
        print(f"values x {factor}: filter {metrics['filter'].tolist()}, CRR loss {rounded(loss_S)}")
        print(f"  gradient of the last state's logits {rounded(gradient_SA[3])}")
        loss_S, _ = value_loss((policy.probs * factor * q_A).sum(-1)[None])
        (gradient_SA,) = torch.autograd.grad(loss_S.sum(), logits_SA, retain_graph=True)
        print(f"  scale-dependent loss {loss_S[0]:.1f}, gradient {rounded(gradient_SA[0])}")
    print("by hand: CRR has the loss -log pi = ln 4 = 1.386 and the gradient pi - one-hot, or both 0;")
    print("         scale-dependent: -2.5 and -pi (value - 2.5), times the factor")
    print("The policy of the logits 10, 0, 0, 0:", rounded(Categorical(10 * torch.eye(4)[0]).probs))
    print("by hand: clipped to 0.99 and 0.001, and divided by their sum 0.993")
