"""Reader of checkpoints whose tensors are whole: one safetensors file, or several and an index."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path

import numpy as np

from lockstep.checkpoint.files import read_object
from lockstep.checkpoint.manifest import INDEX, WEIGHTS
from lockstep.checkpoint.reader import CHUNK, Bytes, TensorShape
from lockstep.checkpoint.safetensors_file import TensorEntry, TensorFile
from lockstep.tokens.errors import CheckpointError


class WholeReader:
    """A `CheckpointReader`. Files are mapped into memory when a tensor of theirs is first read."""

    def __init__(self, directory: Path, files: Sequence[TensorFile]) -> None:
        self.directory = directory
        self.files = tuple(file.path for file in files)
        self._places: dict[str, tuple[Path, TensorEntry]] = {}
        self._mapped = MappedFiles()
        for file in files:
            for entry in file.entries:
                if entry.name in self._places:
                    raise CheckpointError(f"tensor {entry.name!r} is in {directory} twice")
                self._places[entry.name] = file.path, entry
        self.tensors: Mapping[str, TensorShape] = {
            name: TensorShape(entry.shape, entry.dtype) for name, (_, entry) in self._places.items()
        }

    @classmethod
    def open(cls, directory: Path) -> WholeReader:
        """Read the headers. Raises CheckpointError unless all files exist and are sound."""
        return cls(directory, weight_files(directory))

    def where(self, name: str) -> str:
        return self._places[name][0].name

    def parts(self, name: str) -> Iterator[memoryview]:
        path, entry = self._places[name]
        yield from read_parts(path, entry.start, entry.end)

    def array(self, name: str) -> Bytes:
        return self._mapped.read(*self._places[name])


class MappedFiles:
    """Files that are mapped into memory when a tensor of theirs is first read."""

    def __init__(self) -> None:
        self._mapped: dict[Path, Bytes] = {}

    def read(self, path: Path, entry: TensorEntry) -> Bytes:
        """Return the bytes of a tensor. Raises CheckpointError for a file that became shorter."""
        if path not in self._mapped:
            self._mapped[path] = map_file(path)
        data = self._mapped[path][entry.start : entry.end]
        if len(data) != entry.end - entry.start:
            raise _became_shorter(path)
        return data


def weight_files(path: Path) -> list[TensorFile]:
    """Return the headers of all weight files. Raises CheckpointError unless all exist."""
    index = path / INDEX
    if not (index.exists() or index.is_symlink()):
        shards = sorted(path.glob("model-*.safetensors"))
        if shards:
            raise CheckpointError(f"{path} has {shards[0].name} but no {INDEX}: not complete")
        return [_header(path / WEIGHTS)]
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{index} has no weight_map")
    for name in places.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index} names {name!r}, which is not a file beside it")
    names = sorted(set(places.values()))
    if WEIGHTS not in names and (path / WEIGHTS).exists():
        raise CheckpointError(
            f"{path} has both {WEIGHTS} and an {INDEX} without it: remove one, as loaders do not "
            "agree on which to take"
        )
    files = [_header(path / name) for name in names]
    held = {entry.name: file.path.name for file in files for entry in file.entries}
    for tensor in sorted(held.keys() | places.keys()):
        if held.get(tensor) != places.get(tensor):
            raise CheckpointError(
                f"tensor {tensor!r} is in {held.get(tensor, 'no file')}, but {index} places it in "
                f"{places.get(tensor, 'none')}"
            )
    return files


def _header(path: Path) -> TensorFile:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist: the checkpoint is not complete")
    return TensorFile.read(path)


def map_file(path: Path) -> Bytes:
    """Return a file as mapped memory. Writing to the array changes this copy only."""
    try:
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    return np.frombuffer(mapped, dtype=np.uint8)


def read_parts(path: Path, start: int, end: int) -> Iterator[memoryview]:
    """Yield bytes [start, end) of a file in pieces of at most CHUNK, all in one buffer.

    Raises CheckpointError for a file that became shorter. A mapped file that is truncated would
    kill the process instead.
    """
    buffer = np.empty(min(CHUNK, max(end - start, 1)), dtype=np.uint8)
    try:
        with open(path, "rb", buffering=0) as source:
            source.seek(start)
            for at in range(start, end, CHUNK):
                piece = buffer[: min(CHUNK, end - at)].data
                _fill(source, piece, path)
                yield piece
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def _fill(source: FileIO, piece: memoryview, path: Path) -> None:
    """Fill the piece: network file systems may return less than requested."""
    at = 0
    while at < len(piece):
        read = source.readinto(piece[at:])
        if not read:
            raise _became_shorter(path)
        at += read


def _became_shorter(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} became shorter while it was read")
