"""Weight updates, asked with --mutate: really applied, nothing stale, and undone again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from uuid import uuid4

from lockstep.backends.admin import Admin, Source
from lockstep.check.compare import all_apart, apart, same, shown
from lockstep.check.inflight import in_flight
from lockstep.check.outcome import require
from lockstep.check.row import RowGroup
from lockstep.check.rows.versions import spans
from lockstep.check.target import Target
from lockstep.checkpoint.probe import Probe

GROUP = RowGroup("weights", mutates=True)
PREFIX = 300
"""Tokens of a prompt whose prefix is cached: more than two blocks of any engine known."""


async def switch(admin: Admin, change: Callable[[], Awaitable[object]]) -> None:
    """Changes the weights of a paused worker, and resumes it."""
    await admin.pause("keep")
    try:
        await change()
    finally:
        await admin.resume()


async def commit(target: Target) -> str:
    """Serves the checkpoint that was given; the label it has there."""
    admin, version = target.admin, f"check-{uuid4().hex[:8]}"
    await admin.view()  # some drivers learn here what they must go back to
    await admin.stage(Source(directory=target.checkpoint.absolute()), version)
    await switch(admin, lambda: admin.commit(version))
    return version


@asynccontextmanager
async def updated(target: Target) -> AsyncIterator[str]:
    """The server with the other weights; rolled back at the end of the block."""
    version = await commit(target)
    try:
        yield version
    finally:
        await switch(target.admin, target.admin.rollback)


def sequences(target: Target, probe: Probe | None) -> list[list[int]]:
    """What is scored: the probe's sequences, else some prompts."""
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
        done = await target.one(target.prompt(), max_tokens=4)
    moved = all_apart(before, after)
    count = sum(map(len, after))
    said = f"{count} scores moved by up to {moved:.2g}; tokens say {spans(done)}"
    require(moved > target.tolerance, f"{said}: the weights are the old ones")
    if probe is None:
        said += "; the checkpoint has no probe to prove it by"
    else:
        off = all_apart(probe.logprobs, after)
        allowed = max(probe.tolerance or 0.0, target.tolerance)
        said += f"; against the checkpoint's probe: {shown(off)}"
        require(off <= allowed, f"{said} (tolerance {allowed:g})")
    labels = {span.version for span in done.versions}
    require(labels == {version}, f"{said}; expected the label {version!r}")
    return said


@GROUP.row("stale", "nothing cached under the old weights is used", "F27", seconds=300)
async def stale(target: Target) -> str:
    ids = target.prompt(PREFIX, seed=31)
    old = [await target.one(ids) for _ in range(2)][-1]
    async with updated(target):
        new = await target.one(ids)
        fresh = await target.one(ids, cache_salt=uuid4().hex)
        scored = (await target.score([*ids, *new.token_ids]))[len(ids) - 1 :]
    said = same(fresh, new, target.tolerance, f"a prefix of {len(ids)} cached before the update")
    off = apart(new.logprobs, scored)
    require(off <= target.tolerance, f"{said}; scored anew: {shown(off)}")
    require(
        (old.token_ids, old.logprobs) != (new.token_ids, new.logprobs),
        f"{said}; but the answer is that of the old weights",
    )
    return f"{said} with it and under a new salt; scored anew: {shown(off)}"


@GROUP.row("inflight", "a generation that meets an update says where", "L3 F43", seconds=300)
async def inflight(target: Target) -> str:
    await target.one(target.prompt(seed=32))
    admin, version = target.admin, f"check-{uuid4().hex[:8]}"
    await admin.view()
    await admin.stage(Source(directory=target.checkpoint.absolute()), version)
    async with in_flight(target, target.ask(target.prompt(seed=32), max_tokens=target.long)) as one:
        seen = await one.begun()
        await switch(admin, lambda: admin.commit(version))
        try:
            done = await one.end()
        finally:
            await switch(admin, admin.rollback)
    said = f"updated after {seen} of {target.long} tokens: {spans(done)}, finish {done.finish!r}"
    require(len(done.versions) == 2 and done.versions[1].version == version, said)
    require(done.versions[1].start >= seen, said)
    return said


@GROUP.row("rollback", "an update can be undone", "L4 F24", seconds=300)
async def rollback(target: Target) -> str:
    chosen = sequences(target, None)
    before = await target.scores(chosen)
    first = await target.one(target.prompt(), max_tokens=4)
    async with updated(target):
        moved = all_apart(before, await target.scores(chosen))
    off = all_apart(before, await target.scores(chosen))
    last = await target.one(target.prompt(), max_tokens=4)
    said = f"scores moved by {moved:.2g} and came back: {shown(off)}; tokens say {spans(last)}"
    require(moved > target.tolerance >= off, said)
    require(last.versions == first.versions, f"{said}, before: {spans(first)}")
    return said
