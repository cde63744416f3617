"""Download of one object to a file: in pieces, several at once, continued after an interruption."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator, Iterable
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint.manifest import FileRecord
from lockstep.checkpoint.stores.object_store import NoRanges, ObjectStore
from lockstep.tokens.errors import CheckpointError

PIECE = 8 << 20
"""Bytes of one request."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a checkpoint in a store, and what its manifest says of it."""

    store: ObjectStore
    key: str
    record: FileRecord

    @property
    def place(self) -> str:
        return str(self.store.url.child(self.key))


def download(file: RemoteFile, target: Path, threads: Executor) -> None:
    """Write an object to `target`, which may hold pieces of an earlier attempt, and check it.

    Raises CheckpointError, and leaves nothing to continue from, unless it has the size and the
    SHA-256 of its record. Raises Unavailable when the store fails: a later call continues.
    """
    size = file.store.size(file.key)
    if size != file.record.size:
        raise CheckpointError(
            f"{file.place} has {size} bytes, but the manifest beside it says {file.record.size}: "
            "it was cut or replaced; publish the checkpoint again"
        )
    done = target.with_name(target.name + ".pieces")
    continued = done.exists() and done.stat().st_size > 0
    if (digest := _attempt(file, target, done, threads)) == file.record.sha256:
        return
    # The pieces of the earlier attempt may be of another object of that name.
    if continued and (digest := _attempt(file, target, done, threads)) == file.record.sha256:
        return
    raise CheckpointError(
        f"{file.place} has SHA-256 {digest}, but the manifest beside it says {file.record.sha256}: "
        "it was replaced or damaged; publish the checkpoint again"
    )


def _attempt(file: RemoteFile, target: Path, done: Path, threads: Executor) -> str:
    """Return the SHA-256 of the file once all pieces are there; pieces that are done are kept.

    Unless it is right, no piece is left.
    """
    handle = os.open(target, os.O_RDWR | os.O_CREAT, 0o600)
    marks = os.open(done, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            with closing(_fetch_pieces(file, handle, marks, threads)) as pieces:
                digest = _hash_pieces(pieces, handle)
        except NoRanges:
            os.ftruncate(marks, 0)
            digest = _stream(file, handle)
        if digest != file.record.sha256:
            os.ftruncate(marks, 0)
            os.ftruncate(handle, 0)
        return digest
    finally:
        os.close(handle)
        os.close(marks)


def _fetch_pieces(
    file: RemoteFile, handle: int, marks: int, threads: Executor
) -> Generator[tuple[int, int], None, None]:
    """Yield start and end of each piece, in order, once it is in the file."""
    size = file.record.size
    pieces = [(start, min(start + PIECE, size)) for start in range(0, size, PIECE)]
    held = os.pread(marks, len(pieces), 0).ljust(len(pieces), b"\0")

    def fetch(index: int) -> None:
        start, end = pieces[index]
        data = file.store.read(file.key, start, end)
        _write(handle, data, start)
        os.pwrite(marks, b"\1", index)

    futures = [
        None if held[index] else threads.submit(fetch, index) for index in range(len(pieces))
    ]
    try:
        for piece, future in zip(pieces, futures, strict=True):
            if future is not None:
                future.result()
            yield piece
    finally:
        # Threads must not write to the file once it is closed.
        for future in futures:
            if future is not None and not future.cancel():
                future.exception()


def _hash_pieces(pieces: Iterable[tuple[int, int]], handle: int) -> str:
    hashed = hashlib.sha256()
    for start, end in pieces:
        hashed.update(os.pread(handle, end - start, start))
    return hashed.hexdigest()


def _stream(file: RemoteFile, handle: int) -> str:
    """Write a whole object, from a server that knows no ranges."""
    hashed, at = hashlib.sha256(), 0
    for data in file.store.stream(file.key, PIECE):
        if at + len(data) > file.record.size:
            break  # a longer object than the record says has another hash
        _write(handle, data, at)
        hashed.update(data)
        at += len(data)
    return hashed.hexdigest()


def _write(handle: int, data: memoryview, at: int) -> None:
    while data:
        count = os.pwrite(handle, data, at)
        data, at = data[count:], at + count
