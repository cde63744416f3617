"""Brings a worker that joins, restarts or returns to the fleet's desired state, and proves it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from lockstep.backends.admin import Source, WorkerView
from lockstep.fleet.update.judgement import Witness, judge
from lockstep.fleet.update.proof import contents_of, match, scores_of
from lockstep.fleet.worker import Worker
from lockstep.storage.desired_state import AdapterSpec, Desired, Reference
from lockstep.tokens.errors import Conflict, Disproved

Adopt = Callable[[Worker, WorkerView], Awaitable[Desired]]


async def bring_up(worker: Worker, desired: Desired, adopt: Adopt) -> Desired:
    """Leaves the worker holding exactly what is desired, proved; it gets no traffic meanwhile.

    `adopt` gives the desired state when there is none yet: the first worker's own becomes it.
    Returns the state it was brought to. Raises a LockstepError that says what could not be had.
    """
    worker.become("syncing", worker.reason)
    if desired.version is None:
        desired = await adopt(worker, await worker.control.view())
    await _sync(worker, desired)
    worker.become("proving", worker.reason)
    if not worker.control.probes_while_paused:
        await worker.control.resume()
    await _prove_all(worker, desired)
    # The pause comes last, for workers that take no probe in it: nothing is routed here anyway.
    if desired.paused is not None:
        await worker.control.pause(desired.paused)
    else:
        await worker.control.resume()
    return desired


async def restore(worker: Worker, desired: Desired) -> None:
    """Brings a paused worker to what is desired, proved, and leaves it paused.

    Raises a LockstepError that says what could not be had.
    """
    await _sync(worker, desired)
    await _prove_all(worker, desired)


async def _sync(worker: Worker, desired: Desired) -> None:
    view = await worker.control.view()
    if view.staged is not None:
        await worker.control.rollback()
    await _sync_weights(worker, view, desired)
    await _sync_adapters(worker, desired)


async def _prove_all(worker: Worker, desired: Desired) -> None:
    if desired.reference is not None:
        await _prove_weights(worker, desired, desired.reference)
    for name, spec in desired.adapters.items():
        if spec.reference is not None:
            await _prove_adapter(worker, spec.reference, name)
    worker.version = desired.version


async def prove(worker: Worker, reference: Reference, digest: str | None = None) -> None:
    """Raises Disproved unless the worker reproduces the reference, and what it read is what
    `digest` identifies, where both are known."""
    scores = await scores_of(worker, reference.sequences)
    held = await contents_of(worker, None)
    witness = Witness(match(digest, held), known=worker.closeness, dtype=held.dtype)
    verdict = judge(scores, reference, witness)
    worker.judge(verdict.evidence)
    if verdict.error is not None:
        raise verdict.error
    if reference.tolerance is None:
        worker.closeness = verdict.closeness


async def _prove_adapter(worker: Worker, reference: Reference, name: str) -> None:
    # The label that it was loaded under identifies its contents: they need no second evidence.
    scores = await scores_of(worker, reference.sequences, name)
    verdict = judge(scores, reference, Witness("match", known=worker.closeness))
    if verdict.error is not None:
        raise verdict.error


async def _prove_weights(worker: Worker, desired: Desired, reference: Reference) -> None:
    digest = desired.digests.get(desired.version or "")
    try:
        await prove(worker, reference, digest)
    except Disproved:
        if desired.checkpoint is None:
            raise
        # Its label is right and its weights are not: whatever it holds is replaced.
        await _load_weights(worker, desired.checkpoint, desired.version or "")
        await prove(worker, reference, digest)


async def _sync_weights(worker: Worker, view: WorkerView, desired: Desired) -> None:
    if desired.version is None or view.version == desired.version:
        return
    if desired.checkpoint is not None:
        await _load_weights(worker, desired.checkpoint, desired.version)
    elif view.version is not None:  # one that does not tell is judged by its scores
        await _go_back(worker, desired.version)


async def _go_back(worker: Worker, version: str) -> None:
    """Undoes a commit that the fleet did not agree on."""
    with suppress(Conflict):
        await worker.control.rollback()
    held = (await worker.control.view()).version
    if held != version:
        raise Conflict(
            f"it holds version {held!r}, but the fleet serves {version!r}, of which no checkpoint "
            "is known: start it with those weights"
        )


async def _load_weights(worker: Worker, checkpoint: str, version: str) -> None:
    await worker.control.stage(Source(directory=Path(checkpoint)), version)
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
    """Raises Conflict when the directory no longer holds what the fleet agreed on."""
    label = await worker.control.load_adapter(name, Path(spec.path), spec.version)
    if spec.label and label and label != spec.label:
        raise Conflict(
            f"adapter {name!r} in {spec.path} has become {label!r}, the fleet agreed on "
            f"{spec.label!r}: load it anew on the fleet"
        )
