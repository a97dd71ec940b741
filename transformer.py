r"""A causal Transformer for long training runs, and its one-step decoding with a key/value cache.

What     Normformer blocks over sigma-reparametrised linear layers, with sinusoidal positions from the
         timestep's index in its rollout; `forward` for training windows, `step` for acting
Why      in RL one network trains for millions of updates on data that changes with it. The extra norms, the
         scale of each head and the bounded spectral norms keep attention from collapsing
Paper    AMAGO-2 appendix A, "Model Architectures", and Table 2. Normformer: Shleifer et al. 2021;
         sigma-reparam: Zhai et al. 2023; positions: Vaswani et al. 2017. Leaky ReLU throughout.
         Authors' code: github.com/UT-Austin-RPL/amago
Shapes   B batch, T time, D model width, H heads, I input width; L cache slots, E = D / H features of a head
Notes    Windows are padded at their end, so the causal mask alone keeps padding out of real steps. Padding
         may hold any finite numbers, but no NaN: 0 * NaN is NaN, also in attention. Cache slots that a
         sequence has not written may hold anything.
         Within L steps `step` equals `forward`. Later they differ: a cached key of the second block comes
         from a first block that saw L steps further back. DEVIATION: a cache of L slots carries some memory
         of layers x L steps, and a window of L steps does not.
Use      model(x_BTI, time_BT)                     # training: whole windows -> states (B, T, D)
         cache = model.init_cache(batch, context)  # acting, after model.eval():
         model.step(x_BI, time_B, cache)           # one step -> states (B, D)
         model.reset(cache, ended_B)               # a sequence has ended; its time starts at 0 again
Copy     this file alone; needs torch
Try      python transformer.py
"""

