"""Slices of tensors that the ranks of a trainer wrote, and the rules that make them a whole.

Every rank writes its slices to safetensors files of its own, `rank-00001-00000.safetensors` and so
on, and describes them in `rank-00001.json`. The manifest names the number of ranks and the attempt.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import msgspec

from lockstep.checkpoint.files import LARGEST_JSON, file_size, write_whole
from lockstep.checkpoint.manifest import FileRecord, check_beside
from lockstep.checkpoint.reader import TensorShape
from lockstep.checkpoint.safetensors_file import SIZES
from lockstep.tokens.errors import CheckpointError

FORMAT = "lockstep-slices-1"
Count = Annotated[int, msgspec.Meta(ge=0)]
Box = tuple[tuple[int, int], ...]
"""The range [start, end) in each dimension."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of a tensor, written by one rank into `file` under the name of the tensor.

    `digest` is that of `digest.tensor_digest` over dtype, `sizes` and the bytes of the slice.
    """

    tensor: str
    whole: TensorShape
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    digest: str

    @property
    def box(self) -> Box:
        return tuple((at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True))

    @property
    def count(self) -> int:
        """Number of values."""
        return math.prod(self.sizes)

    @property
    def nbytes(self) -> int:
        return self.count * SIZES[self.whole.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """The files and slices of one rank.

    All ranks of a checkpoint have the same `attempt` and `version`. `attempt` is a random value of
    one call that saves: it tells a rank that still writes for an earlier call, or another step.
    """

    rank: int
    ranks: int
    attempt: str
    version: str | None
    files: Mapping[str, FileRecord]
    slices: tuple[Slice, ...]
    seconds: float = 0.0

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.slices)

    def write(self, directory: Path) -> None:
        """Write the record of the rank; its files must be complete and on disk."""
        tensors: dict[str, _TensorJson] = {}
        for part in self.slices:
            tensor = _TensorJson(part.whole.dtype, part.whole.shape, [])
            tensors.setdefault(part.tensor, tensor).slices.append(
                _SliceJson(part.offsets, part.sizes, part.file, part.digest)
            )
        files = {name: _FileJson(file.size, file.sha256) for name, file in self.files.items()}
        body = _RecordJson(
            FORMAT, self.rank, self.ranks, self.attempt, self.version, round(self.seconds, 6),
            files, tensors,
        )  # fmt: skip
        write_whole(directory / rank_file(self.rank), msgspec.json.encode(body))

    @classmethod
    def read(cls, path: Path) -> RankRecord:
        """Return the record in a file. Raises CheckpointError that names a broken field."""
        if file_size(path) > LARGEST_JSON:
            raise CheckpointError(f"{path} has more than {LARGEST_JSON} bytes: not a record")
        try:
            raw = _DECODER.decode(path.read_bytes())
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} is not the record of a rank: {error}") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        if raw.format != FORMAT:
            raise CheckpointError(f"{path} has format {raw.format!r}, expected {FORMAT!r}")
        files = {name: FileRecord(file.size, file.sha256) for name, file in raw.files.items()}
        for name in files:
            check_beside(name, path)
        slices = tuple(
            part
            for name, tensor in raw.tensors.items()
            for part in _slices(name, tensor, files, path)
        )
        return cls(
            rank=raw.rank, ranks=raw.ranks, attempt=raw.attempt, version=raw.version,
            seconds=raw.seconds, files=MappingProxyType(files), slices=slices,
        )  # fmt: skip


class _FileJson(msgspec.Struct):
    size: Count
    sha256: str


class _SliceJson(msgspec.Struct):
    offsets: tuple[Count, ...]
    sizes: tuple[Count, ...]
    file: str
    digest: str


class _TensorJson(msgspec.Struct):
    dtype: str
    shape: tuple[Count, ...]
    slices: list[_SliceJson]


class _RecordJson(msgspec.Struct):
    format: str
    rank: Count
    ranks: Count
    attempt: str
    version: str | None
    seconds: float
    files: dict[str, _FileJson]
    tensors: dict[str, _TensorJson]


# Typed decoding: a large model has thousands of slices on each of hundreds of ranks.
_DECODER = msgspec.json.Decoder(_RecordJson)


def rank_file(rank: int) -> str:
    """Return the name of the record of a rank."""
    return f"rank-{rank:05d}.json"


def weights_file(rank: int, number: int) -> str:
    """Return the name of a file with slices of a rank."""
    return f"rank-{rank:05d}-{number:05d}.safetensors"


def assemble(records: Sequence[RankRecord], where: str) -> dict[str, list[tuple[int, Slice]]]:
    """Return the slices of every tensor, each with its rank, in the order of their offsets.

    Raises CheckpointError that names rank, tensor and slice unless the records belong to one
    checkpoint and every value of every tensor is in exactly one slice. `where` names it in errors.
    """
    first = records[0]
    for at, record in enumerate(records):
        if record.rank != at or record.ranks != len(records):
            raise CheckpointError(
                f"{where}: {rank_file(at)} is of rank {record.rank} of {record.ranks}, expected "
                f"rank {at} of {len(records)}"
            )
        if record.version != first.version:
            raise CheckpointError(
                f"{where}: rank {at} wrote version {record.version!r}, but rank 0 wrote "
                f"{first.version!r}: all ranks must save the same step"
            )
        if record.attempt != first.attempt:
            raise CheckpointError(
                f"{where}: rank {at} wrote its slices in another attempt to save "
                f"({record.attempt}) than rank 0 ({first.attempt}): write the checkpoint anew"
            )
    tensors: defaultdict[str, list[tuple[int, Slice]]] = defaultdict(list)
    for record in records:
        for part in record.slices:
            tensors[part.tensor].append((record.rank, part))
    for name, parts in tensors.items():
        parts.sort(key=lambda item: (item[1].offsets, item[1].count, item[0]))
        _check_tensor(name, parts, where)
    return dict(tensors)


def _check_tensor(name: str, parts: Sequence[tuple[int, Slice]], where: str) -> None:
    """Raise CheckpointError unless the slices are disjoint and cover the tensor."""
    rank, first = parts[0]
    for other, part in parts:
        if part.whole != first.whole:
            raise CheckpointError(
                f"{where}: tensor {name!r} is {part.whole} on rank {other}, but {first.whole} on "
                f"rank {rank}"
            )
    boxes = [(owner, part.box) for owner, part in parts]
    for at, (owner, box) in enumerate(boxes):
        for other, next_box in boxes[at + 1 :]:
            if box and next_box[0][0] >= box[0][1]:
                break  # sorted: no later slice starts before this one ends
            if _overlap(box, next_box):
                raise CheckpointError(
                    f"{where}: slice {box_text(next_box)} of tensor {name!r} was written by rank "
                    f"{other}, and overlaps {box_text(box)} of rank {owner}"
                )
    total = math.prod(first.whole.shape)
    if missing := total - sum(part.count for _, part in parts):
        raise CheckpointError(
            f"{where}: {missing} of the {total} values of tensor {name!r} are in no slice"
            f"{_gap(first.whole, boxes)}: {_owners(boxes)}"
        )


def _overlap(a: Box, b: Box) -> bool:
    return all(
        max(first[0], second[0]) < min(first[1], second[1])
        for first, second in zip(a, b, strict=True)
    )


def _gap(whole: TensorShape, boxes: Iterable[tuple[int, Box]]) -> str:
    """Describe the first rows that no slice covers, if there are such rows."""
    end = 0
    for _, box in boxes:
        if box and box[0][0] > end:
            return f", the first are rows {end} to {box[0][0] - 1}"
        end = max(end, box[0][1]) if box else end
    if whole.shape and end < whole.shape[0]:
        return f", the first are rows {end} to {whole.shape[0] - 1}"
    return ""


def _owners(boxes: Sequence[tuple[int, Box]]) -> str:
    listed = ", ".join(f"rank {rank} wrote {box_text(box)}" for rank, box in boxes[:4])
    return listed + (f" and {len(boxes) - 4} more slices exist" if len(boxes) > 4 else "")


def box_text(box: Box) -> str:
    """Return a box as in Python: [0:4, 0:16]."""
    return "[" + ", ".join(f"{start}:{end}" for start, end in box) + "]"


def _slices(
    name: str, raw: _TensorJson, files: Mapping[str, FileRecord], path: Path
) -> Iterator[Slice]:
    if raw.dtype not in SIZES:
        raise CheckpointError(f"tensor {name!r} of {path} has unknown dtype {raw.dtype!r}")
    whole = TensorShape(raw.shape, raw.dtype)
    for part in raw.slices:
        ends = tuple(map(operator.add, part.offsets, part.sizes))
        same = len(part.offsets) == len(part.sizes) == len(raw.shape)
        if not same or any(map(operator.gt, ends, raw.shape)):
            raise CheckpointError(
                f"tensor {name!r} of {path} has shape {list(raw.shape)}, but a slice with offsets "
                f"{list(part.offsets)} and sizes {list(part.sizes)}, which is not inside it"
            )
        if part.file not in files:
            raise CheckpointError(
                f"tensor {name!r} of {path} has a slice in {part.file!r}, not a file of the rank"
            )
        yield Slice(name, whole, part.offsets, part.sizes, part.file, part.digest)
