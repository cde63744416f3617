"""How a worker that joins, restarts or returns is brought to the fleet's state, and proved."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from lockstep.backends.admin import Source, WorkerView
from lockstep.fleet.control.desired import AdapterSpec, Desired, Reference
from lockstep.fleet.member import Member
from lockstep.fleet.update.judgement import Witness, judge
from lockstep.fleet.update.proof import contents_of, match, scores_of
from lockstep.tokens.errors import Conflict, Disproved

Adopt = Callable[[Member, WorkerView], Awaitable[Desired]]


async def bring_up(member: Member, desired: Desired, adopt: Adopt) -> Desired:
    """Leaves the worker holding exactly what is desired, proved; it gets no traffic meanwhile.

    `adopt` is asked for the desired state when there is none yet: the first worker's own becomes
    it. Returns the state it was brought to. Raises a LockstepError that says what could not be had.
    """
    member.become("syncing")
    view = await member.admin.view()
    if desired.version is None:
        desired = await adopt(member, view)
        view = await member.admin.view()
    if view.staged is not None:
        await member.admin.rollback()
    await _sync_weights(member, view, desired)
    await _sync_adapters(member, desired)
    member.become("proving")
    if not member.admin.probes_while_paused:
        await member.admin.resume()
    if desired.reference is not None:
        await _prove_weights(member, desired, desired.reference)
    for name, spec in desired.adapters.items():
        if spec.reference is not None:
            await _prove_adapter(member, spec.reference, name)
    member.version = desired.version
    # The pause comes last, for workers that answer no probe in it: nothing is routed here anyway.
    if desired.paused is not None:
        await member.admin.pause(desired.paused)
    else:
        await member.admin.resume()
    return desired


async def prove(member: Member, reference: Reference, digest: str | None = None) -> None:
    """Raises Disproved unless the worker answers what the reference says, and what it read is what
    `digest` identifies, where both are known."""
    said = await scores_of(member, reference.sequences)
    held = await contents_of(member, None)
    witness = Witness(match(digest, held), known=member.closeness, dtype=held.dtype)
    verdict = judge(said, reference, witness)
    if verdict.error is not None:
        raise verdict.error
    if reference.tolerance is None:
        member.closeness = verdict.closeness


async def _prove_adapter(member: Member, reference: Reference, name: str) -> None:
    # The label that it was loaded under identifies its contents: they need no second evidence.
    said = await scores_of(member, reference.sequences, name)
    verdict = judge(said, reference, Witness("match", known=member.closeness))
    if verdict.error is not None:
        raise verdict.error


async def _prove_weights(member: Member, desired: Desired, reference: Reference) -> None:
    digest = desired.digests.get(desired.version or "")
    try:
        await prove(member, reference, digest)
    except Disproved:
        if desired.checkpoint is None:
            raise
        # Its label is right and its weights are not: whatever it holds is replaced.
        await _load_weights(member, desired.checkpoint, desired.version or "")
        await prove(member, reference, digest)


async def _sync_weights(member: Member, view: WorkerView, desired: Desired) -> None:
    if desired.version is None or view.version == desired.version:
        return
    if desired.checkpoint is not None:
        await _load_weights(member, desired.checkpoint, desired.version)
    elif view.version is not None:  # one that does not tell is judged by what it answers
        await _go_back(member, desired.version)


async def _go_back(member: Member, version: str) -> None:
    """Undoes a commit that the fleet did not agree on."""
    with suppress(Conflict):
        await member.admin.rollback()
    held = (await member.admin.view()).version
    if held != version:
        raise Conflict(
            f"it holds version {held!r}, but the fleet serves {version!r}, of which no checkpoint "
            "is known: start it with those weights"
        )


async def _load_weights(member: Member, checkpoint: str, version: str) -> None:
    await member.admin.stage(Source(directory=Path(checkpoint)), version)
    if not member.admin.stages:
        await member.admin.pause("abort")
    await member.admin.commit(version)
    await member.admin.flush()


async def _sync_adapters(member: Member, desired: Desired) -> None:
    held = dict((await member.admin.view()).adapters)
    for name in held:
        if name not in desired.adapters:
            await member.admin.unload_adapter(name)
    for name, spec in desired.adapters.items():
        if held.get(name) != spec.label or not spec.label:
            await load(member, name, spec)


async def load(member: Member, name: str, spec: AdapterSpec) -> None:
    """Raises Conflict when the directory no longer holds what the fleet agreed on."""
    label = await member.admin.load_adapter(name, Path(spec.path), spec.version)
    if spec.label and label and label != spec.label:
        raise Conflict(
            f"adapter {name!r} in {spec.path} has become {label!r}, the fleet agreed on "
            f"{spec.label!r}: load it anew on the fleet"
        )
