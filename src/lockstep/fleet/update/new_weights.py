"""The new weights of an update, read and checked once for all workers."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep import tracing
from lockstep.backends.admin import Source
from lockstep.checkpoint.stores.fetch import local_checkpoint
from lockstep.checkpoint.stores.url import AllowedRoots, StoreUrl, location
from lockstep.checkpoint.validate import Checkpoint, ModelSignature
from lockstep.fleet.update.proof import Proof, reference_of
from lockstep.storage.desired_state import Desired
from lockstep.tokens.errors import BadRequest, Conflict, LockstepError
from lockstep.tokens.operation import DeltaSummary, FetchSummary, RequiredProof
from lockstep.tokens.versions import MAX_LABEL

DIGITS = 12
"""Digits of a digest that are added to a label which names other weights already."""


@dataclass(frozen=True, slots=True)
class NewWeights:
    """The weights to load, their label, and how to prove them.

    `path`, `digest`, `nbytes` and `delta` are those of a checkpoint. If it `is_served` already,
    there is nothing to do.
    """

    version: str
    source: Source
    proof: Proof
    path: str | None = None
    digest: str | None = None
    warnings: tuple[str, ...] = ()
    is_served: bool = False
    nbytes: int | None = None
    delta: DeltaSummary | None = None
    fetched: FetchSummary | None = None


class WeightReader:
    """Reads the weights that an update names. `model_dir` holds the initial weights, if known."""

    def __init__(
        self, roots: AllowedRoots, model_dir: Path | None, require: RequiredProof = "any"
    ) -> None:
        self._roots = roots
        self._require: RequiredProof = require
        self._model_dir = model_dir
        self._signature: ModelSignature | None = None
        self._first: str | None = None

    async def read(
        self,
        weight_dir: str | None,
        source: Source | None,
        version: str,
        desired: Desired,
        *,
        served: bool = True,
        strict: bool = True,
    ) -> NewWeights:
        """Return the new weights. With `served`, they may be served under that label already.

        A label names contents. A label that names other weights is a Conflict when it is `strict`,
        because the trainer chose it. Otherwise the digest is added to it, since directories of two
        runs often have the same name. Raises what is wrong with a checkpoint.
        """
        if weight_dir is None:
            if source is None:
                raise BadRequest("weight_dir is missing: name the checkpoint", param="weight_dir")
            if version in desired.agreed:
                raise _label_conflict(version)
            return NewWeights(version, source, Proof(require=self._require))
        with ExitStack() as stack:
            if (tracer := tracing.active) is not None:
                stack.enter_context(tracer.span("update validate", {"lockstep.version": version}))
            place, checkpoint, fetched = await asyncio.to_thread(
                self._validate, weight_dir, await self._served_signature(desired)
            )
        warnings = checkpoint.warnings
        if version in desired.agreed and desired.digests.get(version) != checkpoint.digest:
            if strict:
                raise _label_conflict(version)
            taken, version = version, content_label(version, checkpoint.digest)
            note = f"version {taken!r} names other weights here: these are {version!r}"
            warnings = (*warnings, note)
        now = await self._served_digest(desired)
        proof = Proof(
            reference_of(checkpoint.probe),
            tensors=checkpoint.tensors,
            same=checkpoint.digest == now,
            require=self._require,
        )
        return NewWeights(
            version,
            Source(directory=place),
            proof,
            str(place),
            checkpoint.digest,
            warnings,
            is_served=served and version == desired.version,
            nbytes=checkpoint.nbytes,
            delta=checkpoint.delta,
            fetched=fetched,
        )

    def _validate(
        self, weight_dir: str, like: ModelSignature | None
    ) -> tuple[Path | StoreUrl, Checkpoint, FetchSummary | None]:
        """Return where the workers find the checkpoint, what it holds, and what fetching took."""
        with local_checkpoint(weight_dir, self._roots) as local:
            place = location(weight_dir)
            if not isinstance(place, StoreUrl):
                roots = self._roots.directories
                roots = (Path("/"),) if roots is None else roots
                return (
                    local.directory,
                    Checkpoint.validate(local.directory, like, roots=roots),
                    None,
                )
            checkpoint = Checkpoint.validate(local.directory, like, roots=(local.root,))
            return place, checkpoint, local.summary

    async def _served_signature(self, desired: Desired) -> ModelSignature | None:
        """Return names and shapes of the served model's weights, where known."""
        where = self._model_dir or desired.checkpoint
        if self._signature is None and where is not None:
            with suppress(LockstepError):  # the workers themselves check too
                self._signature = await asyncio.to_thread(_signature_of, str(where))
        return self._signature

    async def _served_digest(self, desired: Desired) -> str | None:
        """Return the digest of the served weights, where known."""
        if len(desired.agreed) == 1 and self._first is None and self._model_dir is not None:
            here = self._model_dir.resolve()
            with suppress(LockstepError):
                first = await asyncio.to_thread(Checkpoint.validate, here, roots=(here,))
                self._first = first.digest
        if len(desired.agreed) == 1 and desired.checkpoint is None:
            return self._first
        return desired.digests.get(desired.version or "")


def _signature_of(reference: str) -> ModelSignature:
    with local_checkpoint(reference) as local:
        return ModelSignature.of(local.directory)


def content_label(name: str, digest: str) -> str:
    """Return the label of weights whose directory name is taken: `step_1@3fb2c0d91a6e`."""
    mark = f"@{digest.rpartition(':')[2][:DIGITS]}"
    return name[: MAX_LABEL - len(mark)] + mark


def _label_conflict(version: str) -> Conflict:
    return Conflict(
        f"version {version!r} has been served with other weights, or with weights whose digest is "
        "not known: other weights need another label",
        param="version",
    )
