"""Reader of checkpoints that many ranks wrote: tensors are assembled from their slices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from lockstep.checkpoint.digest import LENGTH, tensor_hash
from lockstep.checkpoint.files import file_size
from lockstep.checkpoint.manifest import MANIFEST, Manifest, sha256_of
from lockstep.checkpoint.reader import CHUNK, Bytes, TensorShape
from lockstep.checkpoint.safetensors_file import SIZES, TensorEntry, TensorFile
from lockstep.checkpoint.slices import RankRecord, Slice, assemble, box_text, rank_file
from lockstep.checkpoint.whole_reader import MappedFiles, read_parts
from lockstep.tokens.errors import CheckpointError


class SlicedReader:
    """A `CheckpointReader`. `records` are those of the ranks, in order."""

    def __init__(self, directory: Path, records: Sequence[RankRecord]) -> None:
        self.directory = directory
        self.records = tuple(records)
        self._slices = assemble(records, str(directory))
        self.tensors: Mapping[str, TensorShape] = {
            name: parts[0][1].whole for name, parts in self._slices.items()
        }
        self._entries = {file: self._header(file, record) for record in records
                         for file in record.files}  # fmt: skip
        names = [rank_file(record.rank) for record in records]
        self.files = tuple(directory / name for name in (*names, *self._entries))
        self._mapped = MappedFiles()

    @classmethod
    def open(cls, directory: Path, manifest: Manifest) -> SlicedReader:
        """Read the records and headers. Raises CheckpointError unless they make a whole."""
        records = []
        for rank in range(manifest.ranks or 0):
            path = directory / rank_file(rank)
            if not path.exists():
                raise CheckpointError(
                    f"{path} does not exist: rank {rank} of {manifest.ranks} has not written its "
                    "slices"
                )
            # Everything else is checked by what the records say, so they are always verified.
            listed = manifest.files.get(path.name)
            if listed is None or (file_size(path), sha256_of(path)) != (listed.size, listed.sha256):
                raise CheckpointError(f"{path} is not the file that {MANIFEST} lists")
            records.append(RankRecord.read(path))
        return cls(directory, records)

    def where(self, name: str) -> str:
        files = list(dict.fromkeys(part.file for _, part in self._slices[name]))
        return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"

    def parts(self, name: str) -> Iterator[memoryview]:
        """Yield the bytes of a tensor. Raises CheckpointError for a slice of another digest."""
        slices = self._slices[name]
        if any(part.sizes[1:] != part.whole.shape[1:] for _, part in slices):
            whole = self.array(name).data
            for rank, part in slices:
                path, entry = self._place(part)
                hashed = tensor_hash(part.whole.dtype, part.sizes)
                for piece in read_parts(path, entry.start, entry.end):
                    hashed.update(piece)
                self._check_digest(rank, part, hashed.hexdigest())
            yield from (whole[at : at + CHUNK] for at in range(0, len(whole), CHUNK))
            return
        for rank, part in slices:  # rows one after the other: the file's bytes are the tensor's
            path, entry = self._place(part)
            hashed = tensor_hash(part.whole.dtype, part.sizes)
            for piece in read_parts(path, entry.start, entry.end):
                hashed.update(piece)
                yield piece
            self._check_digest(rank, part, hashed.hexdigest())

    def array(self, name: str) -> Bytes:
        slices = self._slices[name]
        sources = [self._mapped.read(*self._place(part)) for _, part in slices]
        if len(slices) == 1:
            return sources[0]
        tensor = self.tensors[name]
        width = SIZES[tensor.dtype]
        whole = np.empty((*tensor.shape, width), dtype=np.uint8)
        for (_, part), source in zip(slices, sources, strict=True):
            where = tuple(slice(start, end) for start, end in part.box)
            whole[where] = source.reshape(*part.sizes, width)
        return whole.reshape(-1)

    def _place(self, part: Slice) -> tuple[Path, TensorEntry]:
        return self.directory / part.file, self._entries[part.file][part.tensor]

    def _check_digest(self, rank: int, part: Slice, digest: str) -> None:
        if digest[:LENGTH] != part.digest:
            raise CheckpointError(
                f"slice {box_text(part.box)} of tensor {part.tensor!r}, which rank {rank} wrote to "
                f"{self.directory / part.file}, does not hold what was written: write it anew"
            )

    def _header(self, file: str, record: RankRecord) -> dict[str, TensorEntry]:
        """Return the tensors of a file. Raises CheckpointError unless they are the slices."""
        path = self.directory / file
        if not path.exists():
            raise CheckpointError(f"{path} does not exist: the slices of rank {record.rank} are "
                                  "not complete")  # fmt: skip
        entries = {entry.name: entry for entry in TensorFile.read(path).entries}
        slices = [part for part in record.slices if part.file == file]
        for part in slices:
            entry = entries.get(part.tensor)
            if entry is None or (entry.shape, entry.dtype) != (part.sizes, part.whole.dtype):
                held = "nothing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
                raise CheckpointError(
                    f"{path} holds {held} of tensor {part.tensor!r}, but rank {record.rank} says "
                    f"{part.whole.dtype} {list(part.sizes)}"
                )
        if len(slices) != len(entries):
            raise CheckpointError(f"{path} has {len(entries)} tensors, but rank {record.rank} "
                                  f"says {len(slices)}")  # fmt: skip
        return entries