import math
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SigmaReparamLinear(nn.Module):
    """Linear layer whose weight has spectral norm |gamma|: (..., I) -> (..., D_out).

    Arguments: `inputs` I, `outputs` D_out, `bias`. sigma is the largest singular value of the weight,
    tracked by one power iteration per training forward, made before use. Buffers `u` (D_out,) and `v` (I,)
    are its singular vectors; they carry no gradient. Training mode alone decides whether they move, also
    under `no_grad`; in evaluation mode they stand still. OFFICIAL: first weights are normal with a deviation of
    0.02, and biases uniform within 1 / sqrt(I). Source: sigma-reparam (Zhai et al. 2023), as the authors use it.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(nn.init.trunc_normal_(torch.empty(outputs, inputs), std=0.02))
        bound = inputs**-0.5
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound)) if bias else None
        self.gamma = nn.Parameter(torch.ones(1))
        # sigma has to be right before the first forward: a policy acts before anything has been trained,
        # in evaluation mode, where u and v stand still, and a sigma from random vectors is far too small.
        u, _, vh = torch.linalg.svd(self.weight.detach(), full_matrices=False)
        self.register_buffer("u", u[:, 0].clone())
        self.register_buffer("v", vh[0].clone())
        self.kept = None  # see scaled_once

    @torch.no_grad()
    def power_iteration(self) -> tuple[Tensor, Tensor]:
        """Move u and v one step towards the leading singular vectors of the weight; returns copies of them."""
        # u = norm(W v),  then  v = norm(W^T u)
        u = F.normalize(self.weight @ self.v, dim=0)
        v = F.normalize(self.weight.mT @ u, dim=0)
        # In place: a captured CUDA graph writes to the same memory each time.
        self.u.copy_(u)
        self.v.copy_(v)
        return u, v

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., D_out)."""
        weight = self.scaled() if self.training or torch.is_grad_enabled() else self.scaled_once()
        return F.linear(x, weight, self.bias)

    def scaled(self) -> Tensor:
        "The weight with spectral norm |gamma|, (D_out, I)."
        # In float32 under autocast: an error of 1% in sigma would scale all that follows by 1%.
        with torch.autocast(self.weight.device.type, enabled=False):
            # Copies where they move: backward may need them after the next pass.
            u, v = self.power_iteration() if self.training else (self.u, self.v)
            # sigma = u . W v,  y = x W^T gamma / sigma + bias
            # The weight is scaled, not the output: a window has far more outputs than the layer has weights.
            sigma = torch.dot(u, torch.mv(self.weight, v))
            return self.weight * (self.gamma / sigma)

    def scaled_once(self) -> Tensor:
        "The same, kept until weights change: for acting, which takes many steps between two updates."
        # Plain: return self.scaled(), which costs a tenth of an acting step at laptop scale. A change of mode and
        # in-place changes, which move a tensor's version counter, invalidate the kept weight. Writes through `.data`
        # and replayed CUDA graphs bypass the counter: call `train` or `eval` after them.
        made_from = (self.u._version, self.weight._version, self.gamma._version)
        if self.kept is None or self.kept[0] != made_from:
            self.kept = (made_from, self.scaled())
        return self.kept[1]

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode; forgets the kept weight."""
        self.kept = None
        return super().train(mode)


def sinusoidal_positions(time: Tensor, width: int) -> Tensor:
    """Timesteps (...) -> fixed embeddings (..., width): sines on even features, cosines on odd ones.

    Source: Vaswani et al. 2017, section 3.5.
    """
    # PE(t, 2i) = sin(t / 10000^(2i/D)),  PE(t, 2i+1) = cos(t / 10000^(2i/D))
    rate = torch.exp(torch.arange(0, width, 2, device=time.device) * (-math.log(10000.0) / width))
    angle = time.unsqueeze(-1).float() * rate
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)


class Block(nn.Module):
    """One Normformer block on (..., D): pre-norm, a norm after attention, a scale for each head, a norm
    inside the feed-forward.

    Query, key and value are one sigma-reparametrised matrix without a bias: one spectral norm for all three.
    Arguments: `d_model` D, a multiple of `heads` H; `d_ff`; `dropout` on the feed-forward. `forward` and
    `step` share all but the attention itself. Source: Normformer (Shleifer et al. 2021); Table 2.
    """

    def __init__(self, d_model: int, d_ff: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = SigmaReparamLinear(d_model, 3 * d_model, bias=False)
        self.out = SigmaReparamLinear(d_model, d_model)
        self.ff1 = SigmaReparamLinear(d_model, d_ff)
        self.ff2 = SigmaReparamLinear(d_ff, d_model)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(d_model) for _ in range(3))
        self.norm4 = nn.LayerNorm(d_ff)
        self.head_scale = nn.Parameter(torch.ones(heads, 1))

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        "(..., D) -> three of (..., H, E)."
        # One matrix for all three: its rows are ordered (query / key / value, head, feature of the head).
        return self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        "Residual stream (..., D) and heads' outputs (..., H, E) -> residual stream (..., D)."
        # Normformer's additions keep the size of gradients alike across depth: a learned scale for each
        # head, a norm on what attention adds (norm2), and a norm inside the feed-forward (norm4).
        x = x + self.norm2(self.out((attended * self.head_scale).flatten(-2)))
        inner = self.norm4(F.leaky_relu(self.ff1(self.norm3(x))))
        return x + F.dropout(self.ff2(inner), self.dropout, self.training)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Windows (B, T, D) -> (B, T, D). Every step attends to itself and to what came before it."""
        q, k, v = (part.transpose(1, 2) for part in self.queries_keys_values(x_BTD))  # (B, H, T, E)
        # Eq. 1 of Vaswani et al.:  softmax(Q K^T / sqrt(E)) V, each query over the keys up to its own
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.after_attention(x_BTD, attended.transpose(1, 2))

    def step(
        self, x_BD: Tensor, key_BHLE: Tensor, value_BHLE: Tensor, slot: tuple, unseen_B11L: Tensor
    ) -> Tensor:
        """One new step of each sequence, (B, D) -> (B, D): writes its key and value to the cache, in place
        at `slot`, and attends to the first slots, where `unseen_B11L` is 0 and not -inf."""
        # Under autocast, projections may have another type than the cache.
        q, k, v = (part.to(key_BHLE.dtype) for part in self.queries_keys_values(x_BD))
        # Finite, because these slots belong to another sequence later, and a mask does not stop a NaN: 0 * NaN is
        # NaN. Where the input is NaN, so is the query, and with it this step's output.
        key_BHLE[slot], value_BHLE[slot] = k.nan_to_num(), v.nan_to_num()
        length = unseen_B11L.shape[-1]
        # softmax(Q K^T / sqrt(E)) V.  Plain: F.scaled_dot_product_attention(..., attn_mask=seen). It is made for
        # many queries: with one for each sequence and the paper's 600 steps, it takes 1.6 times as long on a CPU.
        scores_BH1L = (q * q.shape[-1] ** -0.5).unsqueeze(2) @ key_BHLE[:, :, :length].mT
        attended_BH1E = (scores_BH1L + unseen_B11L).softmax(-1).to(v.dtype) @ value_BHLE[:, :, :length]
        return self.after_attention(x_BD, attended_BH1E.squeeze(2).to(x_BD.dtype))


