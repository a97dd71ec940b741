r"""A causal Transformer for long training runs, and its one-step decoding with a key/value cache.

What     Normformer blocks over sigma-reparametrised linear layers, with sinusoidal positions from the
         timestep's index in its rollout; `forward` for training windows, `step` for acting
Why      RL keeps one network training for millions of updates on its own moving data: the extra norms,
         the per-head scale and the bounded spectral norms keep attention from collapsing meanwhile
Paper    AMAGO-2 appendix A, "Model Architectures", and Table 2. Normformer: Shleifer et al. 2021;
         sigma-reparam: Zhai et al. 2023; positions: Vaswani et al. 2017. Leaky ReLU throughout
Shapes   B batch, T time, D model width, H heads, I input width; L cache slots
Notes    Windows are padded at their end, so the causal mask alone keeps padding out of real steps.
         Inside the window `step` equals `forward`. Past it they differ: a cached key of the second block
         was made from a first block that saw L steps further back, so a cache of L slots carries some
         memory of layers x L steps, where a window of L steps carries none.
Copy     this file alone; needs torch
Try      python transformer.py
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SigmaReparamLinear(nn.Module):
    """Linear layer whose weight has spectral norm |gamma|: (..., I) -> (..., D_out).

    sigma is the largest singular value of the weight, tracked by one power iteration per training
    forward, made before use. Buffers `u` and `v` are its singular vectors; they carry no gradient, and in
    evaluation mode they stand still. Source: sigma-reparam (Zhai et al. 2023), as the authors use it.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        nn.init.orthogonal_(self.weight)
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.gamma = nn.Parameter(torch.ones(1))
        # Every singular value of an orthogonal matrix is 1: any direction is a right start for v,
        # and u follows from it.
        self.register_buffer("v", F.normalize(torch.randn(inputs), dim=0))
        self.register_buffer("u", F.normalize(self.weight.detach() @ self.v, dim=0))
        self.power_iteration()

    @torch.no_grad()
    def power_iteration(self) -> None:
        """Move u and v one step towards the leading singular vectors of the weight."""
        # u = norm(W v),  then  v = norm(W^T u). New tensors: backward may still need the old ones.
        self.u = F.normalize(self.weight @ self.v, dim=0)
        self.v = F.normalize(self.weight.mT @ self.u, dim=0)

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., D_out)."""
        # In float32 under autocast: an error of 1% in sigma would scale all that follows by 1%.
        with torch.autocast(x.device.type, enabled=False):
            if self.training:
                self.power_iteration()
            # sigma = u . W v,  y = x W^T gamma / sigma + bias
            sigma = torch.dot(self.u, torch.mv(self.weight, self.v))
            weight = self.weight * (self.gamma / sigma)
        return F.linear(x, weight, self.bias)


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
    inside the feed-forward. Source: Normformer (Shleifer et al. 2021), Table 2."""

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
        "(..., D) -> three of (..., H, D/H)."
        return self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        "Residual stream (..., D) and heads' outputs (..., H, D/H) -> residual stream (..., D)."
        x = x + self.norm2(self.out((attended * self.head_scale).flatten(-2)))
        inner = self.norm4(F.leaky_relu(self.ff1(self.norm3(x))))
        inner = self.ff2(F.dropout(inner, self.dropout, self.training))
        return x + F.dropout(inner, self.dropout, self.training)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Every step attends to itself and to what came before it."""
        q, k, v = (part.transpose(1, 2) for part in self.queries_keys_values(x_BTD))  # (B, H, T, D/H)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.after_attention(x_BTD, attended.transpose(1, 2))

    def step(
        self, x_BD: Tensor, key_BHLE: Tensor, value_BHLE: Tensor, slot_B: Tensor, seen_B11L: Tensor
    ) -> Tensor:
        """One new step a sequence: writes its key and value into `slot_B`, attends to the slots `seen_B11L`."""
        q, k, v = self.queries_keys_values(x_BD)
        row = torch.arange(len(x_BD), device=x_BD.device)
        key_BHLE[row, :, slot_B] = k
        value_BHLE[row, :, slot_B] = v
        length = seen_B11L.shape[-1]
        # `is_causal` would let this single query see the first key alone: the mask says what is there.
        attended = F.scaled_dot_product_attention(
            q.unsqueeze(2), key_BHLE[:, :, :length], value_BHLE[:, :, :length], attn_mask=seen_B11L
        )
        return self.after_attention(x_BD, attended.squeeze(2))


@dataclass
class Cache:
    """Keys and values of the last L steps of B sequences, (layers, B, H, L, D/H), slots in a ring.

    `count_B` is how many steps each sequence has written since its reset.
    """

    key: Tensor
    value: Tensor
    count_B: Tensor


class CausalTransformer(nn.Module):
    """Inputs (B, T, I) at timesteps (B, T) -> states (B, T, D), each a function of its own past only.

    Arguments: `inputs` I, `d_model` D, `d_ff`, `layers`, `heads` H, `dropout` on embeddings and feed-forward.
    Raises ValueError if D is odd or not a multiple of H. Source: paper, Table 2 and appendix A.
    """

    def __init__(self, inputs: int, d_model: int, d_ff: int, layers: int, heads: int, dropout: float = 0.0):
        super().__init__()
        if d_model % heads or d_model % 2:
            raise ValueError(
                f"d_model must be even and a multiple of heads, got d_model={d_model}, heads={heads}"
            )
        self.d_model, self.heads, self.dropout = d_model, heads, dropout
        self.inp = nn.Linear(inputs, d_model)
        self.blocks = nn.ModuleList(Block(d_model, d_ff, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(d_model)

    def embed(self, x: Tensor, time: Tensor) -> Tensor:
        "Inputs (..., I) at timesteps (...) -> (..., D)."
        x = self.inp(x) + sinusoidal_positions(time, self.d_model)
        return F.dropout(x, self.dropout, self.training)

    def forward(self, x_BTI: Tensor, time_BT: Tensor) -> Tensor:
        """Whole windows at once, (B, T, I) and (B, T) -> (B, T, D). `time` counts from the rollout's start."""
        x_BTD = self.embed(x_BTI, time_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.norm(x_BTD)

    def init_cache(self, batch: int, context: int, device=None, dtype=torch.float32) -> Cache:
        """An empty cache of `context` slots for each of `batch` sequences."""
        shape = (len(self.blocks), batch, self.heads, context, self.d_model // self.heads)
        zeros = torch.zeros(2, *shape, device=device, dtype=dtype)
        return Cache(zeros[0], zeros[1], torch.zeros(batch, dtype=torch.long, device=device))

    def reset(self, cache: Cache, which_B: Tensor) -> None:
        """Forget the sequences where `which_B` (B,) is True; the others keep their memory."""
        cache.count_B[which_B] = 0

    @torch.no_grad()
    def step(self, x_BI: Tensor, time_B: Tensor, cache: Cache) -> Tensor:
        """One step of each sequence, (B, I) at its own timestep (B,) -> (B, D); updates `cache`.

        Meant for evaluation mode: in training mode each call would make a power iteration.
        """
        context = cache.key.shape[3]
        # The ring: step n lies in slot n mod L, over what was seen L steps ago. Keys carry their position
        # in their embedding, so the order of slots does not matter.
        slot_B = cache.count_B % context
        cache.count_B += 1
        filled_B = cache.count_B.clamp(max=context)
        # Slots that no sequence has written yet are left out altogether; the newest always counts, so no
        # row is ever fully masked.
        length = int(filled_B.max())
        seen_B11L = (torch.arange(length, device=x_BI.device) < filled_B[:, None])[:, None, None]
        x_BD = self.embed(x_BI, time_B)
        for block, key, value in zip(self.blocks, cache.key, cache.value):
            x_BD = block.step(x_BD, key, value, slot_B, seen_B11L)
        return self.norm(x_BD)


if __name__ == "__main__":
    torch.manual_seed(0)
    D, FF, LAYERS, HEADS, I, T = 16, 64, 2, 4, 6, 10
    model = CausalTransformer(I, D, FF, LAYERS, HEADS).eval()
    x_BTI, time_BT = torch.randn(3, T, I), torch.arange(T).expand(3, T)
    full_BTD = model(x_BTI, time_BT)
    print(f"window (B, T, I) = {tuple(x_BTI.shape)} -> states (B, T, D) = {tuple(full_BTD.shape)}")

    cache = model.init_cache(batch=3, context=T)
    cached = torch.stack([model.step(x_BTI[:, t], time_BT[:, t], cache) for t in range(T)], dim=1)
    print(f"one step at a time, with a cache: largest difference {(cached - full_BTD).abs().max():.1e}")

    changed = x_BTI.clone()
    changed[:, 6] += 1.0
    moved = (model(changed, time_BT) - full_BTD).abs().amax(dim=(0, 2))
    print("changing step 6 moves the states of steps", torch.nonzero(moved > 0).flatten().tolist())

    layer = SigmaReparamLinear(8, 8)
    with torch.no_grad():
        layer.weight.mul_(50.0)
        layer(torch.zeros(8))
        effective = layer.weight * layer.gamma / torch.dot(layer.u, layer.weight @ layer.v)
    print(f"weights x 50: spectral norm {torch.linalg.matrix_norm(effective, 2):.4f} (gamma = 1)")

    block = (
        3 * D * D + 1 + (D * D + D + 1) + (D * FF + FF + 1) + (FF * D + D + 1) + 3 * 2 * D + 2 * FF + HEADS
    )
    print(
        f"parameters: input {I * D + D}, a block {block} (counted: {sum(p.numel() for p in model.blocks[0].parameters())})"
    )
    print(
        f"final norm {2 * D}, in all {sum(p.numel() for p in model.parameters())} = {I * D + D} + {LAYERS} x {block} + {2 * D}"
    )
