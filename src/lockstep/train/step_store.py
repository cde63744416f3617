"""Publication of a run's steps through an object store, as deltas where that is smaller.

The run directory keeps full checkpoints, from which a run resumes. A delta is made only to be sent.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from lockstep.checkpoint.delta.convert import make_delta
from lockstep.checkpoint.delta.writer import LARGEST
from lockstep.checkpoint.digest import combined
from lockstep.checkpoint.manifest import MANIFEST, Manifest
from lockstep.checkpoint.stores.upload_checkpoint import upload
from lockstep.checkpoint.stores.url import StoreUrl
from lockstep.tokens.errors import CheckpointError, Conflict

DIGITS = 12
"""Digits of the digest in the name of a step."""


@dataclass(frozen=True, slots=True)
class StoredStep:
    """A step in the store: `nbytes` are those of its weights there, of `full_bytes` in full."""

    url: str
    nbytes: int
    full_bytes: int


class StepStore:
    """The steps of one run below a prefix. A name contains the digest of the weights, so that a
    resumed run finds what it had stored, and other weights of the same step are beside it.
    """

    def __init__(self, prefix: str, *, deltas: bool, anchor_every: int) -> None:
        self._prefix = StoreUrl.parse(prefix, "publish.store")
        self._deltas, self._anchor_every = deltas, anchor_every
        self._last: tuple[Path, StoredStep] | None = None
        self._depth = 0

    def put(self, directory: Path) -> StoredStep:
        """Store the checkpoint of a step; return where the workers find it. It may be repeated.

        Raises Unavailable when the store fails.
        """
        if self._last is not None and self._last[0] == directory:
            return self._last[1]
        manifest = Manifest.read(directory)
        if manifest is None or not manifest.tensors:
            raise CheckpointError(f"{directory} has no {MANIFEST} with the digests of its tensors")
        digest = combined(manifest.tensors).rpartition(":")[2]
        url = self._prefix.child(f"{directory.name}-{digest[:DIGITS]}")
        full = sum(
            record.size
            for name, record in manifest.files.items()
            if name.endswith(".safetensors") and name.startswith(("model", "rank-"))
        )
        nbytes = None
        try:
            if self._is_delta_due():
                nbytes = self._put_delta(directory, url)
            if nbytes is None:
                upload(directory, url)
                self._depth = 0
        except Conflict:
            # The same weights in another form, from before a resume: the next step is full.
            self._depth = self._anchor_every
        nbytes = full if nbytes is None else nbytes
        stored = StoredStep(str(url), nbytes, full)
        self._last = directory, stored
        return stored

    def _is_delta_due(self) -> bool:
        last = self._last
        return (
            self._deltas
            and last is not None
            and last[0].is_dir()  # the run directory keeps only the newest
            and self._depth + 1 < self._anchor_every
        )

    def _put_delta(self, directory: Path, url: StoreUrl) -> int | None:
        """Store a delta; return its bytes, or None if a full checkpoint is better."""
        if self._last is None:
            return None
        base, stored = self._last
        delta = directory.with_name(f".{directory.name}.delta")
        shutil.rmtree(delta, ignore_errors=True)
        try:
            summary = make_delta(
                directory, base, delta, base_name=stored.url.rpartition("/")[2],
                depth=self._depth + 1,
            )  # fmt: skip
            if summary.nbytes > LARGEST * summary.full_bytes:
                return None
            upload(delta, url)
        finally:
            shutil.rmtree(delta, ignore_errors=True)
        self._depth += 1
        return summary.nbytes
