"""Bring-up of a worker that joins, restarts or returns: load the desired state and prove it."""

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
    """Bring a worker to exactly the desired state, proved. It gets no traffic meanwhile.

    `adopt` returns the desired state when there is none yet: the first worker's own becomes it.
    Returns the state that the worker was brought to. Raises a LockstepError with the reason.
    """
    worker.become("syncing", worker.reason)
    if desired.version is None:
        desired = await adopt(worker, await worker.control.view())
    await _sync(worker, desired)
    worker.become("proving", worker.reason)
    if not worker.control.probes_while_paused:
        await worker.control.resume()
    await _prove_all(worker, desired)
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
    await _prove_all(worker, desired)


async def _sync(worker: Worker, desired: Desired) -> None:
    view = await worker.control.view()
    # An update that this worker was lost to left weights staged. They must go first: a later
    # rollback would drop them instead of undoing a commit.
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
    """Raise Disproved unless a worker reproduces the reference. It must also have read what
    `digest` identifies, where both are known."""
    scores = await scores_of(worker, reference.sequences)
    held = await contents_of(worker, None)
    witness = Witness(match(digest, held), earlier=worker.closeness, dtype=held.dtype)
    verdict = judge(scores, reference, witness)
    worker.judge(verdict.evidence)
    if verdict.error is not None:
        raise verdict.error
    if reference.tolerance is None:
        worker.closeness = verdict.closeness


async def _prove_adapter(worker: Worker, reference: Reference, name: str) -> None:
    # The label that the adapter was loaded under identifies its contents.
    scores = await scores_of(worker, reference.sequences, name)
    verdict = judge(scores, reference, Witness("match", earlier=worker.closeness))
    if verdict.error is not None:
        raise verdict.error


async def _prove_weights(worker: Worker, desired: Desired, reference: Reference) -> None:
    digest = desired.digests.get(desired.version or "")
    try:
        await prove(worker, reference, digest)
    except Disproved:
        if desired.checkpoint is None:
            raise
        # The label is right but the weights are not, so they are loaded again.
        await _load_weights(worker, desired.checkpoint, desired.version or "")
        await prove(worker, reference, digest)


async def _sync_weights(worker: Worker, view: WorkerView, desired: Desired) -> None:
    if desired.version is None or view.version == desired.version:
        return
    if desired.checkpoint is not None:
        await _load_weights(worker, desired.checkpoint, desired.version)
    elif view.version is not None:  # a worker that reports no version is judged by its scores
        await _go_back(worker, desired.version)


async def _go_back(worker: Worker, version: str) -> None:
    """Undo a commit that the fleet did not agree on."""
    with suppress(Conflict):
        await worker.control.rollback()
    held = (await worker.control.view()).version
    if held != version:
        raise Conflict(
            f"it holds version {held!r}, but the fleet serves {version!r}, whose checkpoint is not "
            "known: start it with those weights"
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
    """Load an adapter. Raises Conflict when its directory has other contents than the fleet agreed
    on."""
    label = await worker.control.load_adapter(name, Path(spec.path), spec.version)
    if spec.label and label and label != spec.label:
        raise Conflict(
            f"adapter {name!r} in {spec.path} has become {label!r}, the fleet agreed on "
            f"{spec.label!r}: load it on the fleet again"
        )
