"""A model's weights: read and checked from disk, packed for the forward pass, swapped as a whole.

Fused modules (q, k, v; gate and up; all experts of a layer) are one packed tensor each, and a tied
head is the embedding itself, so no update can replace only half of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from lockstep.checkpoint.digest import combined
from lockstep.checkpoint.open import open_checkpoint
from lockstep.checkpoint.tensor_names import (
    DERIVED,
    EMBEDDING,
    HEAD,
    check_names,
    tied_head_differs,
)
from lockstep.engine.config import ModelConfig
from lockstep.engine.weights.packed import PackedTensors
from lockstep.engine.weights.read import read_tensor
from lockstep.engine.weights.upload import check_finite, copier
from lockstep.tokens.errors import CheckpointError

_epochs = count()
NORMS = {
    "inputs": {"input": "attention_norm", "post_attention": "mlp_norm"},
    "outputs": {"post_attention": "attention_norm", "post_feedforward": "mlp_norm"},
    "both": {
        "input": "attention_norm",
        "post_attention": "attention_out_norm",
        "pre_feedforward": "mlp_norm",
        "post_feedforward": "mlp_out_norm",
    },
}
"""Names of the norms of a layer in checkpoints and here, by `Traits.norms`."""


@dataclass(frozen=True, slots=True)
class Place:
    """The location of a named tensor: rows of a packed tensor, of one expert if any."""

    packed: str
    start: int
    shape: tuple[int, ...]
    expert: int | None = None

    def view(self, packed: Tensor) -> Tensor:
        """Return the rows of the packed tensor that hold this one."""
        target = packed if self.expert is None else packed[self.expert]
        return target[self.start : self.start + self.shape[0]]


@dataclass(frozen=True, slots=True)
class Layer:
    """The packed tensors of one transformer layer.

    The norms of attention and MLP are those of their inputs, or of their outputs where only these
    are normed. Where both are, the outputs have norms of their own.
    """

    attention_norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    attention_out_norm: Tensor | None = None
    mlp_out_norm: Tensor | None = None
    qkv_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    router: Tensor | None = None
    heads: int = 0
    kv_heads: int = 0
    _qk_norm: Tensor | None = field(init=False, default=None, repr=False)

    @property
    def qk_norm(self) -> Tensor | None:
        """q_norm for each query head, followed by k_norm for each key head.

        Built on first use. GPU kernels do not need it, and building one per layer during a weight
        swap would make all requests wait.
        """
        if self._qk_norm is None and self.q_norm is not None and self.k_norm is not None:
            parts = self.q_norm.expand(self.heads, -1), self.k_norm.expand(self.kv_heads, -1)
            object.__setattr__(self, "_qk_norm", torch.cat(parts))
        return self._qk_norm


class Layout:
    """The map from checkpoint names to packed tensors, for one architecture."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.places: dict[str, Place] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        c = config
        self._add(EMBEDDING, "embed", (c.vocab_size, c.hidden))
        self._add("model.norm.weight", "norm", (c.hidden,))
        if not c.tied:
            self._add(HEAD, "head", (c.vocab_size, c.hidden))
        for i in range(c.layers):
            self._add_layer(i)

    def _add(self, name: str, packed: str, shape: tuple[int, ...]) -> None:
        self.shapes[packed] = shape
        self.places[name] = Place(packed, 0, shape)

    def _fuse(self, packed: str, parts: list[tuple[str, int]], *tail: int) -> None:
        start = 0
        for name, rows in parts:
            self.places[name] = Place(packed, start, (rows, *tail))
            start += rows
        self.shapes[packed] = (start, *tail)

    def _add_layer(self, i: int) -> None:
        c, at, to = self.config, f"model.layers.{i}.", f"layers.{i}."
        attn, mlp = at + "self_attn.", at + "mlp."
        for name, packed in NORMS[c.traits.norms].items():
            self._add(f"{at}{name}_layernorm.weight", to + packed, (c.hidden,))
        heads = [("q_proj", c.q_size), ("k_proj", c.kv_size), ("v_proj", c.kv_size)]
        if c.traits.fused:
            heads = [("qkv_proj", c.q_size + 2 * c.kv_size)]
        self._fuse(to + "qkv", [(f"{attn}{n}.weight", rows) for n, rows in heads], c.hidden)
        if c.traits.qkv_bias:
            self._fuse(to + "qkv_bias", [(f"{attn}{n}.bias", rows) for n, rows in heads])
        if kind := c.traits.qk_norm:
            widths = (c.head_dim, c.head_dim) if kind == "head" else (c.q_size, c.kv_size)
            for name, width in zip(("q_norm", "k_norm"), widths, strict=True):
                self._add(f"{attn}{name}.weight", to + name, (width,))
        self._add(attn + "o_proj.weight", to + "out", (c.hidden, c.q_size))
        if i not in c.moe_layers:
            width = c.intermediate
            both = [(mlp + "gate_proj.weight", width), (mlp + "up_proj.weight", width)]
            if c.traits.fused:
                both = [(mlp + "gate_up_proj.weight", 2 * width)]
            self._fuse(to + "gate_up", both, c.hidden)
            self._add(mlp + "down_proj.weight", to + "down", (c.hidden, width))
            return
        width = c.expert_intermediate
        self._add(mlp + "gate.weight", to + "router", (c.experts, c.hidden))
        self.shapes[to + "gate_up"] = (c.experts, 2 * width, c.hidden)
        self.shapes[to + "down"] = (c.experts, c.hidden, width)
        for e in range(c.experts):
            expert = f"{mlp}experts.{e}."
            up, down = (width, c.hidden), (c.hidden, width)
            self.places[expert + "gate_proj.weight"] = Place(to + "gate_up", 0, up, e)
            self.places[expert + "up_proj.weight"] = Place(to + "gate_up", width, up, e)
            self.places[expert + "down_proj.weight"] = Place(to + "down", 0, down, e)

    def check(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Place:
        """Return the place of a named tensor. Raises CheckpointError if it does not fit."""
        place = self.places.get(name)
        if place is None:
            raise CheckpointError(f"tensor {name!r} is not part of this {self.config.family} model")
        if shape != place.shape:
            raise CheckpointError(f"tensor {name!r} has shape {shape}, expected {place.shape}")
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise CheckpointError(f"tensor {name!r} has dtype {dtype}, expected a 16-bit float up")
        return place


@dataclass(frozen=True)
class Weights:
    """One complete set of weights under a version label.

    `epoch` is unique to these contents. Caches use it as a key, never the label, so that two sets
    with the same label cannot be confused. `digests` identify the tensors of the checkpoint by
    name; they are None for weights that were sent in parts.
    """

    layout: Layout
    packed: PackedTensors
    version: str
    epoch: int = field(default_factory=lambda: next(_epochs))
    digests: Mapping[str, str] | None = None
    layers: tuple[Layer, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._lay_out(self.packed)

    def _lay_out(self, packed: PackedTensors) -> None:
        """Use these packed tensors, which hold this set's values, and rebuild the layers."""
        object.__setattr__(self, "packed", packed)
        # The dataclass is frozen, but an exchange of memory must replace its views.
        names = [name for name, f in Layer.__dataclass_fields__.items() if f.init]
        config = self.layout.config
        layers = tuple(
            Layer(
                **{n: packed[key] for n in names if (key := f"layers.{i}.{n}") in packed},
                heads=config.heads,
                kv_heads=config.kv_heads,
            )
            for i in range(config.layers)
        )
        object.__setattr__(self, "layers", layers)

    @property
    def embed(self) -> Tensor:
        return self.packed["embed"]

    @property
    def norm(self) -> Tensor:
        return self.packed["norm"]

    @property
    def head(self) -> Tensor:
        return self.packed["embed" if self.layout.config.tied else "head"]

    @property
    def digest(self) -> str | None:
        """The digest of the contents, equal to that of the checkpoint, or None if unknown."""
        return None if self.digests is None else combined(self.digests)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.packed.values())

    @classmethod
    def load(
        cls, directory: Path, layout: Layout, version: str, *, device: str, dtype: torch.dtype
    ) -> Weights:
        """Return the checkpoint in `directory`. Raises CheckpointError unless complete and
        fitting."""
        reader = open_checkpoint(directory)
        packed = PackedTensors.empty(layout.shapes, device, dtype, joined=device != "cpu")
        missing = set(layout.places)
        tied_head: Tensor | None = None
        with copier(device, packed.whole) as copies:
            for name in reader.tensors:
                if layout.config.tied and name == HEAD:
                    tied_head = read_tensor(reader, name)
                    copies.read(name, tied_head)
                elif not name.endswith(DERIVED):
                    tensor = read_tensor(reader, name)
                    place = layout.check(name, tuple(tensor.shape), tensor.dtype)
                    copies.fill(name, place.view(packed[place.packed]), tensor)
                    missing.discard(name)
            digests = copies.finish()
        check_names(
            layout.places.keys() - missing, layout.places, str(directory), tied=layout.config.tied
        )
        embed = packed["embed"]
        if tied_head is not None and not torch.equal(tied_head.to(embed.device, dtype), embed):
            raise tied_head_differs(str(directory))
        return cls(layout, packed, version, digests=digests)

    def exchange_memory(self, other: Weights) -> None:
        """Exchange the memory of two sets; both keep their values.

        Captured CUDA graphs, which hold addresses, then compute with the other set.
        """
        mine, theirs = self.packed, other.packed
        mine.exchange(theirs)
        self._lay_out(theirs)
        other._lay_out(mine)

    def with_tensors(self, tensors: Iterable[tuple[str, Tensor]], version: str) -> Weights:
        """Return a new set with the named tensors replaced. Packed neighbours keep their values.

        Raises CheckpointError, and leaves this set unchanged, when a tensor does not fit.
        """
        packed = PackedTensors(self.packed)
        fresh: set[str] = set()
        filled: set[str] = set()
        for source, tensor in tensors:
            tied = self.layout.config.tied and source == HEAD
            name = EMBEDDING if tied else source
            place = self.layout.check(name, tuple(tensor.shape), tensor.dtype)
            if place.packed not in fresh:
                packed[place.packed] = packed[place.packed].clone()
                fresh.add(place.packed)
            target = place.view(packed[place.packed])
            # A tied head and the embedding may both be sent: they share memory and must agree.
            before = target.clone() if name in filled else None
            target.copy_(tensor)
            check_finite(source, target)
            if before is not None and not torch.equal(before, target):
                raise CheckpointError(f"tensor {source!r} came twice, with different contents")
            filled.add(name)
        if not fresh:
            raise CheckpointError("an update without tensors changes nothing: name at least one")
        return Weights(self.layout, packed, version)
