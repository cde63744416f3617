"""The cache of one host for files of checkpoints: each is downloaded once, whichever process asks.

    objects/SHA256      whole files that were checked
    partial/SHA256      a file that is being downloaded, or whose download was interrupted
    views/KEY/NAME/     checkpoints as directories; their files are hard links to objects

A view never changes: its key is the digest of the manifests in it. Processes coordinate by `flock`,
which ends with the process that holds it: a partial file is locked by its downloader, a view by
its readers.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lockstep.checkpoint.manifest import FileRecord
from lockstep.tokens.errors import BadRequest, CheckpointError

DIRECTORY_VARIABLE = "LOCKSTEP_CHECKPOINT_CACHE"
SIZE_VARIABLE = "LOCKSTEP_CHECKPOINT_CACHE_GB"
UNFINISHED = ".new-"
"""Prefix of the names of views that are being made."""
Fill = Callable[[Path], None]


class HostCache:
    """A cache in a directory that only its user can read, of at most `limit` bytes."""

    def __init__(self, directory: Path, limit: int | None = None) -> None:
        """`limit` None: half of the file system."""
        self.directory = directory
        self._objects, self._partial, self._views = (
            directory / name for name in ("objects", "partial", "views")
        )
        for path in (directory, self._objects, self._partial, self._views):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.limit = shutil.disk_usage(directory).total // 2 if limit is None else limit

    @classmethod
    def of_host(cls, environ: Mapping[str, str] = os.environ) -> HostCache:
        """Return the cache that the environment names, by default one in the user's cache
        directory. All processes of a host that share it download a file once.
        """
        size = environ.get(SIZE_VARIABLE)
        try:
            limit = None if size is None else int(float(size) * 1e9)
        except (ValueError, OverflowError):
            raise BadRequest(f"{SIZE_VARIABLE} is {size!r}: expected a number of GB") from None
        home = Path(environ.get("XDG_CACHE_HOME", ""))
        home = home if home.is_absolute() else Path.home() / ".cache"
        directory = Path(environ.get(DIRECTORY_VARIABLE, home / "lockstep" / "checkpoints"))
        return cls(directory.absolute(), limit)

    def object(self, record: FileRecord, fill: Fill) -> tuple[Path, bool]:
        """Return the path of a file, and whether `fill` was called to download it.

        If another process downloads it, wait for it. `fill` gets a path, writes the file and checks
        it; what it has written when it raises is kept for the next attempt. The object can be
        removed at any time: link it.
        """
        path = self._objects / record.sha256
        if path.exists():
            return path, False
        partial = self._partial / record.sha256
        with _locked(partial):
            if path.exists():  # another process was faster
                partial.unlink(missing_ok=True)
                return path, False
            fill(partial)
            partial.chmod(0o400)
            partial.replace(path)
            partial.with_name(partial.name + ".pieces").unlink(missing_ok=True)
        return path, True

    def link(self, record: FileRecord, target: Path, fill: Fill) -> bool:
        """Make `target` a link to a file of the cache; return whether it was downloaded for it."""
        fetched = False
        while True:
            path, downloaded = self.object(record, fill)
            fetched |= downloaded
            try:
                os.link(path, target)
            except FileNotFoundError:
                if not target.parent.is_dir():
                    raise
                continue  # the object was removed in between, to make room
            return fetched

    @contextmanager
    def view(
        self, key: str, records: Collection[FileRecord], make: Callable[[Path], None]
    ) -> Iterator[Path]:
        """Hold the view `key` in the block; `make` fills its directory if there is none.

        `records` are the files it links. Where those that are missing would exceed the limit, views
        without readers are removed first, the least recently used ones. Raises CheckpointError
        where that does not suffice.
        """
        path = self._views / key
        while True:
            with _held(path) as exists:
                if exists:
                    os.utime(path)
                    yield path
                    return
            self._make_view(path, records, make)

    def _make_view(
        self, path: Path, records: Collection[FileRecord], make: Callable[[Path], None]
    ) -> None:
        self._make_room(records)
        new = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=self._views))
        with _held(new) as exists:
            if not exists:  # taken for what a process left that died
                return
            try:
                make(new)
                try:
                    new.rename(path)
                except OSError:
                    if not path.is_dir():  # else another process was faster, with the same view
                        raise
            finally:
                _remove(new)

    def _make_room(self, records: Collection[FileRecord]) -> None:
        with _locked(self.directory / ".lock"):
            for view in self._views.glob(f"{UNFINISHED}*"):
                _try_remove(view)  # what processes that died have left
            for view in self._oldest_views():
                if self._excess(records) <= 0:
                    return
                if _try_remove(view):
                    self._remove_unlinked()
            if self._excess(records) > 0:
                self._remove_unlinked()
            if (excess := self._excess(records)) > 0:
                raise CheckpointError(
                    f"the checkpoint needs {excess} bytes more than the {self.limit} that "
                    f"{self.directory} may hold: raise {SIZE_VARIABLE}"
                )

    def _excess(self, records: Collection[FileRecord]) -> int:
        """Return by how many bytes the cache would exceed its limit."""
        sizes = {record.sha256: record.size for record in records}
        missing = sum(
            size for sha256, size in sizes.items() if not (self._objects / sha256).exists()
        )
        return self._used() + missing - self.limit

    def _used(self) -> int:
        return sum(
            entry.stat().st_size
            for directory in (self._objects, self._partial)
            for entry in os.scandir(directory)
        )

    def _oldest_views(self) -> list[Path]:
        views = [view for view in self._views.iterdir() if not view.name.startswith(UNFINISHED)]
        return sorted(views, key=lambda view: view.stat().st_mtime)

    def _remove_unlinked(self) -> None:
        for entry in os.scandir(self._objects):
            if entry.stat().st_nlink == 1:
                os.unlink(entry.path)
        for partial in self._partial.iterdir():
            if partial.suffix != ".pieces":
                with _locked(partial, wait=False) as is_free:
                    if is_free:
                        partial.with_name(partial.name + ".pieces").unlink(missing_ok=True)
                        partial.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the only lock of a file, which is created if missing; yield whether it is held."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            # Its last holder may have moved or removed the file.
            if _is_at(handle, path):
                yield True
                return
        finally:
            os.close(handle)


@contextmanager
def _held(view: Path) -> Iterator[bool]:
    """Keep a view from being removed; yield False if it was removed before."""
    try:
        handle = os.open(view, os.O_RDONLY)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
        yield _is_at(handle, view)
    finally:
        os.close(handle)


def _try_remove(view: Path) -> bool:
    """Remove a view unless it has readers; return whether it is gone."""
    try:
        handle = os.open(view, os.O_RDONLY)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        _remove(view)
        return True
    finally:
        os.close(handle)


def _remove(view: Path) -> None:
    shutil.rmtree(view, ignore_errors=True)


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
