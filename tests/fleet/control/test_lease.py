"""A pause ends by itself: with a full disk, after any error, and whatever the clock does."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from time import time

import pytest

from lockstep.fleet.control import lease as module
from lockstep.fleet.control.lease import Lease
from lockstep.storage.sqlite.control import SqliteControlStore
from lockstep.tokens.errors import LockstepError, Unavailable
from tests.fleet.fakes import until
from tests.simulator.fleet import simulated


def fill(store: SqliteControlStore) -> None:
    """From now on SQLite says that the disk is full."""
    store._db.execute("CREATE TABLE filler (body BLOB)")
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(sqlite3.OperationalError, match="disk is full"):
        store._db.executemany("INSERT INTO filler VALUES (zeroblob(?))", [(900,)] * 100)


@pytest.mark.failure_mode("F37")
async def test_a_lease_ends_although_the_disk_is_full(tmp_path: Path) -> None:
    where = str(tmp_path / "state.sqlite")
    store = SqliteControlStore(where)
    async with simulated(tmp_path, store=store) as fleet:
        await fleet.fleet.pause("keep", lease_seconds=0.2)
        fill(store)
        await until(lambda: not any(worker.paused for worker in fleet.workers))
        await until(lambda: not fleet.fleet.operations.running)
        assert fleet.fleet.desired.paused is None
        ended = (await fleet.fleet.operations.latest(1))[0]
        assert (ended.kind, ended.status) == ("end_of_lease", "done")
        assert "not recorded" in ended.warnings[0]
        fleet.check()
        # What must be remembered is refused, with the reason, and changes nothing.
        with pytest.raises(Unavailable, match="disk is full"):
            await fleet.fleet.pause("keep")
        with pytest.raises(LockstepError, match="disk is full"):
            await fleet.update("a")
        assert not any(worker.paused for worker in fleet.workers)
        fleet.check()
        store._db.execute("PRAGMA max_page_count = 1000000")
        await fleet.update("b")
        # What could not be recorded then is now.
        kinds = [operation.kind for operation in await store.latest(10)]
        assert kinds.count("end_of_lease") == 1
        fleet.check()


@pytest.mark.failure_mode("F37")
async def test_resume_works_although_nothing_can_be_written(tmp_path: Path) -> None:
    store = SqliteControlStore(str(tmp_path / "state.sqlite"))
    async with simulated(tmp_path, store=store) as fleet:
        await fleet.fleet.pause("keep")
        store._db.execute("PRAGMA query_only = ON")
        with pytest.raises(Unavailable, match="cannot be read or written"):
            await fleet.fleet.flush()
        operation = await fleet.fleet.resume(key="k")
        assert (operation.status, "not recorded" in operation.warnings[0]) == ("done", True)
        assert (await fleet.fleet.resume(key="k")).id == operation.id
        assert (await fleet.fleet.operations.get(operation.id)) == operation
        fleet.check()


@pytest.mark.failure_mode("F37")
async def test_ending_a_lease_is_retried_after_any_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    errors: list[Exception] = [OSError("disk"), KeyError("a bug"), Unavailable("nobody")]
    ended: list[float] = []

    async def end(at: float) -> None:
        if errors:
            raise errors.pop()
        ended.append(at)

    lease = Lease(end)
    lease.watch(moment := time())
    await until(lambda: bool(ended))
    assert ended == [moment]


@pytest.mark.failure_mode("F37")
async def test_a_clock_that_was_set_back_does_not_extend_a_lease() -> None:
    ended: list[float] = []

    async def end(at: float) -> None:
        ended.append(at)

    lease = Lease(end)
    lease.watch(time() + 100_000, 0.05)
    await until(lambda: bool(ended), 5)
