"""Faults inside a vLLM server that make it hold other weights, or another adapter, than it read."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

WeightFault = Literal[
    "nothing loaded", "old weights kept", "layer 0 kept", "layer 1 kept", "stale up_proj",
    "stale norms", "stale tied head", "two embedding rows swapped", "gate and up swapped",
    "v_proj zeroed",
]  # fmt: skip
AdapterFault = Literal[
    "dropped", "old adapter kept", "B zeroed", "A zeroed", "layer 1 dropped", "stale q_proj",
    "layers swapped", "scaling ignored", "stale slot",
]  # fmt: skip
WEIGHT_FAULTS: tuple[WeightFault, ...] = get_args(WeightFault)
ADAPTER_FAULTS: tuple[AdapterFault, ...] = get_args(AdapterFault)
LAYERS = ("model.layers.0.", "model.layers.1.")
EMBEDDING = "model.embed_tokens.weight"
UP = LAYERS[1] + "mlp.up_proj.weight"
GATE = LAYERS[1] + "mlp.gate_proj.weight"
VALUE = LAYERS[0] + "self_attn.v_proj.weight"
ROWS = [100, 101]
Tensors = dict[str, Tensor]


def tensors_of(fault: WeightFault, old: Tensors, new: Tensors) -> Tensors:
    """The tensors that take the place of the new ones. "stale tied head" replaces none: the server
    leaves out the repair that packs the head again."""
    match fault:
        case "nothing loaded" | "old weights kept":
            return dict(old)
        case "layer 0 kept" | "layer 1 kept":
            prefix = LAYERS[int(fault[6])]
            return {name: old[name] for name in new if name.startswith(prefix)}
        case "stale up_proj":
            return {UP: old[UP]}
        case "stale norms":
            return {name: old[name] for name in new if "norm" in name}
        case "stale tied head":
            return {}
        case "two embedding rows swapped":
            rows = new[EMBEDDING].clone()
            rows[ROWS] = rows[ROWS[::-1]]
            return {EMBEDDING: rows}
        case "gate and up swapped":
            return {GATE: new[UP], UP: new[GATE]}
        case "v_proj zeroed":
            return {VALUE: torch.zeros_like(new[VALUE])}


def changes_anything(fault: WeightFault, old: Tensors, new: Tensors, dtype: torch.dtype) -> bool:
    """Whether a server of that type holds any other element because of the fault. A small step may
    change no element of a norm in bfloat16, and then stale norms are the right ones."""
    replaced = tensors_of(fault, old, new)
    if fault == "stale tied head":
        replaced = {EMBEDDING: old[EMBEDDING]}
    return any(not new[name].to(dtype).equal(replaced[name].to(dtype)) for name in replaced)


def adapter_tensors_of(fault: AdapterFault, old: Tensors, new: Tensors) -> Tensors:
    """The adapter's tensors with the fault, for those faults that are in its tensors."""
    match fault:
        case "B zeroed" | "A zeroed":
            side = f"lora_{fault[0]}"
            return {n: torch.zeros_like(t) if side in n else t for n, t in new.items()}
        case "layer 1 dropped":
            return {name: tensor for name, tensor in new.items() if LAYERS[1] not in name}
        case "stale q_proj":
            return {name: old[name] if "q_proj" in name else new[name] for name in new}
        case "layers swapped":
            return {_other_layer(name): tensor for name, tensor in new.items()}
        case "scaling ignored":
            return {name: t / 2 if "lora_B" in name else t for name, t in new.items()}
        case _:
            return dict(new)


def _other_layer(name: str) -> str:
    first, second = LAYERS
    return name.replace(first, second) if first in name else name.replace(second, first)
