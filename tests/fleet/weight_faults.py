"""Ways for a worker to hold other weights than it was told to: each as tensors in the right place's
stead, and as a checkpoint that a worker may be made to read instead of the right one."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

Fault = Literal["old weights kept", "one layer kept", "one tensor zeroed", "one expert stale",
                "two rows permuted"]  # fmt: skip
FAULTS: tuple[Fault, ...] = get_args(Fault)
LAYER = "model.layers.1."
ZEROED = LAYER + "self_attn.q_proj.weight"
PERMUTED = "model.embed_tokens.weight"
EXPERT = LAYER + "mlp.experts.0."
Tensors = dict[str, Tensor]


def replaced(fault: Fault, old: Tensors, new: Tensors) -> Tensors:
    """The tensors of the new weights that the fault replaces. A dense layer stands for an expert in
    a model that has none."""
    match fault:
        case "old weights kept":
            return dict(old)
        case "one layer kept":
            return {name: old[name] for name in new if name.startswith(LAYER)}
        case "one tensor zeroed":
            return {ZEROED: torch.zeros_like(new[ZEROED])}
        case "one expert stale":
            names = [name for name in new if name.startswith(EXPERT)]
            names = names or [name for name in new if name.startswith(LAYER + "mlp.")]
            return {name: old[name] for name in names}
        case "two rows permuted":
            rows = new[PERMUTED].clone()
            rows[[100, 101]] = rows[[101, 100]]
            return {PERMUTED: rows}


def stepped(tensors: Tensors, scale: float, seed: int = 3) -> Tensors:
    """Weights after a step: noise of `scale` standard deviations on every tensor."""
    rng = torch.Generator().manual_seed(seed)
    out = {}
    for name, tensor in tensors.items():
        exact = tensor.float()
        noise = torch.randn(tensor.shape, generator=rng)
        out[name] = (exact + scale * exact.std() * noise).to(tensor.dtype)
    return out


def written(fault: Fault, source: Path, target: Path, old: Tensors, new: Tensors) -> Path:
    """A checkpoint of the new weights with that fault."""
    from tests.engine import checkpoints

    return checkpoints.save(source, target, new | replaced(fault, old, new))