@dataclass
class Cache:
    """Keys and values of the last L steps of B sequences, (layers, B, H, L, E) each, slots in a ring.

    `count_B` is how many steps each sequence has written since its reset: sequences keep their own time. The host
    knows the same numbers, `steps`, so that it need not wait for a GPU. The first `clean` slots hold finite
    numbers, written or not; the others may hold anything.
    """

    key: Tensor
    value: Tensor
    count_B: Tensor
    steps: list[int]
    clean: int = 0


class CausalTransformer(nn.Module):
    """Inputs (B, T, I) at timesteps (B, T) -> states (B, T, D), each a function of its own past only.

    Arguments: `input_dim` I, `d_model` D, `d_ff` width inside a block, `layers`, `heads` H, `dropout` on
    embeddings and feed-forward. Raises ValueError if D is odd or not a multiple of H. Source: paper,
    appendix A and Table 2; dropout 0.05 in the authors' scripts.
    """

    def __init__(
        self, input_dim: int, d_model: int, d_ff: int, layers: int, heads: int, dropout: float = 0.0
    ):
        super().__init__()
        # Even, because positions come as pairs of a sine and a cosine.
        if d_model % heads or d_model % 2:
            raise ValueError(
                f"d_model must be even and a multiple of heads, got d_model={d_model} and heads={heads}: "
                f"try d_model={2 * heads * max(1, round(d_model / (2 * heads)))}"
            )
        self.input_dim, self.d_model, self.heads, self.dropout = input_dim, d_model, heads, dropout
        self.inp = nn.Linear(input_dim, d_model)
        self.blocks = nn.ModuleList(Block(d_model, d_ff, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(d_model)

    def embed(self, x: Tensor, time: Tensor) -> Tensor:
        "Inputs (..., I) at timesteps (...) -> (..., D)."
        if x.shape != (*time.shape, self.input_dim):
            raise ValueError(
                f"inputs {tuple(x.shape)} and timesteps {tuple(time.shape)} do not fit: expected "
                f"{(*time.shape, self.input_dim)}, one timestep for each input of width {self.input_dim}"
            )
        x = self.inp(x) + sinusoidal_positions(time, self.d_model)
        return F.dropout(x, self.dropout, self.training)

    def forward(self, x_BTI: Tensor, time_BT: Tensor) -> Tensor:
        """Whole windows at once, (B, T, I) and (B, T) -> states (B, T, D).

        `time_BT` counts env steps from the rollout's start, so a step of a window has the same position as
        when the agent acted. Raises ValueError for shapes that do not fit.
        """
        x_BTD = self.embed(x_BTI, time_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.norm(x_BTD)

    def init_cache(self, batch: int, context: int, device=None, dtype=torch.float32) -> Cache:
        """An empty cache of `context` slots for each of `batch` sequences. Raises ValueError below 1 slot."""
        if context < 1:
            raise ValueError(f"context must be 1 or more, since a cache holds the newest step; got {context}")
        shape = (len(self.blocks), batch, self.heads, context, self.d_model // self.heads)
        key, value = torch.zeros(2, *shape, device=device, dtype=dtype)
        return Cache(key, value, torch.zeros(batch, dtype=torch.long, device=device), [0] * batch)

    def reset(self, cache: Cache, which_B: Tensor) -> None:
        """Forget the sequences where the booleans `which_B` (B,) are True; the others keep their memory.

        `which_B` is on the CPU: on a GPU, the host would have to wait for it.
        """
        # The count alone tells which slots are real: old entries are masked, then overwritten.
        cache.steps = [0 if forget else steps for forget, steps in zip(which_B.tolist(), cache.steps)]
        cache.count_B.masked_fill_(which_B.to(cache.count_B.device, non_blocking=True), 0)

    @torch.no_grad()
    def step(self, x_BI: Tensor, time_B: Tensor, cache: Cache) -> Tensor:
        """One step of each sequence, (B, I) at its own timestep (B,) -> states (B, D); updates `cache`.

        For evaluation mode: in training mode each call would apply dropout and make a power iteration.
        Raises ValueError for shapes that do not fit.
        """
        batch, context = cache.key.shape[1], cache.key.shape[3]
        if len(x_BI) != batch:
            raise ValueError(f"a cache for {batch} sequences got one step of {len(x_BI)}: call init_cache")
        x_BD = self.embed(x_BI, time_B)
        # A ring: step n overwrites step n - L in slot n mod L. Keys carry their position in their embedding,
        # so the order of slots does not matter.
        slot = (torch.arange(batch, device=x_BI.device), slice(None), cache.count_B % context)
        cache.count_B += 1
        cache.steps = [steps + 1 for steps in cache.steps]
        filled_B = cache.count_B.clamp(max=context)
        # Slots that no sequence has written yet are left out: early in a rollout, nearly all of them. The
        # newest step always counts, so no row is fully masked.
        length = min(max(cache.steps), context)
        seen_B11L = (torch.arange(length, device=x_BI.device) < filled_B[:, None])[:, None, None]
        unseen_B11L = torch.zeros_like(seen_B11L, dtype=cache.key.dtype).masked_fill_(~seen_B11L, -math.inf)
        if length > cache.clean:
            # Plain: mask keys and values in each block, which takes as long as the rest of the step.
            for part in (cache.key, cache.value):
                part[..., cache.clean : length, :].masked_fill_(~seen_B11L[..., cache.clean :].mT, 0.0)
            cache.clean = length
        for block, key_BHLE, value_BHLE in zip(self.blocks, cache.key, cache.value):
            x_BD = block.step(x_BD, key_BHLE, value_BHLE, slot, unseen_B11L)
        return self.norm(x_BD)


if __name__ == "__main__":
    torch.manual_seed(0)
    T = 10
    model = CausalTransformer(input_dim=6, d_model=16, d_ff=64, layers=2, heads=4).eval()
    x_BTI, time_BT = torch.randn(3, T, 6), torch.arange(T).expand(3, T)
    full_BTD = model(x_BTI, time_BT)
    print(f"window (B, T, I) = {tuple(x_BTI.shape)} -> states (B, T, D) = {tuple(full_BTD.shape)}")
    cache = model.init_cache(batch=3, context=T)
    step_BTD = torch.stack([model.step(x_BTI[:, t], time_BT[:, t], cache) for t in range(T)], dim=1)
    print(f"one step at a time, with a cache: largest difference {(step_BTD - full_BTD).abs().max():.1e}")

    x_BTI[:, 6] += 1.0
    moved_T = (model(x_BTI, time_BT) - full_BTD).abs().amax(dim=(0, 2)) > 0
    print("changing step 6 changes the states of steps", moved_T.nonzero().flatten().tolist())

    positions = [round(x, 4) for x in sinusoidal_positions(torch.tensor(3), 4).tolist()]
    print("position of timestep 3, width 4:", positions)
    print("  by hand: sin 3 = 0.1411, cos 3 = -0.99, sin .03 = 0.03, cos .03 = 0.9996")
    # Two sigma-reparametrised layers have a gamma each, and the output layer has a bias.
    attention = [*model.blocks[0].qkv.parameters(), *model.blocks[0].out.parameters()]
    print("parameters of a block's attention layers:", sum(p.numel() for p in attention))
    print("  by hand: 4 D^2 + D + 2 = 4 x 256 + 16 + 2 = 1042")
