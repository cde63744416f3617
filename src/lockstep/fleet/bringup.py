"""How a worker that joins, restarts or returns is brought to the fleet's state, and proved."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from lockstep.backends.admin import Source, WorkerView
from lockstep.fleet.desired import AdapterSpec, Desired, Reference
from lockstep.fleet.member import Member
from lockstep.fleet.proof import differs, scores_of
from lockstep.tokens.errors import Conflict

Adopt = Callable[[Member, WorkerView], Awaitable[Desired]]


async def bring_up(member: Member, desired: Desired, adopt: Adopt) -> None:
    """Leaves the worker holding exactly what is desired, proved; it gets no traffic meanwhile.

    `adopt` is asked for the desired state when there is none yet: the first worker's own becomes
    it. Raises a LockstepError that says what could not be had.
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
    if desired.reference is not None:
        await prove(member, desired.reference)
    for name, spec in desired.adapters.items():
        if spec.reference is not None:
            await prove(member, spec.reference, name)
    member.version = desired.version
    # Paused workers answer probes, so the pause comes last: nothing was routed here anyway.
    if desired.paused is not None:
        await member.admin.pause(desired.paused)
    else:
        await member.admin.resume()


async def prove(member: Member, reference: Reference, adapter: str | None = None) -> None:
    """Raises Disproved unless the worker answers what the reference says."""
    error = differs(await scores_of(member, reference.sequences, adapter), reference)
    if error is not None:
        raise error


async def _sync_weights(member: Member, view: WorkerView, desired: Desired) -> None:
    if desired.version is None or view.version == desired.version:
        return
    if desired.checkpoint is None:
        raise Conflict(
            f"it holds version {view.version!r}, but the fleet serves {desired.version!r}, which "
            "it started with and of which no checkpoint is known: start it with those weights"
        )
    await member.admin.stage(Source(directory=Path(desired.checkpoint)), desired.version)
    if not member.admin.stages:
        await member.admin.pause("abort")
    await member.admin.commit(desired.version)
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
