"""Elections and fencing on a real PostgreSQL: who does not lead writes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from time import monotonic, time

import pytest

from lockstep.storage.desired_state import Desired, WorkerRecord
from lockstep.storage.postgres.control import PostgresControlStore
from lockstep.storage.postgres.database import PostgresDatabase
from lockstep.storage.postgres.leadership import PostgresLeadership
from lockstep.tokens.errors import Superseded, Unavailable
from lockstep.tokens.operation import Operation
from tests.fleet.fakes import until
from tests.scale.postgres_server import postgres_server

LEASE, RENEW = 1.0, 0.1


class Candidate:
    """One gateway's part in the elections, and its store."""

    def __init__(self, database: PostgresDatabase, address: str, lease: float) -> None:
        self.leadership = PostgresLeadership(database, lease_seconds=lease, renew_seconds=RENEW)
        self.leadership.announce(address)
        self.store = PostgresControlStore(database, self.leadership)
        self.changes = 0

    async def start(self, stored: int = 0) -> None:
        await self.leadership.start(stored, self._changed)

    def _changed(self) -> None:
        self.changes += 1

    def fall_asleep(self) -> None:
        """Renews no more, as a process that is stopped."""
        assert self.leadership._task is not None
        self.leadership._task.cancel()


@asynccontextmanager
async def candidates(
    url: str, count: int = 2, lease: float = LEASE
) -> AsyncIterator[list[Candidate]]:
    async with AsyncExitStack() as stack:
        made = []
        for number in range(count):
            database = PostgresDatabase(url)
            await database.open()
            stack.push_async_callback(database.close)
            made.append(Candidate(database, f"http://gateway-{number}", lease))
            stack.push_async_callback(made[-1].leadership.stop)
        yield made


async def test_one_leads_and_the_others_know_where_it_is(store_url: str) -> None:
    async with candidates(store_url, 3) as (one, two, three):
        for each in (one, two, three):
            await each.start()
        await until(lambda: len(three.leadership.view().gateways) == 3)
        assert [each.leadership.leads for each in (one, two, three)] == [True, False, False]
        assert [each.leadership.view().role for each in (one, two)] == ["leader", "follower"]
        assert two.leadership.view().leader == "http://gateway-0"
        assert two.leadership.generation == one.leadership.generation
        assert [each.leads for each in three.leadership.view().gateways] == [True, False, False]


async def test_the_number_rises_at_every_election_and_above_what_the_store_and_workers_had(
    store_url: str,
) -> None:
    async with candidates(store_url) as (one, two):
        ahead = int((time() + 3600) * 1000)
        await one.start(stored=ahead)  # of a gateway whose clock was ahead
        first = one.leadership.generation
        assert first > ahead
        await two.start()
        await one.leadership.stop()
        await until(lambda: two.leadership.leads)
        assert two.leadership.generation == first + 1
        assert await two.leadership.rise_above(first + 10) == first + 11
        assert await two.leadership.rise_above(5) == first + 11
        with pytest.raises(Superseded):
            await one.leadership.rise_above(first + 20)


@pytest.mark.failure_mode("F62")
async def test_a_leader_that_missed_its_lease_leads_no_more_and_can_write_nothing(
    store_url: str,
) -> None:
    async with candidates(store_url) as (old, new):
        await old.start()
        await new.start()
        generation = old.leadership.generation
        await old.store.save(Desired(version="a", generation=generation))
        old.fall_asleep()
        begun = monotonic()
        await until(lambda: new.leadership.leads)
        assert not old.leadership.leads  # by its own clock, before anybody told it
        assert LEASE - 2 * RENEW < monotonic() - begun < LEASE + 1.0
        await new.store.save(Desired(version="b", generation=new.leadership.generation))
        for write in (
            old.store.save(Desired(version="late", generation=generation)),
            old.store.record(Operation("1", "flush_cache", {})),
            old.store.publish([WorkerRecord("w", "http://w", True, "late", "serving")]),
            old.store.cut_off(),
        ):
            with pytest.raises(Superseded):
                await write
        snapshot = await old.store.snapshot()
        assert (snapshot.desired.version, snapshot.workers) == ("b", ())
        assert await old.store.latest(10) == []


async def test_an_update_and_the_workers_that_proved_it_are_seen_together_or_not_at_all(
    store_url: str,
) -> None:
    async with candidates(store_url) as (leader, follower):
        await leader.start()
        await follower.start()
        news = asyncio.Event()
        await follower.store.watch(news.set)
        mixed: list[object] = []
        stop = asyncio.Event()

        async def look() -> None:
            while not stop.is_set():
                snapshot = await follower.store.snapshot()
                if any(each.version != snapshot.desired.version for each in snapshot.workers):
                    mixed.append(snapshot)

        looking = asyncio.create_task(look())
        generation = leader.leadership.generation
        for number in range(50):
            version = f"v{number}"
            workers = [
                WorkerRecord(f"w{each}", f"http://w{each}", True, version, "serving")
                for each in range(4)
            ]
            await leader.store.save(Desired(version=version, generation=generation), workers)
        stop.set()
        await looking
        assert mixed == []
        await asyncio.wait_for(news.wait(), 1.0)
        last = await follower.store.snapshot()
        assert (last.revision, last.desired.version, len(last.workers)) == (50, "v49", 4)
        await leader.store.publish(last.workers[:1])
        assert len((await follower.store.snapshot()).workers) == 1


async def test_an_operation_that_was_lost_gives_its_key_to_the_one_that_runs_again(
    store_url: str,
) -> None:
    async with candidates(store_url) as (old, new):
        await old.start()
        await new.start()
        await old.store.record(Operation("1", "flush_cache", {}, "k", started=1.0))
        await old.leadership.stop()
        await until(lambda: new.leadership.leads)
        await new.store.cut_off()
        lost = await new.store.by_key("k")
        assert lost is not None
        assert (lost.id, lost.status) == ("1", "lost")
        await new.store.record(Operation("2", "flush_cache", {}, "k", "done", started=2.0))
        again = await old.store.by_key("k")
        assert again is not None
        assert again.id == "2"
        assert [each.id for each in await old.store.latest(5)] == ["2", "1"]


async def test_a_store_that_is_away_ends_the_lease_and_a_decision_waits_for_it_meanwhile() -> None:
    with postgres_server() as server:
        async with candidates(server.schema_url(), 1, lease=2.0) as (leader,):
            await leader.start()
            generation = leader.leadership.generation
            await asyncio.to_thread(server.stop, "immediate")
            saving = asyncio.create_task(
                leader.store.save(Desired(version="a", generation=generation))
            )
            await asyncio.sleep(0.3)
            await asyncio.to_thread(server.start)
            await saving  # one short outage is no failure
            assert (await leader.store.desired()).version == "a"
            assert leader.leadership.generation == generation
            await asyncio.to_thread(server.stop, "immediate")
            with pytest.raises(Unavailable):
                await leader.store.save(Desired(version="b", generation=generation))
            await until(lambda: not leader.leadership.leads, 5.0)
            await asyncio.to_thread(server.start)
            await until(lambda: leader.leadership.leads, 10.0)
            assert leader.leadership.generation == generation  # nobody else was elected
