"""Reads and checks the new weights of an update, once for all workers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep import tracing
from lockstep.backends.admin import Source
from lockstep.checkpoint.validate import Checkpoint, ModelSignature, resolve
from lockstep.fleet.update.proof import Proof, reference_of
from lockstep.storage.desired_state import Desired
from lockstep.tokens.errors import BadRequest, Conflict, LockstepError
from lockstep.tokens.versions import MAX_LABEL

DIGITS = 12
"""Digits of a digest that tell the weights of two runs apart in a label."""


@dataclass(frozen=True, slots=True)
class NewWeights:
    """What to load, under which label, and how it is proved.

    `path`, `digest` and `nbytes` are those of a checkpoint. There is nothing to do when
    it `is_served`.
    """

    version: str
    source: Source
    proof: Proof
    path: str | None = None
    digest: str | None = None
    warnings: tuple[str, ...] = ()
    is_served: bool = False
    nbytes: int | None = None


class WeightReader:
    """Reads what an update asks for. `model_dir` is where the first weights are, if known."""

    def __init__(self, roots: Sequence[Path], model_dir: Path | None) -> None:
        self._roots = roots
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
        """The new weights; they may be `served` under that label already.

        A label names contents. One that means other weights is a Conflict when it is `strict`, as
        the trainer chose it; otherwise the digest is added to it, since directories of two runs
        are often called alike. Raises what is wrong with a checkpoint.
        """
        if weight_dir is None:
            if source is None:
                raise BadRequest("weight_dir is missing: name the checkpoint", param="weight_dir")
            if version in desired.agreed:
                raise _taken(version)
            return NewWeights(version, source, Proof())
        path = resolve(weight_dir, self._roots)
        with ExitStack() as stack:
            if (tracer := tracing.active) is not None:
                stack.enter_context(tracer.span("update validate", {"lockstep.version": version}))
            checkpoint = await asyncio.to_thread(
                Checkpoint.validate, path, await self._served(desired), roots=self._roots
            )
        warnings = checkpoint.warnings
        if version in desired.agreed and desired.digests.get(version) != checkpoint.digest:
            if strict:
                raise _taken(version)
            taken, version = version, content_label(version, checkpoint.digest)
            note = f"version {taken!r} names other weights here: these are {version!r}"
            warnings = (*warnings, note)
        now = await self._digest(desired)
        proof = Proof(
            reference_of(checkpoint.probe),
            tensors=checkpoint.tensors,
            same=checkpoint.digest == now,
        )
        return NewWeights(
            version,
            Source(directory=path),
            proof,
            str(path),
            checkpoint.digest,
            warnings,
            is_served=served and version == desired.version,
            nbytes=checkpoint.nbytes,
        )

    async def _served(self, desired: Desired) -> ModelSignature | None:
        """What the weights of the served model look like, where that is known."""
        where = self._model_dir or desired.checkpoint
        if self._signature is None and where is not None:
            with suppress(LockstepError):  # the workers themselves check too
                self._signature = await asyncio.to_thread(ModelSignature.of, Path(where))
        return self._signature

    async def _digest(self, desired: Desired) -> str | None:
        """What identifies the served weights, where that is known."""
        if len(desired.agreed) == 1 and self._first is None and self._model_dir is not None:
            here = self._model_dir.resolve()
            with suppress(LockstepError):
                first = await asyncio.to_thread(Checkpoint.validate, here, roots=(here,))
                self._first = first.digest
        if len(desired.agreed) == 1 and desired.checkpoint is None:
            return self._first
        return desired.digests.get(desired.version or "")


def content_label(name: str, digest: str) -> str:
    """The label of weights whose directory is called as others were: `step_1@3fb2c0d91a6e`."""
    mark = f"@{digest.rpartition(':')[2][:DIGITS]}"
    return name[: MAX_LABEL - len(mark)] + mark


def _taken(version: str) -> Conflict:
    return Conflict(
        f"version {version!r} has been served with other weights, or with weights of which nobody "
        "can tell: other weights need another label",
        param="version",
    )
