r"""The policy, and the two actor losses: imitate what a binary filter lets through, or climb the critic.

What     an actor head with one policy for every discount (categorical, or tanh-Gaussian for continuous
         actions), the advantage of replayed actions, the scale-independent actor loss (CRR), and the
         scale-dependent one (maximise the critic's value of the policy's own action)
Why      -Q(h, a ~ pi) grows with a task's returns; log pi(a | h) times 0 or 1 does not. The filter
         only asks for the sign of the advantage, which multiplying rewards by 100 cannot change
Paper    AMAGO-2 section 3, equations 2 (dependent) and 4; CRR-Binary-Mean, Wang et al. 2020.
         Authors' code: github.com/UT-Austin-RPL/amago
Shapes   B batch, T time, or S states where they are flattened; G discounts; C critics; K samples; A action;
         D width; F features of a policy. All functions take any leading dimensions: (..., G, F)
Notes    Probabilities are clipped to [low, high] and renormalised: log pi stays finite, and exploration
         never dies; a probability that is clipped has no gradient. Defaults [0.001, 0.99] are the authors'.
         Distributions, and losses of their log-probabilities, are float32 whatever the autocast.
Use      head = ActorHead(D, features=A, discounts=G)              # 2 A features for TanhGaussian
         policy = Categorical(head(state))         # (..., G, A)
         a = advantage(q(stored), q(policy.sample(3)))             # q: mean of your critics, without gradient
         loss, metrics = crr_loss(policy.log_prob(stored), a)      # stored (..., 1, A), one-hot; loss (..., G)
         loss[mask].mean().backward()              # mask: what is no padding
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

    `features` F is the number of actions for `Categorical`, twice the action dimension for `TanhGaussian`.
    `hidden` widths; leaky ReLU between layers. Source: paper section 3 and Table 2 (256, 256).
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
    """Discrete policies from logits (..., A); probabilities clipped to [low, high] and renormalised.

    Actions are one-hot vectors (..., A), the form in which critics take them. Source: authors' code.
    """

    def __init__(self, logits: Tensor, low: float = 0.001, high: float = 0.99):
        probs = torch.softmax(logits.float(), dim=-1).clamp(low, high)
        self.probs = probs / probs.sum(-1, keepdim=True)

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-probability (...) of one-hot actions (..., A), which broadcast against the policies."""
        index = action.argmax(-1).expand(self.probs.shape[:-1])
        return self.probs.gather(-1, index.unsqueeze(-1)).squeeze(-1).log()

    def sample(self, samples: int, generator=None) -> Tensor:
        """Draw one-hot actions (K, ..., A), without gradient, by inverting the cumulative distribution."""
        cdf = self.probs.detach().cumsum(-1)
        draw = torch.rand(*cdf.shape[:-1], samples, generator=generator, device=cdf.device)
        # Scaled by the last entry, which rounding leaves a little off 1: no draw falls past the end.
        index = torch.searchsorted(cdf, draw * cdf[..., -1:], right=True).clamp_(max=cdf.shape[-1] - 1)
        return F.one_hot(index.movedim(-1, 0), cdf.shape[-1]).float()

    def rsample(self, samples: int, temperature: float = 0.5, generator=None) -> Tensor:
        """Draw one-hot actions (K, ..., A) whose gradient is that of a soft choice: straight-through
        Gumbel-softmax (Jang et al. 2017, Maddison et al. 2017; temperature of the authors' code)."""
        shape = (samples, *self.probs.shape)
        exponential = torch.empty(shape, device=self.probs.device).exponential_(generator=generator)
        return self.from_noise(-exponential.clamp(min=1e-30).log(), temperature)

    def from_noise(self, gumbel: Tensor, temperature: float = 0.5) -> Tensor:
        """The action that Gumbel noise (..., A) chooses; see `rsample`."""
        # soft = softmax((log p + noise) / temperature). Forward: its largest entry; backward: soft itself
        # A probability of exactly 0, possible with low = 0, must not make the gradient NaN.
        soft = torch.softmax((self.probs.clamp(min=1e-30).log() + gumbel) / temperature, dim=-1)
        hard = F.one_hot(soft.argmax(-1), soft.shape[-1]).to(soft.dtype)
        return hard + (soft - soft.detach())

    def mode(self) -> Tensor:
        """The likeliest action, one-hot (..., A)."""
        return F.one_hot(self.probs.argmax(-1), self.probs.shape[-1]).float()

    def entropy(self) -> Tensor:
        """Entropy (...) in nats."""
        return torch.special.entr(self.probs).sum(-1)  # -p log p, and 0 at p = 0


