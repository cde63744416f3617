"""Saving of a model as a delta: only what changed since its base is written."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from lockstep.checkpoint.delta.writer import DeltaEncoder, NewTensor, base_for, identify
from lockstep.checkpoint.manifest import INDEX
from lockstep.checkpoint.open import open_checkpoint
from lockstep.checkpoint.reader import TensorShape
from lockstep.engine.weights.save import type_name
from lockstep.tokens.errors import CheckpointError

log = logging.getLogger(__name__)


class DeltaFiles:
    """Takes the tensors that `save_pretrained` would write, and encodes them against a base."""

    def __init__(self, directory: Path, base: Path) -> None:
        """Raises CheckpointError for a base that cannot be read, or is not beside `directory`."""
        self._directory = directory
        identity, self.depth = base_for(directory, base)
        reader = open_checkpoint(base)
        self._base = identify(identity, reader)
        self._encoder = DeltaEncoder(reader)

    @property
    def tensors(self) -> Mapping[str, str]:
        """Digests of the tensors after the change."""
        return self._encoder.digests

    def save_file(
        self,
        tensors: Mapping[str, Tensor],
        filename: str | os.PathLike[str],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Encode the tensors of one file; nothing is written yet."""
        if self._encoder.is_worthwhile:
            self._encoder.add(_new_tensors(tensors))

    def write(self, version: str | None) -> bool:
        """Write the delta; return False, and write nothing, if a full checkpoint is better."""
        if not self._encoder.is_worthwhile or not self._encoder.tensors:
            return False
        (self._directory / INDEX).unlink(missing_ok=True)  # it names files that were not written
        self._encoder.write(self._directory, self._base, self.depth, version)
        return True


def delta_files(directory: Path, base: Path | None, anchor_every: int) -> DeltaFiles | None:
    """Return what writes the delta, or None where a full checkpoint is due.

    A base whose chain is broken is logged, and a full checkpoint starts a new chain.
    """
    if base is None:
        return None
    try:
        files = DeltaFiles(directory, base)
    except CheckpointError as error:
        if base.resolve().parent != directory.resolve().parent:
            raise
        log.warning("saving a full checkpoint, because the base is broken: %s", error.message)
        return None
    return files if files.depth < anchor_every else None


def _new_tensors(tensors: Mapping[str, Tensor]) -> Iterator[NewTensor]:
    for name, tensor in tensors.items():
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        shape = TensorShape(tuple(tensor.shape), type_name(name, tensor.dtype))
        yield NewTensor(name, shape, flat.view(torch.uint8).numpy())
