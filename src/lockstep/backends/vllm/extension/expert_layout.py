"""Expert weights as vLLM's kernel for experts reads them, turned back into checkpoint tensors.

The kernel takes all experts of a layer as two parameters, w13 (gate and up projections) and w2
(down projections). On a CPU they are packed: the same elements in another order. Packing a tensor
of positions shows that order, and with it the held parameters are unpacked, one expert at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

SHARDS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "w1": "w1", "w3": "w3", "w2": "w2"}
EXPERT = re.compile(r".*\.experts\.(?P<expert>\d+)\.(?P<shard>\w+)\.weight")
BASE = 128
"""Base in which positions are written into tensors: every 16-bit type holds these integers."""

Pair = tuple[str, Any, Any, tuple[int, int]]
"""Name, held part, expected part, and the row and column at which the part begins."""


def expert_layers(modules: Mapping[str, Any]) -> list[ExpertLayer]:
    """Return the layers of experts among these modules."""
    return [
        ExpertLayer(path, module)
        for path, module in modules.items()
        if any(name.startswith("w13_") for name, _ in module.named_parameters(recurse=False))
    ]


class ExpertLayer:
    """The experts of one layer on this rank, and the checkpoint's tensors for them."""

    def __init__(self, path: str, module: Any) -> None:
        self._prefix = f"{path.partition('.experts')[0]}.experts."
        self._module = module
        self._names: dict[int, dict[str, str]] = {}
        self._orders: dict[Any, Any] = {}
        self.unread: dict[str, str] = {}
        self.absent: list[str] = []

    @property
    def names(self) -> list[str]:
        """The tensors of the checkpoint for these experts."""
        return [name for names in self._names.values() for name in names.values()]

    def owns(self, name: str) -> bool:
        return name.startswith(self._prefix)

    def add(self, name: str) -> None:
        """Record a tensor of the checkpoint for these experts."""
        parts = EXPERT.fullmatch(name)
        shard = SHARDS.get(parts["shard"]) if parts else None
        if parts is None or shard is None:
            self.unread[name] = "it is not the gate, up or down projection of one expert"
        else:
            self._names.setdefault(int(parts["expert"]), {})[shard] = name

    def pairs(self, tensors: Mapping[str, Any]) -> Iterator[Pair]:
        """Return held and expected weights, one projection of one expert at a time."""
        module = self._module
        why = self._unreadable()
        for expert, names in sorted(self._names.items()):
            place = module._map_global_expert_id_to_local_expert_id(expert)
            if place < 0:
                self.absent += names.values()
            elif why is not None:
                self.unread |= dict.fromkeys(names.values(), why)
            else:
                yield from self._projections(place, names, tensors)

    def _unreadable(self) -> str | None:
        """Return why these experts cannot be read back, or None."""
        method = self._module.quant_method
        if type(method) is not UnquantizedFusedMoEMethod:
            return f"quantised: {type(method).__name__}"
        backend = method.unquantized_backend
        if backend is UnquantizedMoeBackend.CPU:
            experts = method.moe_kernel.fused_experts
            zen = getattr(experts, "_use_zentorch", False)
            return "packed by zentorch" if zen else None
        if backend is UnquantizedMoeBackend.TRITON:
            return None
        return f"the layout of the {backend.value} kernel is not known"

    def _projections(
        self, place: int, names: Mapping[str, str], tensors: Mapping[str, Any]
    ) -> Iterator[Pair]:
        config = self._module.moe_config
        w13 = self._unpacked(self._module.w13_weight[place])
        w2 = self._unpacked(self._module.w2_weight[place])
        half = w13.shape[0] // 2  # padded, like the columns of w2
        for shard, name in names.items():
            tensor = tensors[name]
            split = 1 if shard == "w2" else 0
            size = tensor.shape[split] // config.tp_size
            first = config.tp_rank * size
            part = tensor.narrow(split, first, size)
            held = {"w1": w13[:half], "w3": w13[half:], "w2": w2}[shard]
            if any(have < want for have, want in zip(held.shape, part.shape, strict=True)):
                self.unread[name] = f"the held shape is {list(held.shape)}"
                continue
            start = (0, first) if split else (first, 0)
            yield name, held[: part.shape[0], : part.shape[1]], part, start

    def _unpacked(self, held: Any) -> Any:
        method = self._module.quant_method
        if method.unquantized_backend is not UnquantizedMoeBackend.CPU:
            return held
        key = (held.shape, held.dtype)
        if key not in self._orders:
            self._orders[key] = _packed_order(held, method.moe_kernel.fused_experts.isa)
        flat = torch.empty_like(held).view(-1)
        flat[self._orders[key]] = held.reshape(-1)
        return flat.view(held.shape)


def _packed_order(held: Any, isa: str) -> Any:
    """Return the position in the unpacked tensor of each element of the packed one."""
    count = held.numel()
    order = torch.zeros(count, dtype=torch.int64)
    scale = 1
    while scale < count:
        digits = torch.arange(count) // scale % BASE
        plane = digits.to(held.dtype).view(1, *held.shape)
        order += cpu_prepack_moe_weight(plane, isa).reshape(-1).long() * scale
        scale *= BASE
    return order