class TanhGaussian:
    """Continuous policies from features (..., 2A): a = tanh(mu + std * noise), each coordinate in [-1, 1].

    std = exp(log_low + (log_high - log_low) / 2 * (tanh(raw) + 1)) lies in [e^-5, e^2]. Source: authors' code.
    """

    LOG_STD = (-5.0, 2.0)

    def __init__(self, features: Tensor):
        self.mean, raw = features.float().chunk(2, dim=-1)
        low, high = self.LOG_STD
        self.log_std = low + (high - low) / 2 * (torch.tanh(raw) + 1)

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-density (...) of actions (..., A), summed over A. Actions are first clipped to +-0.99,
        where atanh is still tame."""
        action = action.clamp(-0.99, 0.99)
        z = (torch.atanh(action) - self.mean) * torch.exp(-self.log_std)
        # Change of variables: log p(a) = log N(atanh a; mu, std) - log(1 - a^2), a coordinate at a time
        log_normal = -0.5 * z**2 - self.log_std - 0.5 * math.log(2 * math.pi)
        return (log_normal - torch.log1p(-(action**2))).sum(-1)

    def sample(self, samples: int, generator=None) -> Tensor:
        """Draw actions (K, ..., A), without gradient."""
        return self.rsample(samples, generator=generator).detach()

    def rsample(self, samples: int, generator=None) -> Tensor:
        """Draw actions (K, ..., A) with a gradient to the policy: noise is drawn first, then transformed."""
        shape = (samples, *self.mean.shape)
        return self.from_noise(torch.randn(shape, generator=generator, device=self.mean.device))

    def from_noise(self, normal: Tensor) -> Tensor:
        """The action that standard normal noise (..., A) chooses; see `rsample`."""
        return torch.tanh(self.mean + self.log_std.exp() * normal)

    def mode(self) -> Tensor:
        """tanh of the mean (..., A)."""
        return torch.tanh(self.mean)

    def entropy(self) -> Tensor:
        """Entropy (...) in nats of the Gaussian before its tanh: the tanh's own part has no closed form."""
        return (self.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


def advantage(q_stored: Tensor, q_sampled_K: Tensor) -> Tensor:
    """Advantage (...) of stored actions: their values (...) minus the mean of sampled ones (K, ...).

    The K samples stand for the expectation over the policy. Source: Eq. 4.
    """
    # Eq. 4:  A = Q(h_t, a_t) - E_{a' ~ pi(h_t)}[Q(h_t, a')]
    # As a mean of differences: where every sample is the stored action, each difference is exactly 0,
    # while a mean of K equal numbers can round to its neighbour, and let half of the ties through.
    return (q_stored - q_sampled_K).mean(0)


def crr_loss(log_prob: Tensor, advantage: Tensor) -> tuple[Tensor, dict]:
    """The scale-independent actor loss, elementwise (...), and what one would want to plot of it.

    `log_prob` of the stored actions carries the gradient; `advantage` is cut off from it, so the loss
    never reaches a critic. Where the advantage is not above 0 (NaN included) the loss is exactly 0. Source: Eq. 4.
    """
    # Eq. 4:  L = -1{ A > 0 } log pi(a_t | h_t)
    keep = advantage.detach() > 0  # strict: a tie teaches nothing new
    # `where`, not a product: 0 * log pi would turn an infinite log pi into NaN.
    loss = torch.where(keep, -log_prob, torch.zeros_like(log_prob))
    return loss, {"filter": keep.float()}


def value_loss(q_C: Tensor) -> tuple[Tensor, dict]:
    """The scale-dependent actor loss, elementwise (...), and what one would want to plot of it.

    `q_C` (C, ...) are the critics' normalised values of the policy's own action, with a gradient to the
    policy through that action (or its probabilities) alone: it is the caller's part that no critic learns
    from this loss. The least of all C critics counts (authors' code). Source: Eq. 2.
    """
    # Eq. 2:  L = -Q(h_t, a ~ pi(h_t))
    q = q_C.amin(0)
    return -q, {"policy_value": q.detach()}


if __name__ == "__main__":
    torch.manual_seed(0)
    logits_A = torch.zeros(4, requires_grad=True)
    policy = Categorical(logits_A)
    q_A = torch.tensor([1.0, 2.0, 3.0, 4.0])
    sampled_KA = policy.sample(3)
    q_sampled_K = (sampled_KA * q_A).sum(-1)
    print("one state: 4 actions worth", q_A.tolist(), "and a uniform policy, pi = 1/4 each")
    print(
        f"K=3 sampled actions {sampled_KA.argmax(-1).tolist()}, worth {q_sampled_K.tolist()}: "
        f"the state's value is about {q_sampled_K.mean().item():.3f}"
    )
    print("stored action  worth  advantage  filter    loss  gradient of the logits")
    for stored in range(4):
        stored_A = F.one_hot(torch.tensor(stored), 4).float()
        a = advantage(q_A[stored], q_sampled_K)
        loss, metrics = crr_loss(policy.log_prob(stored_A), a)
        (gradient,) = torch.autograd.grad(loss, logits_A, retain_graph=True)
        hundredfold, _ = crr_loss(policy.log_prob(stored_A), advantage(100 * q_A[stored], 100 * q_sampled_K))
        assert torch.equal(loss, hundredfold)
        print(
            f"{stored:>13}{q_A[stored].item():>7.0f}{a.item():>+11.3f}{int(metrics['filter']):>8}"
            f"{loss.item():>8.4f}  {[round(g, 3) for g in gradient.tolist()]}"
        )
    print(f"  by hand: -log pi = ln 4 = {math.log(4):.4f}, gradient pi - one-hot; or nothing at all")
    print("  values x 100: the same to the last bit")
    for factor in (1, 100):
        loss, _ = value_loss((policy.probs * factor * q_A).sum(-1, keepdim=True))
        (gradient,) = torch.autograd.grad(loss.sum(), logits_A, retain_graph=True)
        shown = [round(g, 3) for g in gradient.tolist()]
        print(f"scale-dependent, values x {factor}: loss {loss.item():.3f}, gradient {shown}")
    print("  by hand: -2.5 and -pi (worth - 2.5), times the factor")
    sharp = Categorical(torch.tensor([10.0, 0.0, 0.0, 0.0])).probs
    print(f"logits 10, 0, 0, 0: probabilities {[round(p, 5) for p in sharp.tolist()]}")
    print(
        f"  by hand: clipped to .99 and .001 each, over their sum .993: {0.99 / 0.993:.5f}, {0.001 / 0.993:.5f}"
    )
    density = TanhGaussian(torch.zeros(2)).log_prob(torch.tensor([0.0]))
    print(f"tanh-Gaussian, mean 0, log std -1.5, density at 0: {density.exp().item():.4f}")
    print(f"  by hand e^1.5 / sqrt(2 pi) = {math.exp(1.5) / math.sqrt(2 * math.pi):.4f}")
