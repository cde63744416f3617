"""Weight updates (--mutate): applied, nothing stale, and rolled back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from uuid import uuid4

from lockstep.backends.admin import Admin, Source
from lockstep.check.inflight import in_flight
from lockstep.check.outcome import describe, difference, largest_difference, require, require_same
from lockstep.check.row import RowGroup
from lockstep.check.rows.versions import spans
from lockstep.check.target import Target
from lockstep.checkpoint.probe import Probe

GROUP = RowGroup("weights", mutates=True)
PREFIX = 300
"""Tokens of a prompt whose prefix is cached: more than two blocks of any known engine."""


async def switch(admin: Admin, change: Callable[[], Awaitable[object]]) -> None:
    """Change the weights of a paused worker and resume it."""
    await admin.pause("keep")
    try:
        await change()
    finally:
        await admin.resume()


async def commit(target: Target) -> str:
    """Make the server serve the checkpoint of --checkpoint; return its version label."""
    admin, version = target.admin, f"check-{uuid4().hex[:8]}"
    await admin.view()  # some drivers learn here what to roll back to
    await admin.stage(Source(directory=target.checkpoint.absolute()), version)
    await switch(admin, lambda: admin.commit(version))
    return version


@asynccontextmanager
async def updated(target: Target) -> AsyncIterator[str]:
    """Serve the other weights during the block; roll back at its end."""
    version = await commit(target)
    try:
        yield version
    finally:
        await switch(target.admin, target.admin.rollback)


def sequences(target: Target, probe: Probe | None) -> list[list[int]]:
    """Return the sequences to score: those of the probe, else some prompts."""
    if probe is not None:
        return [list(ids) for ids in probe.sequences]
    return [target.prompt(40, seed=seed) for seed in range(4)]


@GROUP.row("applied", "an update is really applied", "L4 F28", seconds=300)
async def applied(target: Target) -> str:
    probe = Probe.beside(target.checkpoint)
    chosen = sequences(target, probe)
    before = await target.scores(chosen)
    async with updated(target) as version:
        after = await target.scores(chosen)
        completion = await target.one(target.prompt(), max_tokens=4)
    moved = largest_difference(before, after)
    count = sum(map(len, after))
    evidence = f"{count} scores moved by up to {moved:.2g}; tokens say {spans(completion)}"
    require(moved > target.tolerance, f"{evidence}: the weights are the old ones")
    if probe is None:
        evidence += "; the checkpoint has no probe to prove it by"
    else:
        off = largest_difference(probe.logprobs, after)
        allowed = max(probe.tolerance or 0.0, target.tolerance)
        evidence += f"; against the checkpoint's probe: {describe(off)}"
        require(off <= allowed, f"{evidence} (tolerance {allowed:g})")
    labels = {span.version for span in completion.versions}
    require(labels == {version}, f"{evidence}; expected the label {version!r}")
    return evidence


@GROUP.row("stale", "no cache of the old weights is used", "F27", seconds=300)
async def stale(target: Target) -> str:
    ids = target.prompt(PREFIX, seed=31)
    old = [await target.one(ids) for _ in range(2)][-1]
    async with updated(target):
        new = await target.one(ids)
        fresh = await target.one(ids, cache_salt=uuid4().hex)
        scored = (await target.score([*ids, *new.token_ids]))[len(ids) - 1 :]
    evidence = require_same(
        fresh, new, target.tolerance, f"a prefix of {len(ids)} cached before the update"
    )
    off = difference(new.logprobs, scored)
    require(off <= target.tolerance, f"{evidence}; scored anew: {describe(off)}")
    require(
        (old.token_ids, old.logprobs) != (new.token_ids, new.logprobs),
        f"{evidence}; but the answer is that of the old weights",
    )
    return f"{evidence} with it and under a new salt; scored anew: {describe(off)}"


@GROUP.row(
    "inflight",
    "a generation during an update has the position of the change",
    "L3 F43",
    seconds=300,
)
async def inflight(target: Target) -> str:
    await target.one(target.prompt(seed=32))
    admin, version = target.admin, f"check-{uuid4().hex[:8]}"
    await admin.view()
    await admin.stage(Source(directory=target.checkpoint.absolute()), version)
    async with in_flight(
        target, target.request(target.prompt(seed=32), max_tokens=target.long)
    ) as running:
        seen = await running.begun()
        await switch(admin, lambda: admin.commit(version))
        try:
            completion = await running.end()
        finally:
            await switch(admin, admin.rollback)
    versions, finish = completion.versions, completion.finish
    evidence = (
        f"updated after {seen} of {target.long} tokens: {spans(completion)}, finish {finish!r}"
    )
    require(len(versions) == 2 and versions[1].version == version, evidence)
    require(versions[1].start >= seen, evidence)
    return evidence


@GROUP.row("rollback", "an update can be rolled back", "L4 F24", seconds=300)
async def rollback(target: Target) -> str:
    chosen = sequences(target, None)
    before = await target.scores(chosen)
    first = await target.one(target.prompt(), max_tokens=4)
    async with updated(target):
        moved = largest_difference(before, await target.scores(chosen))
    off = largest_difference(before, await target.scores(chosen))
    last = await target.one(target.prompt(), max_tokens=4)
    evidence = (
        f"scores moved by {moved:.2g} and came back: {describe(off)}; tokens say {spans(last)}"
    )
    require(moved > target.tolerance >= off, evidence)
    require(last.versions == first.versions, f"{evidence}, before: {spans(first)}")
    return evidence
