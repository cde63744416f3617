"""Manifest of a checkpoint, and the markers that say whether it is complete.

A writer calls `begin`, writes, then `write_manifest` and `mark_stable`. If it dies in between,
`.writing` exists or `STABLE` is missing, and readers reject the directory.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lockstep.checkpoint.files import file_size, read_object, sync, write_whole
from lockstep.tokens.errors import CheckpointError, Conflict

MANIFEST = "manifest.json"
STABLE = "STABLE"
WRITING = ".writing"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PROBE = "probe.safetensors"
GENERATION_CONFIG = "generation_config.json"
WRITTEN = (
    "model*.safetensors",
    "rank-*.json",
    "rank-*.safetensors",
    "delta.json",
    "delta.safetensors",
)
"""Patterns of the files with weights."""
FORMAT = "lockstep-manifest-1"
MOST_RANKS = 65_536


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and SHA-256 of one file as written."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Every file of a directory by name, and the digest of every tensor if its writer knew them.

    `ranks` is the number of ranks that wrote slices of the tensors, or None if tensors are whole.
    """

    files: Mapping[str, FileRecord]
    tensors: Mapping[str, str] = field(default_factory=dict)
    ranks: int | None = None

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """Return the manifest, or None if missing. Raises CheckpointError if it is broken."""
        path = directory / MANIFEST
        if not path.exists() and not path.is_symlink():
            return None
        return cls.parse(read_object(path), path)

    @classmethod
    def parse(cls, raw: Mapping[str, Any], path: Path | str) -> Manifest:
        """Return the manifest of a JSON object. Raises CheckpointError, naming `path`, if it is
        broken.
        """
        if raw.get("format") != FORMAT or not isinstance(raw.get("files"), dict):
            raise CheckpointError(f"{path} is not a manifest: expected format {FORMAT!r} and files")
        files = {name: _record(name, file, path) for name, file in raw["files"].items()}
        tensors = raw.get("tensors", {})
        if not isinstance(tensors, dict) or not all(isinstance(d, str) for d in tensors.values()):
            raise CheckpointError(f"{path} has tensors that are no map of names to digests")
        ranks = raw.get("ranks")
        if ranks is not None and (type(ranks) is not int or not 1 <= ranks <= MOST_RANKS):
            raise CheckpointError(f"{path} has ranks {ranks!r}: expected 1 to {MOST_RANKS}")
        return cls(MappingProxyType(files), MappingProxyType(tensors), ranks)

    def check(self, directory: Path, used: Iterable[str] = (), *, hashes: bool = False) -> None:
        """Raise CheckpointError unless the files are those that were written.

        Sizes are always compared, contents only with `hashes`. Every file in `used` must be listed.
        """
        for name in used:
            if name not in self.files:
                raise CheckpointError(
                    f"{directory / name} is not in {MANIFEST}: it was added later, or is not meant "
                    "to be there"
                )
        for name, record in self.files.items():
            path = directory / name
            if (size := file_size(path)) != record.size:
                raise CheckpointError(f"{path} has {size} bytes, but {MANIFEST} says {record.size}")
            if hashes and (actual := sha256_of(path)) != record.sha256:
                raise CheckpointError(
                    f"{path} has SHA-256 {actual}, but {MANIFEST} says {record.sha256}"
                )


def begin(directory: Path) -> None:
    """Prepare the directory for writing; readers reject it until `mark_stable`.

    Remove the files of an interrupted writer. Raises Conflict if a checkpoint exists already,
    because a reader may be using it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    present = [directory / name for name in (STABLE, MANIFEST, PROBE, INDEX)]
    present = [path for path in present if path.exists()] + sorted(
        path for pattern in WRITTEN for path in directory.glob(pattern)
    )
    leftovers = sorted((*directory.glob(".*.tmp"), *directory.glob(".rank-*.failed")))
    unfinished = (directory / MANIFEST).exists() and not (directory / STABLE).exists()
    if present and not (unfinished or (directory / WRITING).exists()):
        raise Conflict(
            f"{directory} holds {present[0].name} already: write each checkpoint to a new directory"
        )
    write_whole(directory / WRITING, b"")
    for path in present + leftovers:
        path.unlink(missing_ok=True)  # writing the marker may have replaced an old one
    sync(directory)


def write_manifest(
    directory: Path,
    tensors: Mapping[str, str] | None = None,
    written: Mapping[str, FileRecord] | None = None,
    ranks: int | None = None,
) -> Manifest:
    """Record size and hash of every file that is not hidden, once all are on disk.

    `tensors` are the digests of the tensors by name, which readers verify. Files in `written`,
    whose hash is known, are not read again. `ranks` is that of `Manifest`.
    """
    files = {}
    for path in sorted(directory.iterdir()):
        if path.is_file() and path.name not in (MANIFEST, STABLE) and path.name[0] != ".":
            sync(path)
            record = (written or {}).get(path.name)
            files[path.name] = record or FileRecord(file_size(path), sha256_of(path))
    listed = {name: {"size": w.size, "sha256": w.sha256} for name, w in files.items()}
    body: dict[str, Any] = {"format": FORMAT, "files": listed}
    body |= {"tensors": dict(tensors)} if tensors else {}
    body |= {"ranks": ranks} if ranks is not None else {}
    write_whole(directory / MANIFEST, json.dumps(body, indent=1).encode())
    return Manifest(MappingProxyType(files), MappingProxyType(dict(tensors or {})), ranks)


def mark_stable(directory: Path) -> None:
    """Mark the checkpoint as complete; the last step of writing one.

    Raises CheckpointError, and marks nothing, if the files do not match the manifest.
    """
    manifest = Manifest.read(directory)
    if manifest is not None:
        manifest.check(directory)
    # In this order: between the two, a manifest without STABLE still means unfinished.
    (directory / WRITING).unlink(missing_ok=True)
    write_whole(directory / STABLE, b"")


def check_stable(directory: Path, manifest: Manifest | None) -> None:
    """Raise CheckpointError for a directory whose writer has not finished, or died.

    A directory without a manifest passes, because other trainers write none.
    """
    if (directory / WRITING).exists():
        raise CheckpointError(
            f"{directory} is being written, {WRITING} is there: wait for {STABLE}, or write it anew"
        )
    if manifest is not None and not (directory / STABLE).exists():
        raise CheckpointError(
            f"{directory} has a {MANIFEST} but no {STABLE}: its writer has not finished, or died"
        )


def check_beside(name: str, path: Path | str) -> None:
    """Raise CheckpointError if the file `path` names a file that is not beside it."""
    if Path(name).name != name or name == "..":
        raise CheckpointError(f"{path} names {name!r}, which is not a file beside it")


def _record(name: str, raw: Any, path: Path | str) -> FileRecord:
    check_beside(name, path)
    size, sha256 = (raw.get("size"), raw.get("sha256")) if isinstance(raw, dict) else (None, None)
    if type(size) is not int or not isinstance(sha256, str):
        raise CheckpointError(f"{path} gives no size and sha256 of {name!r}")
    return FileRecord(size, sha256)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file. Raises CheckpointError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
