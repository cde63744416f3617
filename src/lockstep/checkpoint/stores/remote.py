"""A checkpoint in a store as its small files describe it, and the chain of a delta."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint.delta.record import DELTA, MOST_LINKS, Base, DeltaRecord, is_delta
from lockstep.checkpoint.digest import combined
from lockstep.checkpoint.files import LARGEST_JSON, parse_object
from lockstep.checkpoint.manifest import MANIFEST, STABLE, FileRecord, Manifest
from lockstep.checkpoint.stores.download import RemoteFile
from lockstep.checkpoint.stores.object_store import ObjectStore
from lockstep.checkpoint.stores.url import StoreUrl
from lockstep.tokens.errors import CheckpointError, MissingObject

SHA256 = re.compile(r"[0-9a-f]{64}")
OpenFile = Callable[[RemoteFile], Path]
"""Returns a local copy of a small file, checked."""


@dataclass(frozen=True, slots=True)
class RemoteCheckpoint:
    """A complete checkpoint in a store; `text` are the bytes of its manifest."""

    store: ObjectStore
    url: StoreUrl
    text: bytes
    manifest: Manifest

    @classmethod
    def read(cls, store: ObjectStore, url: StoreUrl) -> RemoteCheckpoint:
        """Read the manifest. Raises CheckpointError unless the upload was finished, which STABLE
        says, and for a manifest that is broken."""
        place = str(url.child(MANIFEST))
        key = url.child(MANIFEST).key
        try:
            store.size(url.child(STABLE).key)
            size = store.size(key)
        except MissingObject as error:
            raise MissingObject(
                f"{error.message}: no checkpoint is there, or its upload has not finished; "
                "`lockstep checkpoints upload` writes it last"
            ) from None
        if size > LARGEST_JSON:
            raise CheckpointError(f"{place} has {size} bytes: not a manifest")
        text = _whole(store, key, size)
        manifest = Manifest.parse(parse_object(text, place), place)
        for name, record in manifest.files.items():
            _check_file(name, record, place)
        return cls(store, url, text, manifest)

    def file(self, name: str) -> RemoteFile:
        return RemoteFile(self.store, self.url.child(name).key, self.manifest.files[name])

    @property
    def identity(self) -> str:
        """Digest of the manifest, and with it of all files."""
        return hashlib.sha256(self.text).hexdigest()


def remote_chain(
    checkpoint: RemoteCheckpoint, open_file: OpenFile, live: str | None = None
) -> list[RemoteCheckpoint]:
    """Return what reading a checkpoint needs, itself first and the full one of its chain last.

    A delta on the weights `live`, which the caller has, needs nothing else. A base that is missing,
    unfinished or holds other weights is replaced by a full checkpoint beside it with the same
    weights. Without one, CheckpointError names the link.
    """
    chain = [checkpoint]
    records: list[DeltaRecord] = []
    while is_delta(chain[-1].manifest):
        link = chain[-1]
        record = DeltaRecord.read(open_file(link.file(DELTA)))
        records.append(record)
        if len(chain) == 1 and record.base.digest == live:
            break
        if len(chain) > MOST_LINKS or (len(records) > 1 and record.depth != records[-2].depth - 1):
            raise CheckpointError(
                f"{link.url} is delta {record.depth} since the last full checkpoint, expected "
                f"{records[0].depth - len(records) + 1}: the chain is a cycle, or links were "
                "swapped"
            )
        try:
            chain.append(_read_base(link, record.base))
        except CheckpointError as error:
            if (twin := _full_twin(checkpoint, records)) is None:
                raise CheckpointError(
                    f"{checkpoint.url} cannot be read: its link {link.url.name!r} is based on "
                    f"{record.base.directory!r}, but {error.message}. No full checkpoint beside it "
                    "holds the same weights: restore that one, or publish a full checkpoint"
                ) from None
            at, full = twin
            return [*chain[: at + 1], full]
    return chain


def _read_base(link: RemoteCheckpoint, base: Base) -> RemoteCheckpoint:
    checkpoint = RemoteCheckpoint.read(link.store, link.url.parent.child(base.directory))
    manifest = checkpoint.manifest
    digest = combined(manifest.tensors) if manifest.tensors else ""
    same = digest == base.digest if digest else checkpoint.identity == base.manifest
    if not same:
        raise CheckpointError(
            f"{checkpoint.url} holds weights {digest or 'without digests'}, expected "
            f"{base.digest}: it is not the base, or links were swapped"
        )
    return checkpoint


def _full_twin(
    checkpoint: RemoteCheckpoint, records: list[DeltaRecord]
) -> tuple[int, RemoteCheckpoint] | None:
    """Return a full checkpoint beside it that holds the base of one of the records, and which; the
    base of the newest record that has one."""
    parent = checkpoint.url.parent
    full: dict[str, RemoteCheckpoint] = {}
    for name in checkpoint.store.directories(parent):
        with suppress(CheckpointError):
            other = RemoteCheckpoint.read(checkpoint.store, parent.child(name))
            if other.manifest.tensors and not is_delta(other.manifest):
                full[combined(other.manifest.tensors)] = other
    for at, record in enumerate(records):
        if record.base.digest in full:
            return at, full[record.base.digest]
    return None


def _whole(store: ObjectStore, key: str, size: int) -> bytes:
    """Return a small object."""
    text = b"".join(map(bytes, store.stream(key, max(size, 1))))
    if len(text) != size:
        raise CheckpointError(f"{store.url.child(key)} was replaced while it was read: try again")
    return text


def _check_file(name: str, record: FileRecord, place: str) -> None:
    if name in (MANIFEST, STABLE) or name[:1] in ("", ".") or "\0" in name:
        raise CheckpointError(f"{place} lists {name!r}, which is not a file of a checkpoint")
    if not SHA256.fullmatch(record.sha256) or record.size < 0:
        raise CheckpointError(
            f"{place} gives size {record.size} and sha256 {record.sha256!r:.80} of {name!r}"
        )
