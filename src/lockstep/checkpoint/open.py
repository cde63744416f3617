"""Opening of checkpoint directories.

reader = open_checkpoint(directory)
for name, tensor in reader.tensors.items():
    print(name, tensor.dtype, tensor.shape, len(reader.array(name)))
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.checkpoint.delta.chain import check_roots, resolve_chain
from lockstep.checkpoint.delta.delta_reader import DeltaReader
from lockstep.checkpoint.delta.record import is_delta, read_link
from lockstep.checkpoint.full_checkpoint import open_full
from lockstep.checkpoint.manifest import Manifest, check_stable
from lockstep.checkpoint.reader import CheckpointReader
from lockstep.checkpoint.sources import resolve
from lockstep.tokens.errors import CheckpointError


def open_checkpoint(directory: Path) -> CheckpointReader:
    """Return the reader of a checkpoint directory, from its headers alone.

    A delta is read together with its chain, which is beside it. Raises CheckpointError for a
    directory that is incomplete, broken or still being written, and for a broken chain.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory")
    manifest = Manifest.read(directory)
    check_stable(directory, manifest)
    if manifest is not None and is_delta(manifest):
        return DeltaReader(resolve_chain(directory))
    return open_full(directory, manifest)


def resolve_checkpoint(path: str, roots: Sequence[Path] | None, field: str = "weight_dir") -> Path:
    """Return the directory that `path` refers to, as `sources.resolve` does.

    If it is a delta, all of its chain must be inside the roots too (else Forbidden).
    """
    directory = resolve(path, roots, field)
    if roots is not None and read_link(directory) is not None:
        check_roots(resolve_chain(directory), roots)
    return directory
