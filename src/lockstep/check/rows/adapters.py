"""LoRA adapters (--mutate): loaded, swapped, and gone after unloading."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from uuid import uuid4

from lockstep.check.outcome import NotApplicable, describe, largest_difference, require
from lockstep.check.row import RowGroup
from lockstep.check.target import Target

GROUP = RowGroup("adapters", mutates=True)
SEEN_WITHIN = 20.0
"""Seconds in which a deployment must list an adapter, or stop listing it."""


def paths(target: Target) -> tuple[Path, ...]:
    if not target.options.adapters:
        raise NotApplicable("no adapter was given (--adapter)")
    return tuple(path.absolute() for path in target.options.adapters)


@asynccontextmanager
async def loaded(target: Target) -> AsyncIterator[str]:
    """Load the first adapter under its own name; unload it at the end of the block."""
    name = f"check-{uuid4().hex[:8]}"
    first = paths(target)[0]
    await target.admin.load_adapter(name, first)
    try:
        await listed(target, name, there=True)
        yield name
    finally:
        if await listed_now(target, name):
            await target.admin.unload_adapter(name)


async def listed_now(target: Target, name: str) -> bool:
    return any(card.id == name for card in await target.transport.models())


async def listed(target: Target, name: str, *, there: bool) -> float:
    """Return the seconds until /v1/models lists the name, or no longer does. Raises Broken."""
    began = monotonic()
    while await listed_now(target, name) != there:
        state = "not listed" if there else "still listed"
        require(monotonic() - began < SEEN_WITHIN, f"{name} is {state} after {SEEN_WITHIN:g} s")
        await asyncio.sleep(0.2)
    return monotonic() - began


def sequences(target: Target) -> list[list[int]]:
    return [target.prompt(40, seed=seed) for seed in range(2)]


@GROUP.row("load", "a loaded adapter is served under its name", "F29", seconds=180)
async def load(target: Target) -> str:
    base = await target.scores(sequences(target))
    async with loaded(target) as name:
        own = await target.scores(sequences(target), model=name)
        still = await target.scores(sequences(target))
    moved, unchanged = largest_difference(base, own), largest_difference(base, still)
    evidence = (
        f"its scores are up to {moved:.2g} from the base model's; the base model's are "
        f"{describe(unchanged)}"
    )
    require(moved > target.tolerance, f"{evidence}: the base model answers in its place")
    require(unchanged <= target.tolerance, evidence)
    return evidence


@GROUP.row("swap", "an adapter can be swapped under its name", "F29 F30", seconds=180)
async def swap(target: Target) -> str:
    first, second = paths(target)[0], paths(target)[-1]
    async with loaded(target) as name:
        before = await target.scores(sequences(target), model=name)
        await target.one(target.prompt(300), model=name)
        await target.admin.load_adapter(name, second)
        after = await target.scores(sequences(target), model=name)
        moved = largest_difference(before, after)
        if first == second:
            evidence = f"the same path again: {describe(moved)} (two adapters show more)"
            require(moved <= target.tolerance, evidence)
            return evidence
        warm = await target.one(target.prompt(300), model=name)
        fresh = await target.one(target.prompt(300), model=name, cache_salt=uuid4().hex)
        stale = largest_difference([warm.logprobs], [fresh.logprobs])
        await target.admin.load_adapter(name, first)
        back = largest_difference(before, await target.scores(sequences(target), model=name))
    evidence = (
        f"A to B: scores moved by up to {moved:.2g}, a prefix cached under A against a new one "
        f"{describe(stale)}; back to A {describe(back)}"
    )
    require(moved > target.tolerance >= max(back, stale), evidence)
    return evidence


@GROUP.row("unload", "an unloaded adapter is gone: 404, never the base model", "F31", seconds=180)
async def unload(target: Target) -> str:
    async with loaded(target) as name:
        with_it = await target.send_ids(target.prompt(), model=name)
        require(with_it.status == 200, f"while loaded: {with_it.describe()}")
        await target.admin.unload_adapter(name)
        took = await listed(target, name, there=False)
        reply = await target.send_ids(target.prompt(), model=name)
    evidence = f"while loaded 200; after unload {reply.describe()}, not listed after {took:.1f} s"
    require(reply.status == 404, evidence)
    return evidence
