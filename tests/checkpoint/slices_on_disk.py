"""Checkpoints in slices of many ranks, written in plain numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lockstep.checkpoint import safetensors_file
from lockstep.checkpoint.digest import tensor_digest
from lockstep.checkpoint.manifest import FileRecord, sha256_of
from lockstep.checkpoint.reader import TensorShape
from lockstep.checkpoint.sliced_writer import begin_attempt, finish
from lockstep.checkpoint.slices import Box, RankRecord, Slice, weights_file
from tests.checkpoint.weights_on_disk import configure

Cuts = Mapping[str, Sequence[Box]]
"""The boxes of each tensor that one rank writes."""
DTYPES = {"<f4": "F32", "<f8": "F64", "<i8": "I64"}


def write(
    directory: Path, arrays: Mapping[str, np.ndarray], ranks: Sequence[Cuts], *, version: str = "7"
) -> Path:
    """A stable checkpoint, `ranks[r]` are the boxes of rank r."""
    attempt = begin_attempt(directory)
    configure(directory, tied=True)
    for rank, cuts in enumerate(ranks):
        record_of(directory, arrays, cuts, rank, len(ranks), attempt, version).write(directory)
    finish(directory, len(ranks), attempt, seconds=0)
    return directory


def record_of(
    directory: Path,
    arrays: Mapping[str, np.ndarray],
    cuts: Cuts,
    rank: int,
    ranks: int,
    attempt: str,
    version: str = "7",
) -> RankRecord:
    """Writes the files of a rank and returns its record."""
    slices: list[Slice] = []
    files: dict[str, FileRecord] = {}
    most = max((len(boxes) for boxes in cuts.values()), default=0)
    for number in range(most):
        file, parts = weights_file(rank, number), {}
        for name, boxes in cuts.items():
            if number >= len(boxes):
                continue
            where = tuple(slice(start, end) for start, end in boxes[number])
            part = parts[name] = np.asarray(arrays[name][where], order="C")
            dtype = DTYPES[arrays[name].dtype.str]
            slices.append(
                Slice(
                    name,
                    TensorShape(arrays[name].shape, dtype),
                    tuple(start for start, _ in boxes[number]),
                    part.shape,
                    file,
                    tensor_digest(dtype, part.shape, [part.tobytes()]),
                )
            )
        safetensors_file.write(directory / file, parts)
        path = directory / file
        files[file] = FileRecord(path.stat().st_size, sha256_of(path))
    return RankRecord(
        rank=rank, ranks=ranks, attempt=attempt, version=version, files=files, slices=tuple(slices)
    )


def rows_of(arrays: Mapping[str, np.ndarray], ranks: int) -> list[dict[str, list[Box]]]:
    """Cuts dimension 0 as torch.chunk does: the last ranks have fewer rows, or none."""
    cuts: list[dict[str, list[Box]]] = [{} for _ in range(ranks)]
    for name, array in arrays.items():
        step = -(-array.shape[0] // ranks)
        for rank in range(ranks):
            start, end = rank * step, min((rank + 1) * step, array.shape[0])
            if start < end:
                rest = tuple((0, size) for size in array.shape[1:])
                cuts[rank][name] = [((start, end), *rest)]
    return cuts
