"""Numbers recorded from the authors' code (tests/golden/), and their parameters' names in ours."""

from pathlib import Path

import numpy as np
import torch

GOLDEN = Path(__file__).parent / "golden"
LAYERS = {"in_layer": 0, "layers.0": 1, "out_layer": 2, "inp_layer": 0, "core_layers.0": 1, "output_layer": 2}


def golden(name: str) -> dict[str, torch.Tensor]:
    return {k: torch.as_tensor(v) for k, v in np.load(GOLDEN / f"{name}.npz").items()}


def ours(name: str, value: torch.Tensor, heads: int = 2) -> tuple[str, torch.Tensor] | None:
    "A parameter (or its gradient) under our name and in our layout; None for what ours does not have."
    part, rest = name.split(".", 1)
    kind = name.rsplit(".", 1)[-1]
    if part == "maximized_critics" or "in_norm" in name:
        return None  # a frozen copy of the critics; an input normalisation that was switched off
    if part == "popart":
        return f"popart.{kind.strip('_')}", value.view(-1)
    if part in ("critics", "target_critics"):
        layer = LAYERS[rest.removeprefix("net.").removesuffix(f".{kind}")]
        return f"value.{part}.{kind}.{layer}", value if kind == "weight" else value.view(
            len(value[0, 0]), 1, -1
        )
    if part in ("actor", "target_actor", "tstep_encoder") and rest.startswith("base."):
        layer = LAYERS[rest.removeprefix("base.").removesuffix(f".{kind}")]
        return f"{part.replace('tstep_encoder', 'encoder')}.layers.{layer}.{kind}", value
    if part == "tstep_encoder":
        return f"encoder.out_norm.{kind}", value
    rest = rest.removeprefix("tformer.").replace("layers.", "blocks.").replace("attention_layer.", "")
    rest = rest.replace(".norm.", ".").replace("qkv_projection", "qkv").replace("out_projection", "out")
    if rest.endswith(("qkv.weight", "qkv.u")):
        # (3, width, heads), heads fastest -> (3, heads, width)
        value = value.unflatten(0, (3, -1, heads)).transpose(1, 2).flatten(0, 2)
    if rest.endswith("head_scaler"):
        rest, value = rest.replace("head_scaler", "head_scale"), value.view(heads, 1)
    return f"transformer.{rest}", value


def state_dict(data: dict[str, torch.Tensor], prefix: str = "weights/") -> dict[str, torch.Tensor]:
    "All of a file's tensors under `prefix` that ours has, by our names."
    pairs = (ours(k.removeprefix(prefix), v) for k, v in data.items() if k.startswith(prefix))
    return dict(pair for pair in pairs if pair)
