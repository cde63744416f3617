"""A worker that accepts requests and stops responding: they are retried elsewhere, or fail."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.fleet.routing.affinity import Affinity
from lockstep.fleet.routing.pool import Pool
from lockstep.fleet.worker import Worker
from lockstep.tokens.errors import Unavailable
from tests.fleet.fakes import FakeWorker, fleet, until, work, work_stream

pytestmark = pytest.mark.failure_mode("F35")


def hang(fake: FakeWorker) -> None:
    fake.behave, fake.hangs = fake.held, True


def pinned(fake: FakeWorker, pool: Pool) -> Affinity:
    """An affinity that leads to this worker, as long as it serves."""
    for number in range(1000):
        affinity = Affinity(session=f"s{number}")
        chosen = pool._rendezvous.pick(affinity.key)
        if chosen is not None and chosen.id == fake.name:
            return affinity
    raise AssertionError(fake.name)


async def test_undelivered_requests_of_a_hung_worker_are_retried_elsewhere_at_once() -> None:
    async with fleet(2, health_seconds=0.3) as (pool, fakes):
        hang(fakes[0])
        affinity = pinned(fakes[0], pool)
        async with asyncio.timeout(3):
            names = await asyncio.gather(*(pool.run(affinity, work) for _ in range(4)))
        assert set(names) == {"w1"}
        assert pool.in_flight == 0
        assert all(not worker.attempts and not worker.in_flight for worker in pool.workers)


async def test_a_stream_that_waits_for_its_first_item_moves_too() -> None:
    async with fleet(2, health_seconds=0.3) as (pool, fakes):
        hang(fakes[0])
        fakes[1].behave = fakes[1].events(3)
        affinity = pinned(fakes[0], pool)
        async with asyncio.timeout(3), aclosing(pool.stream(affinity, work_stream)) as items:
            assert [item async for item in items] == [b"w1"] * 3


async def test_requests_wait_for_the_only_worker_for_a_while_and_then_fail() -> None:
    async with fleet(1, health_seconds=0.2) as (pool, fakes):
        hang(fakes[0])
        with pytest.raises(Unavailable, match="w0 does not respond") as failed:
            async with asyncio.timeout(5):
                await pool.run(Affinity(session="s"), work)
        assert failed.value.retry_after is not None
        assert pool.workers[0].failures >= 3
        assert pool.in_flight == 0


async def test_the_only_worker_serves_its_requests_when_it_comes_back() -> None:
    async with fleet(1, health_seconds=0.4) as (pool, fakes):
        hang(fakes[0])
        waiting = asyncio.create_task(pool.run(Affinity(session="s"), work))
        await until(lambda: pool.workers[0].state == "down")
        fakes[0].hangs = False
        fakes[0].gate.set()
        assert await waiting == "w0"


async def test_a_partly_delivered_stream_fails_once_its_worker_is_gone() -> None:
    async with fleet(2, health_seconds=0.2) as (pool, fakes):
        affinity = pinned(fakes[0], pool)
        fakes[0].behave = fakes[0].events(1, then="hold")
        async with asyncio.timeout(8), aclosing(pool.stream(affinity, work_stream)) as items:
            assert await anext(items) == b"w0"
            fakes[0].hangs = True
            with pytest.raises(Unavailable, match="after a part of the response was delivered"):
                await anext(items)
        assert pool.in_flight == 0


async def test_a_caller_that_disconnects_gets_cancelled_error_and_not_unavailable() -> None:
    async with fleet(2, health_seconds=0.3) as (pool, fakes):
        for fake in fakes:
            fake.behave = fake.held
        fakes[0].hangs = True
        waiting = asyncio.create_task(pool.run(pinned(fakes[0], pool), work))
        await until(lambda: bool(pool.workers[0].attempts))
        (attempt,) = pool.workers[0].attempts
        waiting.cancel()
        attempt.call_off(delivered_too=False)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert pool.in_flight == 0


async def test_requests_of_a_worker_that_cannot_be_brought_up_are_moved() -> None:
    """It responds, but is paused forever, and its requests would wait as long."""
    async with fleet(1) as (pool, _):
        stuck = FakeWorker("stuck")
        await stuck.start()
        stuck.behave = stuck.held
        broken = False

        async def gate(worker: Worker) -> None:
            worker.become("syncing")
            if broken:
                worker.become("quarantined", "its checkpoint is gone")
                raise Unavailable("its checkpoint is gone")
            worker.become("proving")

        pool.gate(gate)
        admin: Any = SimpleNamespace(name="lockstep", close=None)
        worker = await pool.add(stuck.url, worker_id="stuck", admin=admin)
        waiting = asyncio.create_task(pool.run(pinned(stuck, pool), work))
        await until(lambda: bool(worker.attempts))
        broken = True
        pool.quarantine(worker, "it did not resume")
        async with asyncio.timeout(5):
            assert await waiting == "w0"
        stuck.gate.set()
        await stuck.die()
