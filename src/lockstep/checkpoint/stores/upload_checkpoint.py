"""Upload of a checkpoint directory to a store: files, then the manifest, then STABLE."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from lockstep.checkpoint.files import file_size
from lockstep.checkpoint.manifest import MANIFEST, STABLE, Manifest, check_stable
from lockstep.checkpoint.stores.object_store import ObjectStore
from lockstep.checkpoint.stores.remote import RemoteCheckpoint
from lockstep.checkpoint.stores.url import StoreUrl, location
from lockstep.tokens.errors import BadRequest, CheckpointError, Conflict, MissingObject

FILES_AT_ONCE = 4
OnFile = Callable[[int], object]
"""Called with the size of each file that was stored."""


@dataclass(frozen=True, slots=True)
class Uploaded:
    """A checkpoint that is in a store: `nbytes` were sent for it in `seconds`."""

    url: StoreUrl
    nbytes: int
    seconds: float


def upload(directory: Path, url: str | StoreUrl, on_file: OnFile | None = None) -> Uploaded:
    """Store a checkpoint directory under a URL; return once it is complete there.

    Readers reject it until STABLE, which is stored last. An upload that was interrupted can be
    repeated, one that is complete does nothing. The base of a delta must be beside it in the store.
    Raises CheckpointError for a directory that is not complete or has no manifest, Conflict for a
    URL that holds another checkpoint, and Unavailable when the store fails.
    """
    started = perf_counter()
    target = location(str(url), "url") if not isinstance(url, StoreUrl) else url
    if not isinstance(target, StoreUrl) or not target.key:
        raise BadRequest(f"url is {str(url)!r}: expected s3://BUCKET/PREFIX", param="url")
    manifest = Manifest.read(directory)
    check_stable(directory, manifest)
    if manifest is None:
        raise CheckpointError(
            f"{directory} has no {MANIFEST}, by which readers check what they fetched: save it "
            "with probe.save_checkpoint or sharded.save_checkpoint"
        )
    manifest.check(directory)
    store = ObjectStore(target)
    text = (directory / MANIFEST).read_bytes()
    if _is_stored(store, target, text):
        return Uploaded(target, 0, perf_counter() - started)

    def put(name: str) -> None:
        store.write(target.child(name).key, directory / name)
        if on_file is not None:
            on_file(manifest.files[name].size)

    with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="upload") as threads:
        list(threads.map(put, manifest.files))
    store.write(target.child(MANIFEST).key, text)
    store.write(target.child(STABLE).key, b"")
    size = sum(file_size(directory / name) for name in manifest.files) + len(text)
    return Uploaded(target, size, perf_counter() - started)


def _is_stored(store: ObjectStore, url: StoreUrl, text: bytes) -> bool:
    try:
        stored = RemoteCheckpoint.read(store, url)
    except MissingObject:
        return False
    if stored.text != text:
        raise Conflict(
            f"{url} holds another checkpoint already: write each to a new prefix", param="url"
        )
    return True
