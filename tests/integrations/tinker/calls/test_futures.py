"""Polls for results: complete, also after a restart, and bounded in time."""

from __future__ import annotations

import asyncio

import pytest

from lockstep.integrations.tinker.calls.futures import Futures, Result

SOON = 5.0


async def test_a_poll_returns_all_requests_that_ended_since_the_last() -> None:
    futures = Futures()

    async def work() -> Result:
        return Result.of({})

    async def never() -> Result:
        await asyncio.sleep(60)
        return Result.of({})

    first, slow = futures.start(work, "s/0"), futures.start(never, "s/0")
    futures.start(work, "other/0")
    ended, cursor = await futures.wait_any("s/0", 0, SOON)
    assert ended == [first]
    begin = cursor
    futures.cancel(slow.request_id)
    ended, cursor = await futures.wait_any("s/0", cursor, SOON)
    assert (ended, cursor) == ([slow], begin + 1)
    assert slow.result is not None
    assert slow.result.failed
    assert await futures.wait_any("s/0", cursor, 0.01) == ([], cursor)


@pytest.mark.failure_mode("F83")
async def test_a_cursor_of_an_earlier_process_skips_no_result() -> None:
    async def work() -> Result:
        return Result.of({})

    before = Futures()
    for _ in range(3):
        before.start(work, "s/0")
    await asyncio.sleep(0.01)
    _, cursor = await before.wait_any("s/0", 0, SOON)
    after = Futures()
    pending = after.start(work, "s/0")
    await pending.done.wait()
    ended, _ = await after.wait_any("s/0", cursor, 0.05)
    assert ended == [pending]


async def test_polls_end_when_the_server_shuts_down() -> None:
    futures = Futures()
    pending = futures.open("s/0")
    waits = asyncio.gather(futures.wait(pending.request_id, 60), futures.wait_any("s/0", 0, 60))
    await asyncio.sleep(0.01)
    futures.end_polls()
    async with asyncio.timeout(SOON):
        nothing, (ended, _) = await waits
        assert (nothing, ended) == (None, [])
        assert await futures.wait(pending.request_id, 60) is None
