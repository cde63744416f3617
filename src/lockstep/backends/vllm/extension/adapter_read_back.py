"""Read-back of an adapter from the slot that vLLM's LoRA kernels read, compared with its files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from lockstep.backends.vllm.extension.read_back import LORA_WRAPPER, Comparison, Unreadable
from lockstep.protocol.control.read_back import ReadBack
from lockstep.tokens.errors import AdapterError, UnsupportedField

PREFIX = "base_model.model."
SIDES = {".lora_A.weight": "a", ".lora_B.weight": "b"}
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


class AdapterNames:
    """Ids under which the engine registers adapters, by name.

    vLLM's worker keeps ids only. Each of its requests to add an adapter, which it repeats with
    every batch, has both the name and the id.

    vLLM 0.32 also repeats the flag to load in place: it would read the adapter's files again for
    every batch, and serve whatever they contain then. Batches lose that flag here.
    """

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._observed: Any = None

    def observe(self, worker: Any) -> None:
        """Record the adapters that this worker is asked to add from now on."""
        manager = getattr(worker.model_runner, "lora_manager", None)
        if manager is None or manager is self._observed:
            return
        self._observed = manager
        add, set_active = manager.add_adapter, manager.set_active_adapters

        def add_adapter(request: Any) -> Any:
            self._ids[request.lora_name] = request.lora_int_id
            return add(request)

        def set_active_adapters(requests: set[Any], mapping: Any) -> None:
            loaded = {msgspec.structs.replace(request, load_inplace=False) for request in requests}
            set_active(loaded, mapping)

        manager.add_adapter, manager.set_active_adapters = add_adapter, set_active_adapters

    def id_of(self, name: str) -> int:
        if name not in self._ids:
            raise AdapterError(f"adapter {name!r} was never loaded on this server", param="adapter")
        return self._ids[name]


def read_back_adapter(worker: Any, names: AdapterNames, name: str, path: Path) -> ReadBack:
    """Compare the slot of an adapter with its files. Raises AdapterError when it has no slot."""
    started = perf_counter()
    manager = getattr(worker.model_runner, "lora_manager", None)
    if manager is None:
        raise UnsupportedField("this server was started without --enable-lora", param="adapter")
    adapters, number = manager._adapter_manager, names.id_of(name)
    if number not in adapters.list_adapters():
        raise AdapterError(f"adapter {name!r} is not loaded on this server", param="adapter")
    # With more adapters than slots, the engine fills a slot when a request needs it.
    adapters.activate_adapter(number)
    slot = adapters.lora_index_to_id.index(number)
    comparison = Comparison()
    tensors, config = _read(path)
    with torch.inference_mode(), comparison.attempt(tensors):
        _Slot(adapters, slot, comparison).compare(tensors, _scaling(config))
    return comparison.report(round(perf_counter() - started, 6))


class _Slot:
    """One slot of all layers: the weights of one adapter as the kernels read them."""

    def __init__(self, adapters: Any, slot: int, comparison: Comparison) -> None:
        self._modules = {
            path.replace(LORA_WRAPPER, ""): module for path, module in adapters.modules.items()
        }
        self._adapters, self._slot, self._comparison = adapters, slot, comparison
        mapper = getattr(adapters.model, "hf_to_vllm_mapper", None)
        self._rename: Callable[[str], str | None] = (
            str if mapper is None else mapper.get_rename_mapper().map_name
        )

    def compare(self, tensors: Mapping[str, Any], scaling: float) -> None:
        expected: dict[tuple[str, int], dict[str, tuple[str, Any]]] = {}
        for name, tensor in tensors.items():
            side = next((side for end, side in SIDES.items() if name.endswith(end)), None)
            place = self._locate(name) if side else None
            if side is None or place is None:
                self._comparison.unread[name] = "no layer of the model takes it"
            else:
                factor = scaling if side == "b" else 1.0
                expected.setdefault(place, {})[side] = (name, (tensor, factor))
        for module_path, module in self._modules.items():
            for part, (a, b) in enumerate(
                zip(module.lora_a_stacked, module.lora_b_stacked, strict=True)
            ):
                sources = expected.get((module_path, part), {})
                for side, stack in (("a", a), ("b", b)):
                    label = f"{module_path}.lora_{side.upper()} (part {part})"
                    name, source = sources.get(side, (label, None))
                    self._compare(module, part, side, name, stack[self._slot, 0], source)

    def _compare(
        self, module: Any, part: int, side: str, name: str, held: Any, source: Any
    ) -> None:
        """Compare one matrix of a slot; rows and columns beyond the adapter's must be zero."""
        expected = torch.zeros_like(held)
        if source is not None:
            tensor, factor = source
            # As vLLM computes it: cast first, then scaled in the adapter's type.
            matrix = tensor.to(held.dtype)
            if factor != 1.0:
                matrix *= factor
            matrix = self._own_part(module, part, side, matrix)
            if matrix.shape[0] > held.shape[0] or matrix.shape[1] > held.shape[1]:
                self._comparison.unread[name] = f"its slot has the shape {list(held.shape)}"
                return
            expected[: matrix.shape[0], : matrix.shape[1]] = matrix
        self._comparison.compare(name, held, expected)

    def _own_part(self, module: Any, part: int, side: str, matrix: Any) -> Any:
        """Return the part of the matrix that this tensor-parallel rank holds."""
        if module.tp_size == 1:
            return matrix
        slice_matrix = module.slice_lora_a if side == "a" else module.slice_lora_b
        if len(module.lora_a_stacked) == 1:
            return slice_matrix(matrix)
        parts = [None] * len(module.lora_a_stacked)
        parts[part] = matrix
        return slice_matrix(parts)[part]

    def _locate(self, name: str) -> tuple[str, int] | None:
        """Return the layer that takes a tensor, and its part of a fused layer."""
        end = next(end for end in SIDES if name.endswith(end))
        module = self._rename(name.removeprefix(PREFIX).removesuffix(end) + ".weight")
        if module is None:
            return None
        module = module.removesuffix(".weight")
        if module in self._modules:
            return module, 0
        parent, _, leaf = module.rpartition(".")
        for fused, leaves in self._adapters.packed_modules_mapping.items():
            if leaf in leaves and f"{parent}.{fused}" in self._modules:
                return f"{parent}.{fused}", leaves.index(leaf)
        return None


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors of an adapter and its configuration."""
    try:
        return load_file(path / TENSORS), json.loads((path / CONFIG).read_text())
    except (OSError, ValueError, SafetensorError) as error:
        raise AdapterError(f"{path} cannot be read: {error}", param="path") from None


def _scaling(config: Mapping[str, Any]) -> float:
    """Return the factor of the B matrices. Raises Unreadable where it differs between layers."""
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        raise Unreadable("the adapter has a rank_pattern or alpha_pattern")
    rank, alpha = config["r"], config["lora_alpha"]
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))
