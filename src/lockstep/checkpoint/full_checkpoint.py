"""Opening of checkpoints that hold all of their tensors: whole ones, and those in slices."""

from __future__ import annotations

from pathlib import Path

from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.sliced_reader import SlicedReader
from lockstep.checkpoint.whole_reader import WholeReader


def open_full(directory: Path, manifest: Manifest | None) -> WholeReader | SlicedReader:
    """Return the reader of a stable checkpoint that is no delta. Raises CheckpointError."""
    if manifest is not None and manifest.ranks is not None:
        return SlicedReader.open(directory, manifest)
    return WholeReader.open(directory)
