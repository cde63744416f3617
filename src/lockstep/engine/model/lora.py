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

from lockstep.checkpoint.adapter import AdapterFiles
from lockstep.checkpoint.safetensors_file import TensorEntry, TensorFile
from lockstep.engine.config import ModelConfig
from lockstep.engine.kv.cache import index_on
from lockstep.engine.model.arithmetic import round_up
from lockstep.tokens.errors import AdapterError

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
        roots: Sequence[Path] | None = None,
    ) -> Adapter:
        """Return the adapter in `path`. Raises AdapterError that says what does not fit this model,
        and Forbidden for a symlink out of `roots` (None allows any).

        Version spans identify its contents by a hash, prefixed by `label` if there is one.
        """
        files = AdapterFiles.read(path, roots)
        settings = _check_settings(files.settings)
        rank = _read_rank(settings, max_rank, path)
        # The header decides whether the file is read: its size is then that of the model's shapes.
        targets = {
            module: _check_pair(config, rank, module, pair)
            for module, pair in sorted(_pairs(files.file.entries).items())
        }
        files.check_modules()
        body = _read(files.file)
        try:
            tensors = load_safetensors(body)
        except SafetensorError as error:
            raise AdapterError(f"{path} holds no readable safetensors: {error}") from None
        for key, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise AdapterError(f"adapter tensor {key!r} has values that are NaN or infinite")
        deltas: dict[tuple[int, str], list[LoraDelta]] = {}
        for (layer, _), (packed, start, *keys) in targets.items():
            a, b = (tensors[key].to(device=device, dtype=dtype).contiguous() for key in keys)
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


def _read(file: TensorFile) -> bytes:
    try:
        with open(file.path, "rb") as source:
            body = source.read(file.size + 1)
    except OSError as error:
        raise AdapterError(f"{file.path} cannot be read: {error.strerror}") from None
    if len(body) != file.size:
        raise AdapterError(f"{file.path} changed while it was read: write it once, then load it")
    return body


def _pairs(entries: Iterable[TensorEntry]) -> dict[tuple[int, str], dict[str, TensorEntry]]:
    """Return the two factors of each update, by layer and module."""
    pairs: dict[tuple[int, str], dict[str, TensorEntry]] = {}
    for entry in entries:
        match = NAME.fullmatch(entry.name)
        if not match:
            raise AdapterError(f"adapter tensor {entry.name!r} is not a LoRA weight of this model")
        layer, module = (HEAD_LAYER, match[3]) if match[3] else (int(match[1]), match[2])
        factors = pairs.setdefault((layer, module), {})
        if match[4] in factors:
            raise AdapterError(f"adapter tensor {entry.name!r} is there under two names")
        factors[match[4]] = entry
    return pairs


def _check_pair(
    config: ModelConfig, rank: int, target: tuple[int, str], pair: Mapping[str, TensorEntry]
) -> tuple[str, int, str, str]:
    """Return packed module, first column and the names of both factors of an update. Raises
    AdapterError for shapes that do not fit the model."""
    layer, module = target
    packed, start, size_in, size_out = _target(config, layer, module)
    for side, shape in {"A": (rank, size_in), "B": (size_out, rank)}.items():
        got = pair[side].shape if side in pair else None
        if got != shape:
            where = module if layer == HEAD_LAYER else f"{module} in layer {layer}"
            raise AdapterError(f"lora_{side} of {where} has shape {got}, expected {shape}")
    return packed, start, pair["A"].name, pair["B"].name


def _check_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in UNSUPPORTED:
        if settings.get(name):
            raise AdapterError(f"adapter_config.json sets {name}, which is not supported")
    if settings.get("bias", "none") != "none":
        raise AdapterError(f"adapter_config.json sets bias {settings['bias']!r}, expected none")
    return settings


def _read_rank(settings: Mapping[str, Any], max_rank: int, path: Path) -> int:
    rank = settings.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise AdapterError(
            f"{path / 'adapter_config.json'} has rank {rank!r:.40}, expected 1 or more"
        )
    if rank > max_rank:
        raise AdapterError(f"LoRA rank {rank} is greater than max_lora_rank {max_rank}")
    return rank


def _read_scaling(settings: Mapping[str, Any], rank: int, path: Path) -> float:
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
    if config.traits.fused:
        whole = config.q_size + 2 * config.kv_size
        targets = {
            "qkv_proj": ("qkv", 0, config.hidden, whole),
            "o_proj": targets["o_proj"],
            "gate_up_proj": ("gate_up", 0, config.hidden, 2 * config.intermediate),
            "down_proj": targets["down_proj"],
        }
    if module not in targets:
        raise AdapterError(
            f"adapter targets {module!r} in layer {layer}; supported are {', '.join(targets)}"
        )
    return targets[module]
