"""Shares of grammar processes: requests of a tenant wait for its own grammars only."""

from __future__ import annotations

import asyncio
import threading

from lockstep.engine.text.grammar_shares import MOST_IN_USE, GrammarShares
from lockstep.tokens.grammar import Grammar


def nothing() -> None:
    """Find no compiled grammar."""


async def test_a_compilation_waits_for_those_of_its_own_tenant_only() -> None:
    shares, release = GrammarShares(), threading.Event()
    slow = asyncio.create_task(shares.compile("mallory", nothing, lambda: release.wait(60)))
    await asyncio.sleep(0)
    behind = asyncio.create_task(shares.compile("mallory", nothing, lambda: "second"))
    first = shares.compile("alice", nothing, lambda: "first")
    assert await asyncio.wait_for(first, 30) == "first"
    cached = shares.compile("mallory", lambda: "cached", lambda: "never")
    assert await asyncio.wait_for(cached, 30) == "cached"
    assert not behind.done()
    release.set()
    assert await slow
    assert await asyncio.wait_for(behind, 30) == "second"
    shares.close()


async def test_a_tenant_whose_share_is_used_up_waits_until_a_grammar_is_free() -> None:
    shares, release, entered = GrammarShares(), asyncio.Event(), 0

    async def use(tenant: str, number: int) -> None:
        nonlocal entered
        async with shares.hold(tenant, Grammar("regex", f"{number}")):
            entered += 1
            await release.wait()

    async with asyncio.TaskGroup() as group:
        for number in range(MOST_IN_USE + 1):
            group.create_task(use("mallory", number))
        group.create_task(use("mallory", 0))
        while entered < MOST_IN_USE + 1:  # the repeated one shares the process of the first
            await asyncio.sleep(0)
        group.create_task(use("alice", 1))
        while entered < MOST_IN_USE + 2:
            await asyncio.sleep(0)
        release.set()
    assert entered == MOST_IN_USE + 3
    shares.close()
