"""From a reference to a directory: the one place where a checkpoint comes to this host.

with local_checkpoint("s3://bucket/run/step-17") as fetched:
    reader = open_checkpoint(fetched.directory)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from time import perf_counter

from lockstep.checkpoint.delta.record import DELTA
from lockstep.checkpoint.files import write_whole
from lockstep.checkpoint.manifest import MANIFEST, STABLE
from lockstep.checkpoint.open import resolve_checkpoint
from lockstep.checkpoint.stores.cache import DIRECTORY_VARIABLE, HostCache
from lockstep.checkpoint.stores.download import RemoteFile, download
from lockstep.checkpoint.stores.object_store import CONNECTIONS, ObjectStore
from lockstep.checkpoint.stores.remote import RemoteCheckpoint, remote_chain
from lockstep.checkpoint.stores.url import AllowedRoots, StoreUrl, location
from lockstep.tokens.errors import BadRequest, CheckpointError, Forbidden, LockstepError
from lockstep.tokens.operation import FetchSummary

FILES_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Fetched:
    """A checkpoint on this host. `root` contains its chain.

    `nbytes` were downloaded for it, of `total` bytes that are needed: the cache had the others.
    `is_remote` is False for a directory, `is_complete` for a delta without its chain.
    """

    directory: Path
    root: Path
    nbytes: int = 0
    total: int = 0
    seconds: float = 0.0
    is_remote: bool = False
    is_complete: bool = True

    @property
    def summary(self) -> FetchSummary:
        return FetchSummary(self.nbytes, self.total, round(self.seconds, 6))


@contextmanager
def local_checkpoint(
    reference: str,
    roots: AllowedRoots | None = None,
    field: str = "weight_dir",
    *,
    live: str | None = None,
    cache: HostCache | None = None,
) -> Iterator[Fetched]:
    """Yield the directory of a checkpoint: a path, a file:// URL, or a URL of a store.

    What is in a store is fetched into the cache of this host, each file checked against the
    manifest, and stays there within the block. `live` is the digest of weights that the caller has:
    a delta on them is fetched without its chain. Raises BadRequest for a reference that is none,
    Forbidden for one outside `roots`, CheckpointError for one that is incomplete or broken, and
    Unavailable when the store fails.
    """
    allowed = roots or AllowedRoots()
    where = location(reference, field)
    if isinstance(where, Path):
        directory = resolve_checkpoint(str(where), allowed.directories, field)
        yield Fetched(directory, directory)
        return
    check_prefix(where, allowed, field)
    with ExitStack() as stack:
        try:
            held = fetched_checkpoint(where, cache or HostCache.of_host(), live)
            fetched = stack.enter_context(held)
        except OSError as error:
            raise CheckpointError(
                f"{where} cannot be kept in the cache of this host: {error.filename or ''} "
                f"{error.strerror}; {DIRECTORY_VARIABLE} names another directory"
            ) from None
        try:
            yield fetched
        except LockstepError as error:
            # Its user knows the checkpoint by its URL.
            text = error.message.replace(str(fetched.root), str(where.parent).rstrip("/"))
            raise error.with_message(text) from None


def check_prefix(url: StoreUrl, roots: AllowedRoots, field: str) -> None:
    """Raise BadRequest for a bucket without a prefix, Forbidden for a URL outside the roots."""
    if not url.key:
        raise BadRequest(f"{field} is {url}: expected {url}PREFIX, a checkpoint in the bucket",
                         param=field)  # fmt: skip
    if not roots.contain(str(url)):
        listed = ", ".join(map(str, roots.prefixes or ())) or "there are none in stores"
        raise Forbidden(
            f"{field} is {url}, outside the allowed roots ({listed}): move it or add a checkpoint "
            "root",
            param=field,
        )


@contextmanager
def fetched_checkpoint(
    url: StoreUrl, cache: HostCache, live: str | None = None
) -> Iterator[Fetched]:
    """Fetch a checkpoint with its chain, and keep it in the cache within the block."""
    started = perf_counter()
    store = ObjectStore(url)
    with (
        ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="fetch") as requests,
        ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="fetch-file") as files,
    ):
        assembly = _Assembly(cache, requests, files)
        chain = remote_chain(RemoteCheckpoint.read(store, url), assembly.open, live)
        key = hashlib.sha256()
        for part in chain:
            key.update(f"{part.url.name}\0{part.identity}\n".encode())
        records = [record for part in chain for record in part.manifest.files.values()]
        view = cache.view(key.hexdigest(), records, lambda at: assembly.make(at, chain))
        fetched = Fetched(
            Path(), Path(), total=sum(record.size for record in records),
            is_remote=True, is_complete=len(chain) > 1 or DELTA not in chain[0].manifest.files,
        )  # fmt: skip
        with view as root:
            yield replace(
                fetched, directory=root / url.name, root=root, nbytes=assembly.nbytes,
                seconds=perf_counter() - started,
            )  # fmt: skip


class _Assembly:
    """Brings the files of checkpoints to a directory; counts the bytes that are downloaded."""

    def __init__(
        self, cache: HostCache, requests: ThreadPoolExecutor, files: ThreadPoolExecutor
    ) -> None:
        self._cache, self._requests, self._files = cache, requests, files
        self._lock = Lock()
        self.nbytes = 0

    def open(self, file: RemoteFile) -> Path:
        """Return a file in the cache, which may be removed from there when room is needed."""
        path, downloaded = self._cache.object(file.record, lambda path: self._fill(file, path))
        self._count(file, downloaded)
        return path

    def make(self, root: Path, chain: list[RemoteCheckpoint]) -> None:
        """Write the directories of a chain below `root`."""
        links = []
        for part in chain:
            directory = root / part.url.name
            directory.mkdir()
            links += [
                self._files.submit(self._link, part.file(name), directory / name)
                for name in part.manifest.files
            ]
        # The directory is removed after an error: no thread may still write to it.
        _, pending = wait(links, return_when=FIRST_EXCEPTION)
        for link in pending:
            link.cancel()
        wait(links)
        for link in links:
            if not link.cancelled():
                link.result()
        for part in chain:
            write_whole(root / part.url.name / MANIFEST, part.text)
            write_whole(root / part.url.name / STABLE, b"")

    def _link(self, file: RemoteFile, target: Path) -> None:
        downloaded = self._cache.link(file.record, target, lambda path: self._fill(file, path))
        self._count(file, downloaded)

    def _fill(self, file: RemoteFile, path: Path) -> None:
        download(file, path, self._requests)

    def _count(self, file: RemoteFile, downloaded: bool) -> None:
        if downloaded:
            with self._lock:
                self.nbytes += file.record.size
