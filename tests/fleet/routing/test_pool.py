"""A pool over real HTTP servers: which worker gets a request, and what happens when it fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import pytest

from lockstep.backends.transport import GenerateRequest
from lockstep.fleet.routing.affinity import Affinity
from lockstep.fleet.routing.pool import Pool
from lockstep.fleet.worker import Worker
from lockstep.tokens import Sampling
from lockstep.tokens.errors import (
    BadRequest,
    Busy,
    Conflict,
    EngineFailure,
    LockstepError,
    NotFound,
    Unavailable,
)
from tests.fleet.fakes import FakeWorker, fleet, until, work, work_stream


def home_of(pool: Pool, fakes: list[FakeWorker], route: Affinity) -> tuple[FakeWorker, FakeWorker]:
    """The fake that the route leads to, and the other of two."""
    chosen = pool._rendezvous.pick(route.key)
    assert chosen is not None
    home = next(fake for fake in fakes if fake.name == chosen.id)
    return home, next(fake for fake in fakes if fake is not home)


def state(pool: Pool, fake: FakeWorker) -> str:
    return next(worker.state for worker in pool.workers if worker.id == fake.name)


ROUTE = Affinity(session="a conversation")


# Routing


async def test_a_session_stays_on_its_worker_and_sessions_spread() -> None:
    async with fleet(3) as (pool, _):
        names = [
            {await pool.run(Affinity(session=f"s{index}"), work) for _ in range(3)}
            for index in range(30)
        ]
    assert all(len(name) == 1 for name in names)
    assert set.union(*names) == {"w0", "w1", "w2"}


async def test_a_hot_session_spills_over_when_its_worker_is_loaded() -> None:
    async with fleet(2) as (pool, fakes):
        for fake in fakes:
            fake.behave = fake.held
        tasks = [asyncio.create_task(pool.run(ROUTE, work)) for _ in range(20)]
        await until(lambda: pool.in_flight == 20)
        loads = sorted(worker.in_flight for worker in pool.workers)
        for fake in fakes:
            fake.gate.set()
        await asyncio.gather(*tasks)
    assert loads[1] <= 1.25 * 10 + 2
    assert sum(loads) == 20


async def test_load_that_a_worker_reports_counts() -> None:
    async with fleet(2) as (pool, fakes):
        home, other = home_of(pool, fakes, ROUTE)
        home.health = {"status": "ok", "running": 8, "waiting": 30}
        await until(lambda: max(worker.elsewhere for worker in pool.workers) == 38)
        assert await pool.run(ROUTE, work) == other.name


async def test_a_pinned_request_goes_to_that_worker() -> None:
    async with fleet(3) as (pool, _):
        for name in ("w0", "w1", "w2"):
            assert await pool.run(Affinity(session="s", worker=name), work) == name


async def test_a_pin_to_a_worker_that_does_not_exist_or_serve_is_an_error() -> None:
    async with fleet(2) as (pool, fakes):
        with pytest.raises(NotFound, match="no worker 'w9'; there are w0, w1"):
            await pool.run(Affinity(worker="w9"), work)
        await fakes[0].die()
        with pytest.raises(Unavailable) as first:
            await pool.run(Affinity(worker="w0"), work)
        with pytest.raises(Unavailable, match="names worker 'w0', which is down") as second:
            await pool.run(Affinity(worker="w0"), work)
        assert fakes[1].requests == 0
    assert first.value.retry_after is not None
    assert second.value.retry_after is not None


# Failures


@pytest.mark.failure_mode("F22")
async def test_a_fleet_of_zero_workers_fails_every_operation() -> None:
    async with Pool() as pool:
        with pytest.raises(Unavailable, match="none was added") as refused:
            await pool.run(ROUTE, work)
        with pytest.raises(Unavailable):
            [item async for item in pool.stream(ROUTE, work_stream)]
        with pytest.raises(Unavailable):
            await pool.models()
        with pytest.raises(Unavailable):
            await pool.abort("r")
        with pytest.raises(Unavailable, match="0 of 1 workers serve"):
            await pool.wait_ready(1, 0.01)
    assert refused.value.status == 503
    assert refused.value.retry_after is not None


@pytest.mark.failure_mode("F22")
async def test_a_fleet_whose_workers_are_all_down_says_why() -> None:
    async with fleet(1) as (pool, fakes):
        fakes[0].behave = fakes[0].states(503)
        fakes[0].healthy = False
        for expected in ("w0 says 503", r"no worker serves: w0 is down \("):
            with pytest.raises(Unavailable, match=expected):
                await pool.run(ROUTE, work)


@pytest.mark.failure_mode("F35")
@pytest.mark.parametrize("how", ["reset", "states 503", "cut", "dead"])
async def test_a_request_whose_worker_fails_is_served_by_another(how: str) -> None:
    async with fleet(2) as (pool, fakes):
        home, other = home_of(pool, fakes, ROUTE)
        home.healthy = False
        if how == "dead":
            await home.die()
        else:
            home.behave = {
                "reset": home.reset,
                "states 503": home.states(503),
                "cut": home.events(1, then="cut"),
            }[how]
        assert await pool.run(ROUTE, work) == other.name
        assert state(pool, home) == "down"
        requests = home.requests
        assert [await pool.run(ROUTE, work) for _ in range(3)] == [other.name] * 3
        assert home.requests == requests
        assert pool.in_flight == 0


@pytest.mark.failure_mode("F35")
async def test_a_worker_that_dies_with_requests_on_it_loses_none() -> None:
    async with fleet(2) as (pool, fakes):
        home, other = home_of(pool, fakes, ROUTE)
        for fake in fakes:
            fake.behave = fake.held
        tasks = [asyncio.create_task(pool.run(ROUTE, work)) for _ in range(8)]
        await until(lambda: home.requests + other.requests == 8)
        await home.die()
        other.gate.set()
        assert await asyncio.gather(*tasks) == [other.name] * 8


async def test_no_worker_is_tried_twice_and_not_all_of_a_large_fleet() -> None:
    async with fleet(6, probe_seconds=60.0) as (pool, fakes):
        for fake in fakes:
            fake.healthy = False
            fake.behave = fake.states(503)
        with pytest.raises(Unavailable, match="says 503") as refused:
            await pool.run(ROUTE, work)
        assert sorted(fake.requests for fake in fakes) == [0, 0, 1, 1, 1, 1]
    assert refused.value.retry_after is not None


@pytest.mark.parametrize("status", [400, 404, 409, 422, 429])
async def test_a_bad_request_is_not_retried_elsewhere(status: int) -> None:
    async with fleet(2) as (pool, fakes):
        for fake in fakes:
            fake.behave = fake.states(status)
        with pytest.raises(LockstepError, match=f"says {status}") as refused:
            await pool.run(ROUTE, work)
        assert refused.value.status == {422: 400}.get(status, status)
        assert sum(fake.requests for fake in fakes) == 1
        assert {worker.state for worker in pool.workers} == {"serving"}


@pytest.mark.failure_mode("F35")
async def test_a_request_whose_engine_broke_is_retried_on_another_worker() -> None:
    async with fleet(2, probe_seconds=60.0) as (pool, fakes):
        home, other = home_of(pool, fakes, ROUTE)
        home.behave = home.states(500)
        home.healthy = False
        assert await pool.run(ROUTE, work) == other.name
        await until(lambda: state(pool, home) == "down")  # it was probed because of that


async def test_a_request_that_breaks_engines_is_not_sent_to_a_third() -> None:
    async with fleet(4, probe_seconds=60.0) as (pool, fakes):
        for fake in fakes:
            fake.behave = fake.states(500)
        with pytest.raises(EngineFailure):
            await pool.run(ROUTE, work)
        assert sum(fake.requests for fake in fakes) == 2
        with pytest.raises(EngineFailure):  # where it was pinned to, it stays
            await pool.run(replace(ROUTE, worker=fakes[0].name), work)
        assert sum(fake.requests for fake in fakes) == 3


@pytest.mark.failure_mode("F97")
async def test_a_request_that_ends_workers_is_sent_to_two_and_then_refused() -> None:
    deadly = GenerateRequest(prompt_ids=[1, 2, 3], sampling=Sampling(max_tokens=4))
    async with fleet(4, probe_seconds=60.0) as (pool, fakes):
        for fake in fakes:
            fake.behave = fake.reset
        with pytest.raises(Unavailable, match="before a response"):
            await pool.run(ROUTE, work, deadly)
        assert sum(fake.requests > 0 for fake in fakes) == 2
        before = sum(fake.requests for fake in fakes)
        for call in (pool.run(ROUTE, work, deadly), anext(pool.stream(ROUTE, work_stream, deadly))):
            with pytest.raises(BadRequest, match="only one on 2 workers") as refused:
                await call
            assert refused.value.retry_after is not None
        assert sum(fake.requests for fake in fakes) == before
        for fake in fakes:
            fake.behave = fake.respond
        await pool.run(ROUTE, work, replace(deadly, prompt_ids=[1, 2]))


@pytest.mark.failure_mode("F97")
async def test_requests_that_were_not_alone_on_a_dying_worker_are_not_refused() -> None:
    async with fleet(3, probe_seconds=60.0) as (pool, fakes):
        home = next(f for f in fakes if f.name == pool._rendezvous.pick(ROUTE.key).id)  # type: ignore[union-attr]
        home.behave = home.held
        asked = [
            GenerateRequest(prompt_ids=[at], sampling=Sampling(max_tokens=4)) for at in range(2)
        ]
        tasks = [asyncio.create_task(pool.run(ROUTE, work, request)) for request in asked]
        await until(lambda: home.requests == 2)
        await home.die()
        await asyncio.gather(*tasks)
        assert not pool._suspects._deaths


async def test_an_engine_failure_after_a_part_was_delivered_is_raised() -> None:
    async with fleet(2, probe_seconds=60.0) as (pool, _):
        opened: list[str] = []

        async def items(worker: Worker) -> AsyncIterator[str]:
            opened.append(worker.id)
            yield "a part"
            raise EngineFailure("a step failed")

        stream = pool.stream(ROUTE, items)
        assert await anext(stream) == "a part"
        with pytest.raises(EngineFailure, match="a step failed"):
            await anext(stream)
        assert len(opened) == 1


async def test_a_worker_that_died_comes_back_at_the_same_url(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("WARNING")  # as a gateway has it
    async with fleet(2) as (pool, fakes):
        home, other = home_of(pool, fakes, ROUTE)
        await home.die()
        assert await pool.run(ROUTE, work) == other.name
        await home.start()
        await pool.wait_ready(2, 10)
        assert await pool.run(ROUTE, work) == home.name
        said = [record.getMessage() for record in caplog.records]
        assert said[-1].endswith("serves"), "the log must say that the ejected worker is back"


async def test_a_failure_from_before_a_worker_came_back_does_not_eject_it_again() -> None:
    async with fleet(2) as (pool, fakes):
        home, _ = home_of(pool, fakes, ROUTE)
        late = asyncio.Event()

        async def slow(worker: Worker) -> str:
            if worker.id == home.name and not late.is_set():
                await late.wait()
                raise Unavailable("the connection of long ago broke")
            return worker.id

        old = asyncio.create_task(pool.run(ROUTE, slow))
        await until(lambda: pool.in_flight == 1)
        await home.die()
        await until(lambda: state(pool, home) == "down")
        await home.start()
        await pool.wait_ready(2, 10)
        late.set()
        await old
        assert state(pool, home) == "serving"


async def test_a_dead_worker_is_found_without_any_request() -> None:
    async with fleet(2) as (pool, fakes):
        await fakes[0].die()
        await until(lambda: state(pool, fakes[0]) == "down")
        assert pool.workers[0].reason


# Streams


async def test_a_stream_yields_every_item_of_one_worker() -> None:
    async with fleet(2) as (pool, fakes):
        for fake in fakes:
            fake.behave = fake.events(3)
        items = [item async for item in pool.stream(ROUTE, work_stream)]
        assert len(items) == 3
        assert len(set(items)) == 1
        assert pool.in_flight == 0


@pytest.mark.failure_mode("F35")
@pytest.mark.parametrize("how", ["reset", "states 503", "cut"])
async def test_a_stream_that_fails_before_its_first_item_is_retried_elsewhere(how: str) -> None:
    async with fleet(2) as (pool, fakes):
        home, other = home_of(pool, fakes, ROUTE)
        home.healthy = False
        home.behave = {
            "reset": home.reset,
            "states 503": home.states(503),
            "cut": home.events(0, then="cut"),
        }[how]
        other.behave = other.events(2)
        items = [item async for item in pool.stream(ROUTE, work_stream)]
        assert items == [other.name.encode()] * 2


@pytest.mark.failure_mode("F35")
async def test_a_stream_that_fails_after_its_first_item_is_an_error() -> None:
    async with fleet(2) as (pool, fakes):
        home, other = home_of(pool, fakes, ROUTE)
        home.behave = home.events(1, then="hold")
        items = pool.stream(ROUTE, work_stream)
        assert await anext(items) == home.name.encode()
        await home.die()
        with pytest.raises(Unavailable, match="part of the response was delivered"):
            await anext(items)
        assert other.requests == 0
        assert state(pool, home) == "down"
        assert pool.in_flight == 0


async def test_a_stream_that_is_left_early_frees_its_slot_and_its_worker() -> None:
    async with fleet(1) as (pool, fakes):
        fakes[0].behave = fakes[0].events(1, then="hold")
        async with aclosing(pool.stream(ROUTE, work_stream)) as items:
            assert await anext(items) == b"w0"
            assert pool.in_flight == pool.workers[0].in_flight == 1
        assert pool.in_flight == pool.workers[0].in_flight == 0
        await asyncio.wait_for(fakes[0].left.wait(), 10)


# How many at once


async def test_requests_beyond_the_limit_wait_their_turn() -> None:
    async with fleet(1, max_in_flight=2) as (pool, fakes):
        fakes[0].behave = fakes[0].held
        tasks = [asyncio.create_task(pool.run(ROUTE, work)) for _ in range(5)]
        await until(lambda: fakes[0].requests == 2 and pool.waiting == 3)
        assert pool.in_flight == 2
        fakes[0].gate.set()
        assert await asyncio.gather(*tasks) == ["w0"] * 5
        assert pool.in_flight == 0


async def test_a_full_queue_is_busy_and_says_when_to_retry() -> None:
    async with fleet(1, max_in_flight=1, queue_limit=1) as (pool, fakes):
        fakes[0].behave = fakes[0].held
        tasks = [asyncio.create_task(pool.run(ROUTE, work)) for _ in range(2)]
        await until(lambda: pool.waiting == 1)
        with pytest.raises(Busy, match="as many requests are running and queued as") as refused:
            await pool.run(ROUTE, work)
        assert refused.value.retry_after is not None
        fakes[0].gate.set()
        await asyncio.gather(*tasks)


async def test_a_request_that_queued_too_long_is_rejected() -> None:
    async with fleet(1, max_in_flight=1, queue_seconds=0.05) as (pool, fakes):
        fakes[0].behave = fakes[0].held
        first = asyncio.create_task(pool.run(ROUTE, work))
        await until(lambda: pool.in_flight == 1)
        with pytest.raises(Unavailable, match=r"no slot came free within 0\.05 s") as refused:
            await pool.run(ROUTE, work)
        assert refused.value.retry_after is not None
        assert pool.waiting == 0
        fakes[0].gate.set()
        assert await first == "w0"


@pytest.mark.failure_mode("F47")
async def test_cancelling_a_request_frees_its_slot_and_stops_the_worker() -> None:
    async with fleet(1, max_in_flight=1) as (pool, fakes):
        fakes[0].behave = fakes[0].held
        first, second = (asyncio.create_task(pool.run(ROUTE, work)) for _ in range(2))
        await until(lambda: pool.waiting == 1 and fakes[0].requests == 1)
        first.cancel()
        await asyncio.wait_for(fakes[0].left.wait(), 10)
        fakes[0].gate.set()
        assert await second == "w0"
        assert first.cancelled()
        assert pool.in_flight == pool.workers[0].in_flight == 0
        assert pool.workers[0].state == "serving"


async def test_a_cancelled_request_leaves_the_queue() -> None:
    async with fleet(1, max_in_flight=1) as (pool, fakes):
        fakes[0].behave = fakes[0].held
        first, second = (asyncio.create_task(pool.run(ROUTE, work)) for _ in range(2))
        await until(lambda: pool.waiting == 1)
        second.cancel()
        await asyncio.wait((second,))
        assert pool.waiting == 0
        fakes[0].gate.set()
        assert await first == "w0"
        assert pool.in_flight == 0


# Membership


async def test_an_id_is_taken_once() -> None:
    async with fleet(1) as (pool, fakes):
        with pytest.raises(Conflict, match="there is a worker 'w0' already"):
            await pool.add(fakes[0].url, worker_id="w0")
        added = await pool.add(fakes[0].url)
        assert added.id == f"127.0.0.1:{fakes[0].port}"
        with pytest.raises(BadRequest, match="expected http://HOST:PORT"):
            await pool.add("worker-1:8000")


async def test_a_worker_that_is_down_joins_when_it_is_up() -> None:
    fake = FakeWorker("late")
    await fake.start()
    await fake.die()
    async with Pool(probe_seconds=0.05) as pool:
        added = await pool.add(fake.url, worker_id="late")
        assert added.state == "down"
        with pytest.raises(Unavailable, match="has not been reached yet"):
            _ = added.transport
        await fake.start()
        await pool.wait_ready(1, 10)
        assert added.transport.relay is not None
        assert await pool.run(ROUTE, work) == "late"
    await fake.die()


async def test_a_worker_without_a_model_gets_no_traffic() -> None:
    async with fleet(1) as (pool, _):
        fake = FakeWorker("empty")
        fake.models = []
        await fake.start()
        added = await pool.add(fake.url, transport="vllm")
        assert added.state == "down"
        fake.models = [{"id": "m", "owned_by": "vllm"}]
        await pool.wait_ready(2, 10)
        assert added.transport.relay is None
        await fake.die()


async def test_a_worker_is_removed_after_its_requests() -> None:
    async with fleet(2) as (pool, fakes):
        home, other = home_of(pool, fakes, ROUTE)
        home.behave = home.held
        running = asyncio.create_task(pool.run(ROUTE, work))
        await until(lambda: home.requests == 1)
        removal = asyncio.create_task(pool.remove(home.name))
        await until(lambda: state(pool, home) == "draining")
        assert await pool.run(ROUTE, work) == other.name
        assert not removal.done()
        home.gate.set()
        assert await running == home.name
        await asyncio.wait_for(removal, 10)
        assert [worker.id for worker in pool.workers] == [other.name]
        with pytest.raises(NotFound):
            await pool.remove(home.name)


async def test_a_removal_times_out_and_loses_no_request() -> None:
    async with fleet(2) as (pool, fakes):
        home, other = home_of(pool, fakes, ROUTE)
        home.behave = home.held
        running = asyncio.create_task(pool.run(ROUTE, work))
        await until(lambda: home.requests == 1)
        await pool.remove(home.name, drain_seconds=0.01)
        assert await running == other.name


async def test_models_are_those_that_every_worker_serves() -> None:
    async with fleet(2) as (pool, fakes):
        base = {"id": "m", "owned_by": "lockstep", "max_model_len": 100}
        adapter = {"id": "a", "owned_by": "lockstep", "parent": "m", "weight_version": "1"}
        fakes[0].models = [{**adapter, "id": "b"}, adapter, {**base, "weight_version": "1"}]
        fakes[1].models = [adapter, {**base, "weight_version": "2", "max_model_len": 90}]
        cards = await pool.models()
        assert [(card.id, card.weight_version) for card in cards] == [("m", None), ("a", "1")]
        assert cards[0].max_model_len == 90
        await fakes[0].die()
        assert [card.weight_version for card in await pool.models()] == ["2", "1"]


async def test_an_abort_reaches_every_worker_and_counts_the_stopped_requests() -> None:
    async with fleet(3) as (pool, fakes):
        fakes[0].aborted, fakes[2].aborted = 1, 2
        assert await pool.abort("r") == 3
        fakes[0].aborted = None
        assert await pool.abort("r") == 2
        fakes[1].aborted = fakes[2].aborted = None
        assert await pool.abort("r") is None, "vLLM does not report it"


async def test_errors_name_workers_and_not_their_addresses() -> None:
    async def call(worker: Worker) -> None:
        raise Unavailable(f"{worker.url}/v1/chat broke off in the middle of its response")

    # Names of their own, as `lockstep serve` gives them: by default a worker is called by its host.
    async with Pool(probe_seconds=60.0) as pool:
        for at, name in enumerate(("w0", "w1")):
            await pool.add(f"http://127.0.0.1:{9 + at}", worker_id=name)
        with pytest.raises(Unavailable, match="no worker serves: w0 is") as refused:
            await pool.models()
    assert "127.0.0.1" not in refused.value.message
    async with fleet(1, probe_seconds=60.0) as (pool, _):
        (worker,) = pool.workers
        worker.id = "w0"
        with pytest.raises(Unavailable) as refused:
            await pool.run(Affinity(session="s"), call)
    assert refused.value.message == "worker w0/v1/chat broke off in the middle of its response"
