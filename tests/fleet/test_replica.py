"""A gateway that follows: it serves what the leader recorded, and commands no worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lockstep.fleet.fleet import Fleet
from lockstep.fleet.routing.affinity import Affinity
from lockstep.fleet.routing.pool import Pool
from lockstep.fleet.state_view import worker_views
from lockstep.storage.desired_state import Desired, FleetSnapshot, WorkerRecord
from lockstep.storage.protocols import LeadershipView
from lockstep.storage.sqlite.control import SqliteControlStore
from lockstep.tokens.errors import Unavailable
from tests.fleet.fakes import FakeWorker, until, work


class Follows:
    """A leadership that another gateway always has."""

    shared, leads, generation, holder = True, False, 7, "follower"

    async def start(self, stored: int, changed: Callable[[], None]) -> None: ...
    def announce(self, address: str) -> None: ...
    async def rise_above(self, number: int) -> int:
        raise AssertionError("a follower takes no number")

    def view(self) -> LeadershipView:
        return LeadershipView("follower", 7, "http://leader")

    async def stop(self) -> None: ...


class Told(SqliteControlStore):
    """A store in which a test writes what the leader would."""

    def __init__(self) -> None:
        super().__init__()
        self.now = FleetSnapshot(Desired(), (), 0)
        self.looks = 0
        self.changed: Callable[[], None] = lambda: None

    async def snapshot(self) -> FleetSnapshot:
        self.looks += 1
        return self.now

    async def watch(self, changed: Callable[[], None]) -> None:
        self.changed = changed

    async def save(self, desired: Desired, workers: Sequence[WorkerRecord] | None = None) -> None:
        raise AssertionError("a follower writes nothing")

    def write(self, desired: Desired, *workers: WorkerRecord) -> None:
        self.now = FleetSnapshot(desired, workers, self.now.revision + 1)
        self.changed()


class Untouchable:
    """The control side of a worker, which may be looked at from the outside only."""

    name, url = "lockstep", "http://admin"
    stages = probes_while_paused = True

    async def close(self) -> None: ...
    def fence(self, generation: Callable[[], int], gateway: str) -> None: ...

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a follower called {name}")


@pytest.mark.failure_mode("F75")
async def test_a_follower_routes_only_to_workers_proved_at_the_leader_and_commands_none() -> None:
    fakes = [FakeWorker(f"w{index}") for index in range(3)]
    for fake in fakes:
        await fake.start()
    store = Told()

    def record(index: int, version: str, *, serving: bool = True) -> WorkerRecord:
        state = "serving" if serving else "quarantined"
        fake = fakes[index]
        return WorkerRecord(fake.name, fake.url, serving, version, state, "why")

    def serving() -> list[str]:
        return sorted(worker.id for worker in pool.workers if worker.serves)

    one = Desired(version="v1", agreed=("v1",))
    store.write(one, record(0, "v1"), record(1, "v1"), record(2, "v0"))
    async with Pool(probe_seconds=0.05) as pool, Fleet(pool, store, leadership=Follows()) as fleet:
        for fake in fakes:
            await fleet.add(fake.url, Untouchable(), worker_id=fake.name)  # type: ignore[arg-type]
        # What proved another version, and what is out at the leader, gets nothing.
        await until(lambda: serving() == ["w0", "w1"])
        assert "it has proved 'v0', not 'v1'" in str(pool.get("w2").reason)
        store.write(one, record(0, "v1"), record(1, "v1", serving=False), record(2, "v1"))
        await until(lambda: serving() == ["w0", "w2"])
        assert "the leader has it quarantined: why" in str(pool.get("w1").reason)
        # Another version: those that proved it, at once.
        two = Desired(version="v2", agreed=("v1", "v2"))
        store.write(two, record(0, "v2"), record(1, "v2"), record(2, "v1"))
        await until(lambda: serving() == ["w0", "w1"])
        assert fleet.desired.version == "v2"
        # A failure that only this gateway sees ejects the worker here, until it is well.
        fakes[0].behave = fakes[0].reset
        for _ in range(4):
            assert await pool.run(Affinity("k"), work) == "w1"
            fakes[0].behave = fakes[0].reset
        fakes[0].behave = fakes[0].respond
        await until(lambda: serving() == ["w0", "w1"])
        # A worker of another gateway under the same id is not this one.
        elsewhere = WorkerRecord("w0", "http://elsewhere", True, "v2", "serving")
        store.write(two, elsewhere, record(1, "v2"))
        await until(lambda: serving() == ["w1"])
        with pytest.raises(Unavailable, match="http://leader does"):
            fleet.replica.check_leads()
    for fake in fakes:
        await fake.die()


async def test_the_gpus_of_a_worker_are_in_the_state_of_every_gateway() -> None:
    fake = FakeWorker("w0")
    await fake.start()
    store = Told()
    async with Pool(probe_seconds=0.05) as pool, Fleet(pool, store, leadership=Follows()) as fleet:
        record = WorkerRecord(
            "w0", fake.url, True, "v1", "serving", None, fake.url, "lockstep", gpus=("2", "3")
        )
        store.write(Desired(version="v1", agreed=("v1",)), record)
        await until(lambda: [row["gpus"] for row in worker_views(fleet)] == [["2", "3"]])
        await fleet.add("http://127.0.0.1:9", Untouchable(), worker_id="w1", gpus=("0",))  # type: ignore[arg-type]
        assert worker_views(fleet)[1]["gpus"] == ["0"]
    await fake.die()
