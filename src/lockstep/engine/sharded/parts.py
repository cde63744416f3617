"""The parts of each tensor that one rank holds, and which of them it writes."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lockstep.engine.sharded.ranks import Ranks
from lockstep.engine.weights.published import gather_again
from lockstep.tokens.errors import BadRequest, CheckpointError

SPLIT_BYTES = 1 << 20
"""Tensors that several ranks hold are written by all of them, row by row, from this size on."""
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""Parts of parameter names that come from activation checkpointing and torch.compile."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Where a tensor of one rank is in the whole one: its offsets, and the shape of the whole."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A box of the tensor `name` that this rank holds as `tensor`.

    `copies` ranks hold the same values. This rank is number `copy` of them.
    """

    name: str
    shard: Shard
    tensor: Tensor
    copy: int = 0
    copies: int = 1

    def own(self) -> Part | None:
        """Return what this rank writes: all of it, its share of the rows, or nothing."""
        tensor = self.tensor
        if tensor.numel() == 0:
            return None
        if self.copies == 1:
            return self
        rows = tensor.shape[0] if tensor.dim() else 0
        if tensor.nbytes < SPLIT_BYTES or rows < self.copies:
            # By name, because every rank computes the same owner, whatever else it holds.
            owner = zlib.crc32(self.name.encode()) % self.copies
            return replace(self, copies=1) if self.copy == owner else None
        start, end = (rows * at // self.copies for at in (self.copy, self.copy + 1))
        offsets = (self.shard.offsets[0] + start, *self.shard.offsets[1:])
        shard = Shard(offsets, self.shard.shape)
        return Part(self.name, shard, tensor[start:end])


def parts_of_tensors(
    tensors: Iterable[tuple[str, Shard | None, Tensor]], ranks: Ranks
) -> Iterator[Part]:
    """Yield the parts that an iterator of (name, shard, tensor) describes.

    A shard of None means that the tensor is whole and that every rank has it. Raises BadRequest for
    a tensor that is not inside the whole one.
    """
    for name, shard, tensor in tensors:
        if shard is None:
            whole = Shard((0,) * tensor.dim(), tuple(tensor.shape))
            yield Part(name, whole, tensor, ranks.rank, ranks.count)
            continue
        where = f"tensor {name!r} of rank {ranks.rank}"
        if not len(shard.offsets) == len(shard.shape) == tensor.dim():
            raise BadRequest(
                f"{where} has {tensor.dim()} dimensions, but its shard has offsets "
                f"{list(shard.offsets)} in shape {list(shard.shape)}"
            )
        for start, size, total in zip(shard.offsets, tensor.shape, shard.shape, strict=True):
            if start < 0 or start + size > total:
                raise BadRequest(
                    f"{where} has shape {list(tensor.shape)} at offsets {list(shard.offsets)}, "
                    f"which is not inside {list(shard.shape)}"
                )
        yield Part(name, shard, tensor)


class ModelParts:
    """The parts of a model's tensors under their names in a checkpoint.

    Parameters may be DTensors (FSDP2, also with replicas) or plain tensors, which every rank holds
    whole (DDP). `gathers` says whether some must be gathered from the ranks, one at a time: fused
    weights whose pieces have names of their own in a checkpoint, and placements in which the rows
    of a rank are not one box. Then all ranks must iterate at the same time. Raises CheckpointError
    for adapters.
    """

    def __init__(self, model: Any, ranks: Ranks) -> None:
        if getattr(model, "peft_config", None):
            raise CheckpointError(
                "the model has adapters: merge them before it is sharded, or save the adapter "
                "from one rank with lockstep.probe.save_adapter"
            )
        self._model, self._ranks = model, ranks
        gather_again(model)  # parameters that are gathered now are not slices
        buffers = dict(model.named_buffers())
        # Without duplicates: a tied head is the embedding, and checkpoints name it once.
        self._tensors: dict[str, Tensor] = dict(model.named_parameters())
        self._tensors |= {name: buffers[name] for name in model.state_dict() if name in buffers}
        self._names = {name: self._saved_name(name) for name in self._tensors}
        self.gathers = any(
            self._names[name] is None or _must_gather(tensor)
            for name, tensor in self._tensors.items()
        )

    def __iter__(self) -> Iterator[Part]:
        for name, tensor in self._tensors.items():
            saved = self._names[name]
            if saved is not None and not _must_gather(tensor):
                yield self._part(saved, tensor.detach())
                continue
            whole: Any = tensor.detach()
            whole = whole.full_tensor() if _is_distributed(whole) else whole
            for piece, value in _revert(self._model, {_plain_name(name): whole}).items():
                shard = Shard((0,) * value.dim(), tuple(value.shape))
                yield Part(piece, shard, value, self._ranks.rank, self._ranks.count)

    def _part(self, name: str, tensor: Any) -> Part:
        if not _is_distributed(tensor):
            shard = Shard((0,) * tensor.dim(), tuple(tensor.shape))
            return Part(name, shard, tensor, self._ranks.rank, self._ranks.count)
        (chunk,) = tensor.__create_chunk_list__()
        copy, copies = 0, 1
        mesh = tensor.device_mesh
        for axis, (placement, at) in enumerate(
            zip(tensor.placements, mesh.get_coordinate(), strict=True)
        ):
            if placement.is_replicate():
                copy, copies = copy * mesh.size(axis) + at, copies * mesh.size(axis)
        shard = Shard(tuple(chunk.offsets), tuple(tensor.shape))
        return Part(name, shard, tensor.to_local(), copy, copies)

    def _saved_name(self, name: str) -> str | None:
        """Return the name in a checkpoint, or None if the tensor is saved in several pieces."""
        tensor = self._tensors[name]
        shape = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        reverted = _revert(self._model, {_plain_name(name): shape})
        saved = next(iter(reverted))
        return saved if len(reverted) == 1 and reverted[saved] is shape else None


def _revert(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Undo what transformers did to names and tensors while it loaded the model."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return tensors
    if not hasattr(model, "config"):
        return tensors
    reverted: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return reverted


def _plain_name(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _is_distributed(tensor: Tensor) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _must_gather(tensor: Any) -> bool:
    """Whether the local values of a DTensor are not one box of the whole tensor."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as DimensionShard

    # Exact types: a strided shard, of FSDP over tensor parallelism, is a subclass.
    return _is_distributed(tensor) and any(
        type(placement) not in (DimensionShard, Replicate) for placement in tensor.placements
    )
