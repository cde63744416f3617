"""Writing of deltas: the payloads of one checkpoint against its base."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import perf_counter

import numpy as np

from lockstep.checkpoint.delta.chain import base_of
from lockstep.checkpoint.delta.encoding import Encoded, encode
from lockstep.checkpoint.delta.record import PAYLOADS, Base, DeltaRecord, TensorDelta, check_of
from lockstep.checkpoint.digest import combined, tensor_digest
from lockstep.checkpoint.files import write_whole
from lockstep.checkpoint.reader import Bytes, CheckpointReader, TensorShape
from lockstep.checkpoint.tensor_scan import THREADS, digests
from lockstep.tokens.errors import CheckpointError

ANCHOR_EVERY = 20
"""A checkpoint is full if so many deltas have followed the last full one."""
LARGEST = 0.5
"""A delta with more than this part of the bytes of a full checkpoint is not worth its chain."""


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor of the new checkpoint: its name, shape, and the bytes of its values."""

    name: str
    tensor: TensorShape
    data: Bytes


class DeltaEncoder:
    """Encodes the tensors of one checkpoint against a base, in threads.

    The delta is worthwhile while it has at most `largest` of the bytes of the base.
    """

    def __init__(self, base: CheckpointReader, largest: float = LARGEST) -> None:
        self._base = base
        self._most = largest * sum(tensor.nbytes for tensor in base.tensors.values())
        self._started = perf_counter()
        self.tensors: dict[str, TensorDelta] = {}
        self.digests: dict[str, str] = {}
        self._payloads: dict[str, bytes | Bytes] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all payloads so far."""
        return sum(map(len, self._payloads.values()))

    @property
    def is_worthwhile(self) -> bool:
        """Return whether the payloads are small enough so far."""
        return self.nbytes <= self._most

    def add(self, tensors: Iterable[NewTensor]) -> None:
        """Encode tensors; stop early if the delta is not worthwhile any more.

        Raises CheckpointError for one that the base has not, or with another shape or dtype.
        """
        source = iter(tensors)
        with ThreadPoolExecutor(THREADS, thread_name_prefix="delta") as pool:
            # A few at a time: each takes memory for both of its versions.
            while batch := list(islice(source, THREADS * 2)):
                for new, encoded, digest, check in pool.map(self._encode, batch):
                    self.tensors[new.name] = TensorDelta(
                        new.tensor, encoded.encoding, encoded.changed, encoded.gap_bytes, check
                    )
                    self.digests[new.name] = digest
                    if encoded.encoding != "same":
                        self._payloads[new.name] = encoded.payload
                if not self.is_worthwhile:
                    return

    def write(self, directory: Path, base: Base, depth: int, version: str | None) -> DeltaRecord:
        """Write the payloads and the record. Raises CheckpointError if a tensor is missing."""
        if missing := sorted(self._base.tensors.keys() - self.tensors.keys()):
            raise CheckpointError(
                f"tensor {missing[0]!r} of the base {self._base.directory} is not in the new "
                "checkpoint: a delta needs all of them; publish a full checkpoint"
            )
        _write_payloads(directory / PAYLOADS, self._payloads)
        record = DeltaRecord(
            base=base, version=version, digest=combined(self.digests), depth=depth,
            tensors=self.tensors, seconds=perf_counter() - self._started,
        )  # fmt: skip
        record.write(directory)
        return record

    def _encode(self, new: NewTensor) -> tuple[NewTensor, Encoded, str, str]:
        before = self._base.tensors.get(new.name)
        if before != new.tensor:
            raise CheckpointError(
                f"tensor {new.name!r} is {new.tensor}, but {before or 'missing'} in the base "
                f"{self._base.directory}: a delta changes values, not shapes; publish a full "
                "checkpoint"
            )
        encoded = encode(self._base.array(new.name), new.data, new.tensor.dtype)
        digest = tensor_digest(new.tensor.dtype, new.tensor.shape, [new.data.data])
        return new, encoded, digest, check_of(new.data)


def base_for(directory: Path, base: Path) -> tuple[Base, int]:
    """Return the identity of a base for a delta in `directory`, and the depth of that delta.

    Raises CheckpointError unless the base is a stable checkpoint beside it.
    """
    if base.resolve().parent != directory.resolve().parent:
        raise CheckpointError(
            f"{base} cannot be the base of {directory}: a delta is read with the directories "
            "beside it, so both need the same parent"
        )
    identity, depth = base_of(base)
    return identity, depth + 1


def identify(base: Base, reader: CheckpointReader) -> Base:
    """Return the base with a digest, computed from its tensors if its manifest lists none."""
    if base.digest:
        return base
    return Base(base.directory, base.version, combined(digests(reader)), base.manifest)


def tensors_of(reader: CheckpointReader) -> Iterable[NewTensor]:
    """Yield the tensors of a checkpoint."""
    for name, tensor in reader.tensors.items():
        yield NewTensor(name, tensor, reader.array(name))


def _write_payloads(path: Path, payloads: dict[str, bytes | Bytes]) -> None:
    """Write a safetensors file with one tensor of bytes for each payload."""
    header, at = {}, 0
    for name, payload in payloads.items():
        header[name] = {
            "dtype": "U8",
            "shape": [len(payload)],
            "data_offsets": [at, at + len(payload)],
        }
        at += len(payload)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    parts = [struct.pack("<Q", len(text)), text]
    parts += [p if isinstance(p, bytes) else np.ascontiguousarray(p).tobytes()
              for p in payloads.values()]  # fmt: skip
    write_whole(path, b"".join(parts))
