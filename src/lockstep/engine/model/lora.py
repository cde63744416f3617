"""LoRA adapters: read and checked from PEFT directories, and applied row by row."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor

from lockstep.checkpoint.files import parse_object
from lockstep.engine.config import ModelConfig
from lockstep.engine.kv.cache import index_on
from lockstep.engine.model.arithmetic import round_up
from lockstep.tokens.errors import AdapterError, CheckpointError

_uids = count()
NAME = re.compile(
    r"(?:base_model\.model\.)?"
    r"(?:model\.layers\.(\d{1,6})\.(?:self_attn|mlp)\.(\w+)|(lm_head))\.lora_([AB])\.weight"
)
HEAD_LAYER = -1
"""Layer index of updates to the head, which belongs to no layer."""
LARGEST = 1e6
"""Upper bound of lora_alpha. Usual values are 8 to 512."""
UNSUPPORTED = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out",
           "lora_bias", "trainable_token_indices", "target_parameters")  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoraDelta:
    """One low-rank update, added to columns [start, start + out) of a packed module's output."""

    a: Tensor
    b: Tensor
    start: int


@dataclass(frozen=True)
class Adapter:
    """A loaded adapter. `uid` is unique to this load: caches use it as a key, never the name."""

    name: str
    path: Path
    label: str
    scaling: float
    deltas: Mapping[tuple[int, str], tuple[LoraDelta, ...]]
    uid: int = field(default_factory=lambda: next(_uids))

    @property
    def adapts_head(self) -> bool:
        """Whether it updates the head. With tied embeddings only the logits change."""
        return (HEAD_LAYER, "head") in self.deltas

    @property
    def rank(self) -> int:
        """The rank of its updates, the same for all of them."""
        deltas = next(iter(self.deltas.values()))
        return int(deltas[0].a.shape[0])

    @classmethod
    def load(
        cls,
        name: str,
        path: Path,
        config: ModelConfig,
        *,
        max_rank: int,
        device: str,
        dtype: torch.dtype,
        label: str | None = None,
    ) -> Adapter:
        """Return the adapter in `path`. Raises AdapterError that says what does not fit this model.

        Version spans identify its contents by a hash, prefixed by `label` if there is one.
        """
        settings = _read_settings(path)
        rank = _read_rank(settings, max_rank, path)
        body = _read(path / "adapter_model.safetensors")
        try:
            tensors = load_safetensors(body)
        except SafetensorError as error:
            raise AdapterError(f"{path} holds no readable safetensors: {error}") from None
        pairs: dict[tuple[int, str], dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            match = NAME.fullmatch(key)
            if not match:
                raise AdapterError(f"adapter tensor {key!r} is not a LoRA weight of this model")
            if not tensor.is_floating_point():
                raise AdapterError(f"adapter tensor {key!r} is {tensor.dtype}, expected a float")
            if not bool(torch.isfinite(tensor).all()):
                raise AdapterError(f"adapter tensor {key!r} has values that are NaN or infinite")
            layer, module = (HEAD_LAYER, match[3]) if match[3] else (int(match[1]), match[2])
            pairs.setdefault((layer, module), {})[match[4]] = tensor
        if not pairs:
            raise AdapterError(f"{path} holds no LoRA tensors")
        deltas: dict[tuple[int, str], list[LoraDelta]] = {}
        for (layer, module), pair in sorted(pairs.items()):
            packed, start, size_in, size_out = _target(config, layer, module)
            expected = {"A": (rank, size_in), "B": (size_out, rank)}
            for side, shape in expected.items():
                got = tuple(pair[side].shape) if side in pair else None
                if got != shape:
                    where = module if layer == HEAD_LAYER else f"{module} in layer {layer}"
                    raise AdapterError(f"lora_{side} of {where} has shape {got}, expected {shape}")
            a, b = (pair[side].to(device=device, dtype=dtype).contiguous() for side in "AB")
            deltas.setdefault((layer, packed), []).append(LoraDelta(a, b, start))
        scaling = _read_scaling(settings, rank, path)
        # The digest covers the scaling: the same tensors scaled differently are another adapter.
        digest = hashlib.sha256(f"{scaling!r} ".encode() + body).hexdigest()[:12]
        label = digest if label is None else f"{label}.{digest}"
        return cls(name, path, label, scaling, {key: tuple(d) for key, d in deltas.items()})


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of a batch that use one adapter, and the multiple to pad them to."""

    adapter: Adapter
    rows: Tensor
    multiple: int

    def add_to(
        self,
        out: Tensor,
        x: Tensor,
        layer: int,
        module: str,
        product: Callable[[Tensor, Tensor], Tensor] = F.linear,
    ) -> None:
        """Add the adapter's update of `module` to these rows of `out`, in place.

        `product` replaces `F.linear` on devices where that does not keep its bits.
        """
        deltas = self.adapter.deltas.get((layer, module))
        if not deltas:
            return
        count = len(self.rows)
        selected = F.pad(x[self.rows], (0, 0, 0, round_up(count, self.multiple) - count))
        for delta in deltas:
            part = product(product(selected, delta.a), delta.b)[:count] * self.adapter.scaling
            columns = slice(delta.start, delta.start + delta.b.shape[0])
            out[self.rows, columns] = out[self.rows, columns] + part


def adapter_rows(
    runs: Iterable[tuple[Adapter | None, int]],
    device: torch.device,
    multiple: Callable[[Adapter], int] = lambda _: 1,
) -> list[AdapterRows]:
    """Return the rows of each adapter in a batch of runs, each (adapter or None, number of rows).

    `multiple` returns what to pad the rows of an adapter to.
    """
    spans: dict[int, tuple[Adapter, list[tuple[int, int]]]] = {}
    start = 0
    for adapter, size in runs:
        if adapter is not None and size:
            spans.setdefault(adapter.uid, (adapter, []))[1].append((start, size))
        start += size
    return [
        AdapterRows(adapter, index_on(_numbers(runs_of), device), multiple(adapter))
        for adapter, runs_of in spans.values()
    ]


def _numbers(spans: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """Return all row numbers of spans given as (first, size)."""
    starts, sizes = np.array(spans, dtype=np.int64).T
    before = np.cumsum(sizes) - sizes
    return np.repeat(starts - before, sizes) + np.arange(sizes.sum())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {error.strerror}") from None


def _read_settings(path: Path) -> dict[str, Any]:
    where = path / "adapter_config.json"
    try:
        settings = parse_object(_read(where), str(where))
    except CheckpointError as error:
        raise AdapterError(error.message) from None
    for name in UNSUPPORTED:
        if settings.get(name):
            raise AdapterError(f"adapter_config.json sets {name}, which is not supported")
    if settings.get("bias", "none") != "none":
        raise AdapterError(f"adapter_config.json sets bias {settings['bias']!r}, expected none")
    return settings


def _read_rank(settings: dict[str, Any], max_rank: int, path: Path) -> int:
    rank = settings.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise AdapterError(
            f"{path / 'adapter_config.json'} has rank {rank!r:.40}, expected 1 or more"
        )
    if rank > max_rank:
        raise AdapterError(f"LoRA rank {rank} is greater than max_lora_rank {max_rank}")
    return rank


def _read_scaling(settings: dict[str, Any], rank: int, path: Path) -> float:
    """Return the factor of the update.

    Raises AdapterError for a lora_alpha so large that every result would be infinite.
    """
    alpha = settings.get("lora_alpha", rank)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) < LARGEST:
        raise AdapterError(
            f"{path / 'adapter_config.json'} has lora_alpha {alpha!r:.40}, expected a number whose "
            f"magnitude is below {LARGEST:g}"
        )
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _target(config: ModelConfig, layer: int, module: str) -> tuple[str, int, int, int]:
    """Return packed module, first output column, input and output size. Raises AdapterError."""
    if layer == HEAD_LAYER:
        return "head", 0, config.hidden, config.vocab_size
    if layer >= config.layers:
        raise AdapterError(f"adapter names layer {layer}, but the model has {config.layers} layers")
    targets = {
        "q_proj": ("qkv", 0, config.hidden, config.q_size),
        "k_proj": ("qkv", config.q_size, config.hidden, config.kv_size),
        "v_proj": ("qkv", config.q_size + config.kv_size, config.hidden, config.kv_size),
        "o_proj": ("out", 0, config.q_size, config.hidden),
    }
    if layer not in config.moe_layers:
        width = config.intermediate
        targets |= {
            "gate_proj": ("gate_up", 0, config.hidden, width),
            "up_proj": ("gate_up", width, config.hidden, width),
            "down_proj": ("down", 0, width, config.hidden),
        }
    if module not in targets:
        raise AdapterError(
            f"adapter targets {module!r} in layer {layer}; supported are {', '.join(targets)}"
        )
    return targets[module]
