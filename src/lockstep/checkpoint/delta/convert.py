"""Conversion between full checkpoints and deltas, on disk."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from dataclasses import replace
from pathlib import Path

from lockstep.checkpoint.delta.record import DELTA, PAYLOADS, DeltaLink
from lockstep.checkpoint.delta.writer import DeltaEncoder, base_for, identify, tensors_of
from lockstep.checkpoint.files import sync, write_whole
from lockstep.checkpoint.manifest import (
    INDEX,
    MANIFEST,
    STABLE,
    WEIGHTS,
    WRITTEN,
    FileRecord,
    begin,
    mark_stable,
    write_manifest,
)
from lockstep.checkpoint.open import open_checkpoint
from lockstep.checkpoint.probe import Probe
from lockstep.checkpoint.reader import CheckpointReader
from lockstep.checkpoint.tensor_scan import digests
from lockstep.tokens.operation import DeltaSummary


def make_delta(
    source: Path,
    base: Path,
    target: Path,
    *,
    base_name: str | None = None,
    depth: int | None = None,
) -> DeltaSummary:
    """Write the checkpoint `source` to `target` as a delta from `base`, however large it is.

    `target` and `base` must have the same parent. Where the delta is read, the weights of `base`
    may have another name and be delta `depth - 1` themselves. Raises CheckpointError for tensors
    that differ in name, shape or dtype.
    """
    identity, own_depth = base_for(target, base)
    if base_name is not None:
        identity = replace(identity, directory=base_name)
    depth = own_depth if depth is None else depth
    reader, base_reader = open_checkpoint(source), open_checkpoint(base)
    begin(target)
    encoder = DeltaEncoder(base_reader, largest=1.0)
    encoder.add(tensors_of(reader))
    probe = Probe.beside(source)
    version = source.name if probe is None or probe.version is None else probe.version
    encoder.write(target, identify(identity, base_reader), depth, version)
    _copy_others(source, target)
    write_manifest(target, encoder.digests)
    mark_stable(target)
    return DeltaLink.read(target).summary


def write_full(source: Path, target: Path) -> int:
    """Write any checkpoint as a full one of a single file; return its bytes.

    Raises CheckpointError for one that is broken, naming the link, slice or tensor.
    """
    reader = open_checkpoint(source)
    contents = digests(reader)
    begin(target)
    written = _write_weights(reader, target / WEIGHTS)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in reader.tensors.values())},
        "weight_map": dict.fromkeys(sorted(reader.tensors), WEIGHTS),
    }
    write_whole(target / INDEX, json.dumps(index, indent=1).encode())
    _copy_others(source, target)
    write_manifest(target, contents, {WEIGHTS: written})
    mark_stable(target)
    return written.size


def _write_weights(reader: CheckpointReader, path: Path) -> FileRecord:
    header, at = {}, 0
    for name, tensor in reader.tensors.items():
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    hashed = hashlib.sha256()
    with open(path, "wb") as file:

        def add(data: bytes | memoryview) -> None:
            hashed.update(data)
            file.write(data)

        add(struct.pack("<Q", len(text)))
        add(text)
        for name in reader.tensors:
            for part in reader.parts(name):
                add(part)
    sync(path)
    return FileRecord(len(text) + 8 + at, hashed.hexdigest())


def _copy_others(source: Path, target: Path) -> None:
    """Copy what belongs to a checkpoint besides its weights: config, tokenizer, probe."""
    weights = {path.name for pattern in WRITTEN for path in source.glob(pattern)}
    weights |= {INDEX, MANIFEST, STABLE, DELTA, PAYLOADS}
    for path in source.iterdir():
        if path.is_file() and path.name not in weights and path.name[0] != ".":
            shutil.copyfile(path, target / path.name)
