"""The record of a delta, `delta.json`: its base, and how each tensor changed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

import msgspec

from lockstep.checkpoint.delta.encoding import GAP_BYTES, EncodingName
from lockstep.checkpoint.digest import combined
from lockstep.checkpoint.files import LARGEST_JSON, file_size, write_whole
from lockstep.checkpoint.manifest import MANIFEST, Manifest, check_beside, check_stable, sha256_of
from lockstep.checkpoint.reader import TensorShape
from lockstep.checkpoint.safetensors_file import SIZES, TensorEntry, TensorFile
from lockstep.tokens.errors import CheckpointError
from lockstep.tokens.operation import DeltaSummary

DELTA = "delta.json"
PAYLOADS = "delta.safetensors"
FORMAT = "lockstep-delta-1"
MOST_LINKS = 1000
"""Deltas between a checkpoint and the last full one."""
Count = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class Base:
    """The checkpoint that a delta changes: a directory beside it, its label and its weights.

    `manifest` is the SHA-256 of its manifest, for a base whose manifest lists no tensors.
    """

    directory: str
    version: str | None
    digest: str
    manifest: str


@dataclass(frozen=True, slots=True)
class TensorDelta:
    """The change of one tensor; `check` is the XXH3-128 of its bytes after it.

    A worker that knows the digest of its base checks results by `check`: at 10 GB/s a core instead
    of SHA-256's 1.2. The digests in the manifest are of the same bytes.
    """

    tensor: TensorShape
    encoding: EncodingName
    changed: int
    gap_bytes: int
    check: str

    @property
    def count(self) -> int:
        """Number of values of the tensor."""
        return math.prod(self.tensor.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRecord:
    """A delta from `base` to `version`; `depth` counts the deltas since the last full checkpoint,
    this one included. `digest` is the combined digest of the resulting weights.
    """

    base: Base
    version: str | None
    digest: str
    depth: int
    tensors: Mapping[str, TensorDelta]
    seconds: float = 0.0

    @property
    def changed(self) -> int:
        return sum(delta.changed for delta in self.tensors.values())

    @property
    def count(self) -> int:
        """Number of values of all tensors."""
        return sum(delta.count for delta in self.tensors.values())

    @property
    def full_bytes(self) -> int:
        """Bytes of the tensors of a full checkpoint."""
        return sum(delta.tensor.nbytes for delta in self.tensors.values())

    @property
    def encodings(self) -> dict[str, int]:
        """Number of tensors by encoding."""
        return dict(Counter(delta.encoding for delta in self.tensors.values()))

    def write(self, directory: Path) -> None:
        tensors = {
            name: _TensorJson(
                delta.tensor.dtype, delta.tensor.shape, delta.encoding, delta.check,
                delta.changed, delta.gap_bytes,
            )
            for name, delta in self.tensors.items()
        }  # fmt: skip
        base = _BaseJson(
            self.base.directory, self.base.version, self.base.digest, self.base.manifest
        )
        body = _RecordJson(
            FORMAT, base, self.version, self.digest, self.depth, round(self.seconds, 6), tensors
        )
        write_whole(directory / DELTA, msgspec.json.encode(body))

    @classmethod
    def read(cls, path: Path) -> DeltaRecord:
        """Return the record in a file. Raises CheckpointError that names a broken field."""
        if file_size(path) > LARGEST_JSON:
            raise CheckpointError(f"{path} has more than {LARGEST_JSON} bytes: not a delta")
        try:
            raw = _DECODER.decode(path.read_bytes())
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} is not the record of a delta: {error}") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        if raw.format != FORMAT:
            raise CheckpointError(f"{path} has format {raw.format!r}, expected {FORMAT!r}")
        check_beside(raw.base.directory, path)
        if not 1 <= raw.depth <= MOST_LINKS:
            raise CheckpointError(f"{path} has depth {raw.depth}: expected 1 to {MOST_LINKS}")
        tensors = {name: _tensor(name, tensor, path) for name, tensor in raw.tensors.items()}
        base = Base(raw.base.directory, raw.base.version, raw.base.digest, raw.base.manifest)
        return cls(
            base=base, version=raw.version, digest=raw.digest, depth=raw.depth,
            tensors=MappingProxyType(tensors), seconds=raw.seconds,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeltaLink:
    """One delta of a chain: its record, the places of its payloads, the digests of its results."""

    directory: Path
    record: DeltaRecord
    payloads: Path
    entries: Mapping[str, TensorEntry]
    digests: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all payloads."""
        return sum(entry.end - entry.start for entry in self.entries.values())

    @property
    def summary(self) -> DeltaSummary:
        record = self.record
        return DeltaSummary(
            base=record.base.directory, depth=record.depth, nbytes=self.nbytes,
            full_bytes=record.full_bytes, changed=record.changed, values=record.count,
            encodings=record.encodings,
        )  # fmt: skip

    @classmethod
    def read(cls, directory: Path) -> DeltaLink:
        """Read the headers of a delta. Raises CheckpointError unless it is complete and agrees with
        its manifest."""
        manifest = Manifest.read(directory)
        check_stable(directory, manifest)
        if manifest is None or not is_delta(manifest):
            raise CheckpointError(f"{directory} is not a delta: {MANIFEST} lists no {DELTA}")
        path, listed = directory / DELTA, manifest.files[DELTA]
        # Everything else is checked by what the record says, so it is always verified.
        if (file_size(path), sha256_of(path)) != (listed.size, listed.sha256):
            raise CheckpointError(f"{path} is not the file that {MANIFEST} lists")
        record = DeltaRecord.read(path)
        if manifest.tensors.keys() != record.tensors.keys():
            raise CheckpointError(f"{path} and {MANIFEST} beside it list different tensors")
        if combined(manifest.tensors) != record.digest:
            raise CheckpointError(
                f"{path} has digest {record.digest!r}, but the tensors that {MANIFEST} lists have "
                f"{combined(manifest.tensors)!r}"
            )
        payloads = directory / PAYLOADS
        if not payloads.exists():
            raise CheckpointError(f"{payloads} does not exist: the delta is not complete")
        entries = {entry.name: entry for entry in TensorFile.read(payloads).entries}
        for name in record.tensors.keys() | entries.keys():
            _check_payload(name, record.tensors.get(name), name in entries, payloads)
        return cls(directory, record, payloads, MappingProxyType(entries), manifest.tensors)


