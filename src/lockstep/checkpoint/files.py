"""Small files of a checkpoint: atomic writes and strict reading of JSON."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lockstep.tokens.errors import CheckpointError

LARGEST_JSON = 256 << 20


class _PutOff(threading.local):
    syncs: PutOffSyncs | None = None


_put_off = _PutOff()


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically: a crash leaves the old contents or the new, never a
    part.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            if _put_off.syncs is None:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if _put_off.syncs is not None:
        _put_off.syncs.add(path)
    sync(path.parent)


class PutOffSyncs:
    """Files whose fsync is deferred: they survive the process, but a power cut only after
    `sync`.
    """

    def __init__(self) -> None:
        self._paths: dict[Path, None] = {}

    def add(self, path: Path) -> None:
        self._paths[path] = None

    def sync(self) -> None:
        """Flush all files that still exist to disk."""
        for path in list(self._paths):
            with suppress(FileNotFoundError):
                sync(path)
            del self._paths[path]


@contextmanager
def put_off_syncs() -> Iterator[PutOffSyncs]:
    """Defer the fsync of files that this thread writes in the block until `sync` is called.

    After a power cut before that, readers must compare the files with their hashes.
    """
    before, _put_off.syncs = _put_off.syncs, PutOffSyncs()
    try:
        yield _put_off.syncs
    finally:
        _put_off.syncs = before


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk."""
    if _put_off.syncs is not None:
        _put_off.syncs.add(path)
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_size(path: Path) -> int:
    """Return the size of a regular file. Raises CheckpointError for others: a pipe would hang."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:  # ValueError: an impossible file name
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file")
    return status.st_size


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises CheckpointError with the reason if there is none."""
    if file_size(path) > LARGEST_JSON:
        raise CheckpointError(
            f"{path} has more than {LARGEST_JSON} bytes: not a JSON file of a checkpoint"
        )
    try:
        return parse_object(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """Parse `data` as a JSON object without duplicate names. Raises CheckpointError naming
    `what`.
    """
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique_names)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not sound JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{what} holds a JSON {type(value).__name__}, expected an object")
    return value


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of a JSON decoder. Raises ValueError for a name that is there twice."""
    unique = dict(pairs)
    if len(unique) != len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{name!r} is there twice")
    return unique
