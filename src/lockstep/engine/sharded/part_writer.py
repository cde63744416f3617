"""Writing of one rank's parts: files of bounded size, and the record that describes them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from time import perf_counter

import torch

from lockstep.checkpoint.manifest import FileRecord
from lockstep.checkpoint.reader import TensorShape
from lockstep.checkpoint.slices import RankRecord, Slice, weights_file
from lockstep.engine.sharded.parts import Part
from lockstep.engine.sharded.ranks import Ranks
from lockstep.engine.weights.digest import NAMES
from lockstep.engine.weights.save import SavedFiles, saved_dtype

FILE_BYTES = 256 << 20
"""Bytes after which a file is written: what an iterator yields is held in memory until then."""


def write_parts(
    parts: Iterable[Part],
    directory: Path,
    ranks: Ranks,
    *,
    attempt: str,
    version: str | None,
    dtype: torch.dtype | None,
) -> RankRecord:
    """Write the parts that this rank owns, floats as `dtype`; return the record, which is not
    written yet.
    """
    started = perf_counter()
    files: dict[str, FileRecord] = {}
    slices: list[Slice] = []
    batch: dict[str, Part] = {}
    nbytes = 0

    def flush() -> None:
        nonlocal nbytes
        if not batch:
            return
        name = weights_file(ranks.rank, len(files))
        saved = SavedFiles()
        tensors = {part.name: part.tensor for part in batch.values()}
        saved.save_file(tensors, directory / name, dtype=dtype)
        files.update(saved.files)
        slices.extend(_slice(part, name, saved.tensors[part.name], dtype)
                      for part in batch.values())  # fmt: skip
        batch.clear()
        nbytes = 0

    for part in parts:
        own = part.own()
        if own is None:
            continue
        if own.name in batch:  # a file has one slice of each tensor
            flush()
        batch[own.name] = own
        nbytes += own.tensor.numel() * saved_dtype(own.tensor, dtype).itemsize
        if nbytes >= FILE_BYTES:
            flush()
    flush()
    return RankRecord(
        rank=ranks.rank, ranks=ranks.count, attempt=attempt, version=version, files=files,
        slices=tuple(slices), seconds=perf_counter() - started,
    )  # fmt: skip


def _slice(part: Part, file: str, digest: str, dtype: torch.dtype | None) -> Slice:
    whole = TensorShape(part.shard.shape, NAMES[saved_dtype(part.tensor, dtype)])
    return Slice(
        part.name, whole, tuple(part.shard.offsets), tuple(part.tensor.shape), file, digest
    )
