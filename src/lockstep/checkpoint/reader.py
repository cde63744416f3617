"""Interface of the readers of checkpoint directories, one for each form of checkpoint.

The embedded engine, the extension of vLLM and validation read through this interface, so a new form
of checkpoint needs one more reader in `open.py` and no change of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lockstep.checkpoint.safetensors_file import SIZES

Bytes = npt.NDArray[np.uint8]
CHUNK = 256 << 10
"""Bytes per piece: small enough to stay in the CPU's cache between the passes over them."""
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class TensorShape:
    """Shape and dtype of one tensor; `dtype` is safetensors' name."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]

    @property
    def kind(self) -> str:
        """Kind of dtype; dtypes of one kind are interchangeable because workers choose their
        precision.
        """
        return "float" if self.dtype in FLOATS else self.dtype

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class CheckpointReader(Protocol):
    """The tensors of one checkpoint directory. Any thread may call any method."""

    @property
    def directory(self) -> Path: ...

    @property
    def tensors(self) -> Mapping[str, TensorShape]:
        """Every tensor by name, in the order in which reading them is fastest."""
        ...

    @property
    def files(self) -> tuple[Path, ...]:
        """The weight files of this directory that are read."""
        ...

    def where(self, name: str) -> str:
        """Return what holds a tensor, for errors: usually the name of its file."""
        ...

    def parts(self, name: str) -> Iterator[memoryview]:
        """Yield the bytes of a tensor in order, in pieces of at most CHUNK bytes.

        A piece is valid until the next one is taken and holds whole values. Bytes are read, not
        mapped, so a file that is truncated meanwhile raises CheckpointError.
        """
        ...

    def array(self, name: str) -> Bytes:
        """Return all bytes of a tensor. They may be mapped memory of its file: copy what must
        outlive changes of the file. Raises CheckpointError for bytes that were not written.
        """
        ...
