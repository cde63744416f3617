"""Checkpoints as objects in Ray's object store, and their files on other nodes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from lockstep.checkpoint.files import sync
from lockstep.checkpoint.manifest import Manifest, check_stable
from lockstep.tokens.errors import CheckpointError

CHUNK_BYTES = 256 << 20
LOCK = ".lock"


@dataclass(frozen=True, slots=True)
class ObjectFile:
    """One file: its parts in Ray's object store, and its SHA-256."""

    name: str
    sha256: str
    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ObjectCheckpoint:
    """A checkpoint directory in Ray's object store. Its name includes a digest of its contents."""

    name: str
    files: tuple[ObjectFile, ...]

    @classmethod
    def put(cls, directory: Path) -> ObjectCheckpoint:
        """Put the files of a checkpoint into the object store.

        Raises CheckpointError for one that is incomplete or does not match its manifest.
        """
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is not a directory: expected a checkpoint")
        manifest = Manifest.read(directory)
        check_stable(directory, manifest)
        if manifest is not None:
            manifest.check(directory)
        paths = sorted(path for path in directory.iterdir() if path.is_file())
        files = tuple(_put_file(path) for path in paths if path.name[0] != ".")
        if not files:
            raise CheckpointError(f"{directory} is empty: expected a checkpoint")
        for file in files:
            record = None if manifest is None else manifest.files.get(file.name)
            if record is not None and record.sha256 != file.sha256:
                raise CheckpointError(
                    f"{directory / file.name} has SHA-256 {file.sha256}, but its manifest says "
                    f"{record.sha256}"
                )
        digest = hashlib.sha256("".join(f"{f.name}\0{f.sha256}\n" for f in files).encode())
        return cls(f"{directory.name}-{digest.hexdigest()[:16]}", files)

    def write(self, root: Path) -> Path:
        """Write the directory under `root` atomically and return it.

        Processes of one node may call it concurrently: one writes, the others check the files.
        Raises CheckpointError when the files are not those that were put.
        """
        place = root / self.name
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root):
            if place.exists():
                self._check(place)
                return place
            temporary = root / f".{self.name}.tmp"
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            try:
                for file in self.files:
                    _write_file(file, temporary / file.name)
                sync(temporary)
                os.rename(temporary, place)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            sync(root)
        return place

    def _check(self, place: Path) -> None:
        for file in self.files:
            try:
                with open(place / file.name, "rb") as content:
                    actual = hashlib.file_digest(content, "sha256").hexdigest()
            except OSError as error:
                raise CheckpointError(f"{place / file.name} cannot be read: {error}") from None
            if actual != file.sha256:
                raise CheckpointError(
                    f"{place / file.name} has SHA-256 {actual}, but {file.sha256} was put: "
                    "delete the directory"
                )


def remove_others(root: Path, name: str | None) -> None:
    """Delete all checkpoint directories under `root` except `name`."""
    with _locked(root):
        for path in root.iterdir():
            if path.is_dir() and path.name != name:
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Hold the lock of `root` against other processes of this node."""
    with open(root / LOCK, "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _put_file(path: Path) -> ObjectFile:
    digest, parts = hashlib.sha256(), []
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            parts.append(ray.put(chunk))
    return ObjectFile(path.name, digest.hexdigest(), tuple(parts))


def _write_file(file: ObjectFile, path: Path) -> None:
    digest = hashlib.sha256()
    with open(path, "wb") as target:
        for part in file.parts:  # one by one: a checkpoint may not fit into memory
            chunk = ray.get(part)
            digest.update(chunk)
            target.write(chunk)
        target.flush()
        os.fsync(target.fileno())
    if digest.hexdigest() != file.sha256:
        raise CheckpointError(
            f"{path.name} arrived with SHA-256 {digest.hexdigest()}, but {file.sha256} was put"
        )
