"""Bring-up of a worker that joins, restarts or returns: load the desired state and prove it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lockstep.backends.admin import Source, WorkerView
from lockstep.checkpoint.stores.url import location
from lockstep.fleet.update.judgement import (
    Witness,
    check_requirement,
    describe_other_weights,
    judge,
)
from lockstep.fleet.update.proof import contents_of, match, read_back_of, scores_of
from lockstep.fleet.worker import Worker
from lockstep.storage.desired_state import AdapterSpec, Desired, Reference
from lockstep.tokens.errors import Conflict, Disproved
from lockstep.tokens.operation import RequiredProof

Adopt = Callable[[Worker, WorkerView], Awaitable[Desired]]


async def bring_up(
    worker: Worker, desired: Desired, adopt: Adopt, require: RequiredProof = "any"
) -> Desired:
    """Bring a worker to exactly the desired state, proved. It gets no traffic meanwhile.

    `adopt` returns the desired state when there is none yet: the first worker's own becomes it.
    `require` is what the worker must show at least.
    Returns the state that the worker was brought to. Raises a LockstepError with the reason.
    """
    worker.become("syncing", worker.reason)
    if desired.version is None:
        desired = await adopt(worker, await worker.control.view())
    await _sync(worker, desired)
    worker.become("proving", worker.reason)
    if not worker.control.probes_while_paused:
        await worker.control.resume()
    await _prove_all(worker, desired, require)
    # The pause comes last, because some workers cannot score a probe while paused. The worker gets
    # no requests before it has passed the gate.
    if desired.paused is not None:
        await worker.control.pause(desired.paused)
    else:
        await worker.control.resume()
    return desired


async def restore(worker: Worker, desired: Desired) -> None:
    """Bring a paused worker to the desired state, proved, and leave it paused. Raises a
    LockstepError with the reason."""
    await _sync(worker, desired)
    await _prove_all(worker, desired, "any")


async def _sync(worker: Worker, desired: Desired) -> None:
    view = await worker.control.view()
    # An update that this worker was lost to left weights staged. They must go first: a later
    # rollback would drop them instead of undoing a commit.
    if view.staged is not None:
        await worker.control.rollback()
    await _sync_weights(worker, view, desired)
    await _sync_adapters(worker, desired)


async def _prove_all(worker: Worker, desired: Desired, require: RequiredProof) -> None:
    if desired.reference is not None:
        await _prove_weights(worker, desired, desired.reference, require)
    for name, spec in desired.adapters.items():
        await _prove_adapter(worker, name, spec)
    worker.version = desired.version


async def prove(
    worker: Worker,
    reference: Reference,
    digest: str | None = None,
    require: RequiredProof = "any",
) -> None:
    """Raise Disproved unless a worker reproduces the reference. It must also have read what
    `digest` identifies, where both are known, and compute with what it read."""
    contents = await contents_of(worker, None)
    report = await read_back_of(worker)
    scores = await scores_of(worker, reference.sequences)
    witness = Witness(
        match(digest, contents),
        report,
        contents.in_memory,
        earlier=worker.closeness,
        dtype=contents.dtype,
    )
    verdict = judge(scores, reference, witness)
    worker.judge(verdict.evidence)
    if verdict.error is not None:
        raise verdict.error
    # The weights that a fleet starts with have no digest: it has no checkpoint to compare with.
    # The worker must still be able to show what it holds.
    facts = witness if digest is not None else replace(witness, contents="match")
    if (error := check_requirement(require, facts)) is not None:
        raise error
    if reference.tolerance is None:
        worker.closeness = verdict.closeness


async def check_first_weights(worker: Worker, reference: Reference) -> None:
    """Raise Disproved unless a worker that nothing was loaded into yet computes as the reference
    does."""
    if not worker.control.probes_while_paused:
        await worker.control.resume()
    contents = await contents_of(worker, None)
    scores = await scores_of(worker, reference.sequences)
    verdict = judge(scores, reference, Witness(dtype=contents.dtype, same=True))
    worker.judge(verdict.evidence)
    if verdict.error is not None:
        raise verdict.error.with_message(
            f"it does not compute this model as its files say: {verdict.error.message}"
        )


async def _prove_adapter(worker: Worker, name: str, spec: AdapterSpec) -> None:
    report = await read_back_of(worker, name, Path(spec.path))
    if report is not None and report.different:
        raise Disproved(f"adapter {name!r}: {describe_other_weights(report)}")
    if spec.reference is None:
        return
    scores = await scores_of(worker, spec.reference.sequences, name)
    contents = await contents_of(worker, None)
    witness = Witness(
        # The label that Lockstep's own engine loaded the adapter under identifies its contents.
        "match" if report or contents.in_memory else "unknown",
        report,
        contents.in_memory,
        earlier=worker.closeness,
        dtype=contents.dtype,
    )
    verdict = judge(scores, spec.reference, witness)
    if verdict.error is not None:
        raise verdict.error


async def _prove_weights(
    worker: Worker, desired: Desired, reference: Reference, require: RequiredProof
) -> None:
    digest = desired.digests.get(desired.version or "")
    try:
        await prove(worker, reference, digest, require)
    except Disproved:
        if desired.checkpoint is None:
            raise
        # The label is right but the weights are not, so they are loaded again.
        await _load_weights(worker, desired.checkpoint, desired.version or "")
        if not worker.control.probes_while_paused:
            await worker.control.resume()
        await prove(worker, reference, digest, require)


async def _sync_weights(worker: Worker, view: WorkerView, desired: Desired) -> None:
    if desired.version is None or view.version == desired.version:
        return
    if desired.checkpoint is not None:
        await _load_weights(worker, desired.checkpoint, desired.version)
    elif view.version is not None:  # a worker that reports no version is judged by its scores
        await _go_back(worker, desired.version)


async def _go_back(worker: Worker, version: str) -> None:
    """Undo a commit that the fleet did not agree on."""
    if not worker.control.stages:
        await worker.control.pause("abort")
    with suppress(Conflict):
        await worker.control.rollback()
    held = (await worker.control.view()).version
    if held != version:
        raise Conflict(
            f"it holds version {held!r}, but the fleet serves {version!r}, whose checkpoint is not "
            "known: start it with those weights"
        )


async def _load_weights(worker: Worker, checkpoint: str, version: str) -> None:
    await worker.control.stage(Source(directory=location(checkpoint)), version)
    if not worker.control.stages:
        await worker.control.pause("abort")
    await worker.control.commit(version)
    await worker.control.flush()


async def _sync_adapters(worker: Worker, desired: Desired) -> None:
    held = dict((await worker.control.view()).adapters)
    for name in held:
        if name not in desired.adapters:
            await worker.control.unload_adapter(name)
    for name, spec in desired.adapters.items():
        if held.get(name) != spec.label or not spec.label:
            await _load_adapter(worker, name, spec)


async def _load_adapter(worker: Worker, name: str, spec: AdapterSpec) -> None:
    """Load an adapter. Raises Conflict when its directory has other contents than the fleet agreed
    on."""
    label = await worker.control.load_adapter(name, Path(spec.path), spec.version)
    if spec.label and label and label != spec.label:
        raise Conflict(
            f"adapter {name!r} in {spec.path} has become {label!r}, the fleet agreed on "
            f"{spec.label!r}: load it on the fleet again"
        )
