"""Slots are never lost, never granted twice, and granted in the order of the queue."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route
from starlette.testclient import TestClient

from lockstep.fleet.routing.admission import AdmissionLimiter
from lockstep.http.handlers import EXCEPTION_HANDLERS
from lockstep.tokens.errors import BadRequest, Busy, Unavailable

STEPS = st.lists(st.tuples(st.sampled_from(["take", "end", "cancel", "run"]), st.integers(0, 9)))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), STEPS)
def test_no_slot_is_lost_or_granted_twice_whatever_is_cancelled(
    limit: int, steps: list[tuple[str, int]]
) -> None:
    async def story() -> None:
        slots = AdmissionLimiter(limit, 100, 60.0)
        inside = 0

        async def request(leave: asyncio.Event) -> None:
            nonlocal inside
            await slots.take()
            try:
                inside += 1
                assert inside <= limit
                await leave.wait()
            finally:
                inside -= 1
                slots.give()

        live: list[tuple[asyncio.Task[None], asyncio.Event]] = []
        tasks = []
        for what, at in steps:
            if what == "take":
                leave = asyncio.Event()
                live.append((asyncio.create_task(request(leave)), leave))
                tasks.append(live[-1][0])
            elif what == "run":
                await asyncio.sleep(0)
            elif live:
                task, leave = live.pop(at % len(live))
                leave.set() if what == "end" else task.cancel()
        for _, leave in live:
            leave.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(one) for one in results} <= {type(None), asyncio.CancelledError}
        assert slots.taken == slots.waiting == 0

    asyncio.run(story())


async def test_the_first_in_the_queue_gets_the_next_slot() -> None:
    slots = AdmissionLimiter(1, 10, 60.0)
    order: list[int] = []

    async def request(number: int) -> None:
        await slots.take()
        order.append(number)
        slots.give()

    await slots.take()
    tasks = [asyncio.create_task(request(number)) for number in range(4)]
    await asyncio.sleep(0)
    slots.give()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3]


async def test_a_slot_granted_at_the_moment_of_a_cancellation_goes_to_the_next() -> None:
    slots = AdmissionLimiter(1, 10, 60.0)
    await slots.take()
    first, second = (asyncio.create_task(slots.take()) for _ in range(2))
    await asyncio.sleep(0)
    slots.give()
    first.cancel()
    await asyncio.wait_for(second, 10)
    assert first.cancelled()
    assert (slots.taken, slots.waiting) == (1, 0)


async def test_a_queue_of_length_zero_rejects_at_once() -> None:
    slots = AdmissionLimiter(1, 0, 60.0)
    await slots.take()
    with pytest.raises(Busy):
        await slots.take()


async def test_queued_requests_fail_when_the_limiter_closes() -> None:
    slots = AdmissionLimiter(1, 1, 60.0)
    await slots.take()
    waiting = asyncio.create_task(slots.take())
    await asyncio.sleep(0)
    slots.close(Unavailable("closing"))
    with pytest.raises(Unavailable, match="closing"):
        await waiting
    assert slots.taken == 1


@pytest.mark.parametrize(
    ("values", "name"),
    [((0, 1, 1.0), "max_in_flight"), ((1, -1, 1.0), "queue_limit"), ((1, 1, -1.0), "queue_sec")],
)
def test_invalid_limits_are_rejected(values: tuple[int, int, float], name: str) -> None:
    with pytest.raises(BadRequest, match=name):
        AdmissionLimiter(*values)


def test_the_hint_reaches_the_client_as_retry_after() -> None:
    async def refuse(_: Request) -> None:
        raise Busy("full", retry_after=2.4)

    app = Starlette(routes=[Route("/", refuse)], exception_handlers=EXCEPTION_HANDLERS)
    response = TestClient(app).get("/")
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