class _BaseJson(msgspec.Struct):
    directory: str
    version: str | None
    digest: str
    manifest: str


class _TensorJson(msgspec.Struct):
    dtype: str
    shape: tuple[Count, ...]
    encoding: Literal["same", "sparse", "xor", "full"]
    check: str
    changed: Count
    gap_bytes: Count = 0


class _RecordJson(msgspec.Struct):
    format: str
    base: _BaseJson
    version: str | None
    digest: str
    depth: int
    seconds: float
    tensors: dict[str, _TensorJson]


_DECODER = msgspec.json.Decoder(_RecordJson)


def is_delta(manifest: Manifest) -> bool:
    """Return whether this is the manifest of a delta."""
    return DELTA in manifest.files


def read_link(directory: Path) -> DeltaLink | None:
    """Return the delta in a directory, or None for a checkpoint that is no delta."""
    return DeltaLink.read(directory) if (directory / DELTA).exists() else None


def check_of(data: object) -> str:
    """Return the check of bytes in memory: their XXH3-128."""
    import xxhash

    return xxhash.xxh3_128_hexdigest(data)  # type: ignore[arg-type]


def _check_payload(name: str, delta: TensorDelta | None, has: bool, path: Path) -> None:
    if delta is None:
        raise CheckpointError(f"{path} has a payload of {name!r}, which {DELTA} does not list")
    if (delta.encoding != "same") != has:
        wrong = "has a payload, but did not change" if has else "has no payload"
        raise CheckpointError(f"tensor {name!r} of {path} {wrong}")


def _tensor(name: str, raw: _TensorJson, path: Path) -> TensorDelta:
    where = f"tensor {name!r} of {path}"
    if raw.dtype not in SIZES:
        raise CheckpointError(f"{where} has unknown dtype {raw.dtype!r}")
    delta = TensorDelta(
        TensorShape(raw.shape, raw.dtype), raw.encoding, raw.changed, raw.gap_bytes, raw.check
    )
    if raw.changed > delta.count:
        raise CheckpointError(f"{where} says {raw.changed} of {delta.count} values changed")
    if raw.encoding == "sparse" and (raw.gap_bytes not in GAP_BYTES or not raw.changed):
        raise CheckpointError(
            f"{where} has {raw.changed} changes with gaps of {raw.gap_bytes} bytes: expected 1 or "
            f"more changes, and gaps of {', '.join(map(str, GAP_BYTES))} bytes"
        )
    return delta
