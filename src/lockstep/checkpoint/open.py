"""Opening of checkpoint directories.

reader = open_checkpoint(directory)
for name, tensor in reader.tensors.items():
    print(name, tensor.dtype, tensor.shape, len(reader.array(name)))
"""

from __future__ import annotations

from pathlib import Path

from lockstep.checkpoint.manifest import Manifest, check_stable
from lockstep.checkpoint.reader import CheckpointReader
from lockstep.checkpoint.sliced_reader import SlicedReader
from lockstep.checkpoint.whole_reader import WholeReader
from lockstep.tokens.errors import CheckpointError


def open_checkpoint(directory: Path) -> CheckpointReader:
    """Return the reader of a checkpoint directory, from its headers alone.

    Raises CheckpointError for a directory that is incomplete, broken or still being written.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory")
    manifest = Manifest.read(directory)
    check_stable(directory, manifest)
    if manifest is not None and manifest.ranks is not None:
        return SlicedReader.open(directory, manifest)
    return WholeReader.open(directory)
