"""Operations: one at a time, once per key, never over no workers; pauses with a lease; adapters."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from lockstep.backends.admin import Source
from lockstep.storage.sqlite.control import SqliteControlStore
from lockstep.tokens.errors import AdapterError, BadRequest, Conflict, LockstepError, NotFound
from lockstep.tokens.operation import Operation
from tests.fleet.fakes import until
from tests.simulator.fleet import simulated
from tests.simulator.workers import write_adapter


@pytest.mark.failure_mode("F22")
async def test_every_operation_over_no_workers_fails_with_503(tmp_path: Path) -> None:
    adapter = str(write_adapter(tmp_path / "adapter", 5))
    async with simulated(tmp_path, 0) as simulation:
        fleet = simulation.fleet
        before = fleet.desired
        calls = [
            fleet.update_weights(simulation.checkpoint("a")),
            fleet.update_weights(source=Source(shared="block"), version="a"),
            fleet.pause(),
            fleet.resume(),
            fleet.flush(),
            fleet.load_adapter("x", adapter),
            fleet.unload_adapter("x"),
            fleet.init_broadcaster("127.0.0.1", 1),
        ]
        for call in calls:
            with pytest.raises(LockstepError) as failed:
                await call
            assert (failed.value.status, failed.value.code) == (503, "unavailable")
        assert fleet.desired == before


@pytest.mark.failure_mode("F22")
async def test_every_operation_fails_when_no_worker_serves(tmp_path: Path) -> None:
    async with simulated(tmp_path, 2) as fleet:
        await fleet.update("a")
        for worker in fleet.workers:
            worker.kill()
        with pytest.raises(LockstepError):
            await fleet.fleet.pause()
        before = fleet.fleet.desired
        with pytest.raises(LockstepError, match="none of 2 workers is serving"):
            await fleet.update("a")  # even though it is the version that was served
        assert fleet.fleet.desired == before


@pytest.mark.failure_mode("F25")
async def test_two_callers_with_one_key_share_one_operation(tmp_path: Path) -> None:
    async with simulated(tmp_path) as fleet:
        calls = [fleet.fleet.flush(key="k") for _ in range(8)]
        operations = await asyncio.gather(*calls)
        assert len({operation.id for operation in operations}) == 1
        assert fleet.workers[0].calls["flush"] == 1


@pytest.mark.failure_mode("F25")
async def test_a_key_is_never_reused_for_another_request_not_even_while_it_runs(
    tmp_path: Path,
) -> None:
    async with simulated(tmp_path) as fleet:
        fleet.workers[0].strike("flush", "delay")
        running = asyncio.create_task(fleet.fleet.flush(key="k"))
        await until(lambda: bool(fleet.fleet.operations.running))
        with pytest.raises(Conflict, match="was used for flush_cache"):
            await fleet.fleet.resume(key="k")
        await running
        with pytest.raises(Conflict, match="was used for flush_cache"):
            await fleet.fleet.resume(key="k")


@pytest.mark.failure_mode("F25")
async def test_operations_of_a_killed_gateway_are_lost_and_can_be_run_again(
    tmp_path: Path,
) -> None:
    store = SqliteControlStore(str(tmp_path / "state.sqlite"))
    await store.record(Operation("1", "flush_cache", {}, "k", started=1.0))
    async with simulated(tmp_path, store=store) as fleet:
        recorded = await fleet.fleet.operations.get("1")
        assert recorded is not None
        assert (recorded.status, recorded.error) == ("lost", "the gateway ended before it did")
        again = await fleet.fleet.flush(key="k")
        assert (again.id != "1", again.status) == (True, "done")
        assert (await fleet.fleet.flush(key="k")).id == again.id


async def test_the_store_is_used_from_many_threads_at_once(tmp_path: Path) -> None:
    store = SqliteControlStore(str(tmp_path / "state.sqlite"))

    async def write(number: int) -> None:
        for turn in range(20):
            await store.record(Operation(f"{number}.{turn}", "flush_cache", {}, f"k{number}"))
            await store.save(await store.desired())
            assert await store.by_key(f"k{number}") is not None

    await asyncio.gather(*(write(number) for number in range(8)))
    assert len(await store.latest(1000)) == 160
    await store.cut_off()
    assert (await store.latest(1))[0].status == "lost"
    await store.close()


@pytest.mark.failure_mode("F37")
async def test_a_worker_that_returns_after_the_lease_ended_is_not_paused(
    tmp_path: Path,
) -> None:
    async with simulated(tmp_path) as fleet:
        await fleet.fleet.pause("keep", lease_seconds=0.05)
        for worker in fleet.workers:
            fleet.fleet.state.quarantine(fleet.fleet.worker(worker.name), "it is lost")
        await until(lambda: fleet.fleet.desired.paused is None)
        await fleet.pool.look()
        assert len(fleet.serving()) == 3
        fleet.check()


@pytest.mark.failure_mode("F37")
async def test_a_lease_that_ends_while_its_renewal_is_queued_does_not_end_the_renewed_pause(
    tmp_path: Path,
) -> None:
    async with simulated(tmp_path) as fleet:
        await fleet.fleet.pause("keep", lease_seconds=0.1)
        until_then = fleet.fleet.desired.lease_until
        assert until_then is not None
        async with fleet.fleet.operations.lock:  # something long is under way
            renewal = asyncio.create_task(fleet.fleet.pause("keep", lease_seconds=60))
            kinds: list[str] = []
            await until(lambda: "end_of_lease" in [o.kind for o in fleet.fleet.operations.running])
            kinds = [operation.kind for operation in fleet.fleet.operations.running]
        assert kinds == ["pause", "end_of_lease"]
        await renewal
        await until(lambda: not fleet.fleet.operations.running)
        assert fleet.fleet.desired.paused == "keep"
        fleet.check()


@pytest.mark.failure_mode("F37")
async def test_a_lease_continues_in_the_next_gateway(tmp_path: Path) -> None:
    where = str(tmp_path / "state.sqlite")
    async with simulated(tmp_path, store=SqliteControlStore(where)) as fleet:
        await fleet.fleet.pause("keep", lease_seconds=0.3)
    async with simulated(tmp_path, store=SqliteControlStore(where)) as fleet:
        assert fleet.fleet.desired.paused == "keep"
        await until(lambda: fleet.fleet.desired.paused is None)
        await until(lambda: not fleet.fleet.operations.running)
        fleet.check()


@pytest.mark.failure_mode("F36")
async def test_a_pause_that_fails_on_all_workers_leaves_none_paused(tmp_path: Path) -> None:
    async with simulated(tmp_path) as fleet:
        for worker in fleet.workers:
            worker.strike("pause", "hang after")
        with pytest.raises(LockstepError, match="pause failed on all 3 workers"):
            await fleet.fleet.pause("keep")
        assert fleet.fleet.desired.paused is None
        await fleet.pool.look()
        assert len(fleet.serving()) == 3
        fleet.check()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
async def test_a_lease_must_be_finite(tmp_path: Path, seconds: float) -> None:
    async with simulated(tmp_path, 1) as fleet:
        with pytest.raises(BadRequest, match="lease_seconds"):
            await fleet.fleet.pause(lease_seconds=seconds)


async def test_a_cancelled_removal_removes_the_worker_completely(tmp_path: Path) -> None:
    async with simulated(tmp_path) as fleet:
        fleet.fleet.worker("w1").in_flight = 1  # a request that does not end
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await fleet.fleet.remove("w1")
        with pytest.raises(NotFound):
            fleet.fleet.worker("w1")
        await fleet.add(fleet.workers[1])
        assert len(fleet.serving()) == 3


@pytest.mark.failure_mode("F29")
async def test_workers_that_may_hold_an_adapter_whose_load_was_lost_do_not_serve(
    tmp_path: Path,
) -> None:
    first = str(write_adapter(tmp_path / "one", 31))
    second = str(write_adapter(tmp_path / "two", 32))
    async with simulated(tmp_path) as fleet:
        await fleet.fleet.load_adapter("x", first)
        for worker, kind in zip(fleet.workers, ("swallow", "drop", "swallow"), strict=True):
            worker.strike("load", kind)  # type: ignore[arg-type]
        with pytest.raises(LockstepError):
            await fleet.fleet.load_adapter("x", second)
        fleet.check()
        await fleet.pool.look()
        assert len(fleet.serving()) == 3
        fleet.check()


@pytest.mark.failure_mode("F29")
async def test_the_first_worker_has_no_more_weight_than_the_others(tmp_path: Path) -> None:
    path = str(write_adapter(tmp_path / "one", 31))
    async with simulated(tmp_path) as fleet:
        fleet.workers[0].strike("probe", "corrupt")
        operation = await fleet.fleet.load_adapter("x", path)
        assert {n: r.status for n, r in operation.workers.items()} == {
            "w0": "quarantined", "w1": "ok", "w2": "ok"
        }  # fmt: skip
        await fleet.pool.look()
        assert len(fleet.serving()) == 3
        fleet.check()


@pytest.mark.failure_mode("F30")
async def test_an_adapter_reloaded_from_the_same_path_has_the_new_contents_everywhere(
    tmp_path: Path,
) -> None:
    path = write_adapter(tmp_path / "one", 31)
    async with simulated(tmp_path) as fleet:
        first = await fleet.fleet.load_adapter("x", str(path))
        write_adapter(path, 32)
        fleet.workers[1].kill()
        fleet.workers[1].start()
        await fleet.pool.look()
        # It can only load what is there now, which the fleet did not agree on: it has to wait.
        assert fleet.state(fleet.workers[1]) == "quarantined"
        second = await fleet.fleet.load_adapter("x", str(path))
        assert first.version != second.version
        await fleet.pool.look()
        assert len(fleet.serving()) == 3
        fleet.check()


async def test_an_adapter_that_is_no_lora_reaches_no_worker(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "one", 31)
    settings = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(settings | {"peft_type": "IA3"}))
    async with simulated(tmp_path, 1) as fleet:
        fleet.workers[0].strike("load", "error")
        with pytest.raises(AdapterError, match="peft_type 'IA3', expected 'LORA'"):
            await fleet.fleet.load_adapter("x", str(path))
        assert fleet.workers[0].adapters == {}


@pytest.mark.failure_mode("F32")
async def test_hundreds_of_adapter_names_leave_nothing_behind(tmp_path: Path) -> None:
    path = str(write_adapter(tmp_path / "one", 31))
    async with simulated(tmp_path, 1) as fleet:
        before = fleet.fleet.desired
        for number in range(600):
            await fleet.fleet.load_adapter(f"name-{number}", path)
            await fleet.fleet.unload_adapter(f"name-{number}")
        assert fleet.fleet.desired == before
        assert fleet.workers[0].adapters == {}
        assert fleet.fleet.operations.running == []
        assert len(await fleet.fleet.operations.latest(10_000)) == 1000


async def test_workers_that_wait_for_a_trainer_hold_up_no_other_operation(tmp_path: Path) -> None:
    async with simulated(tmp_path) as fleet:
        fleet.workers[0].strike("join", "hang")
        waiting = asyncio.create_task(fleet.fleet.init_broadcaster("127.0.0.1", 1, group="g"))
        await until(lambda: fleet.workers[0].calls["join"] == 1)
        async with asyncio.timeout(20):
            await fleet.fleet.flush()
            with pytest.raises(Conflict, match="init_broadcaster of 'g' is under way"):
                await fleet.fleet.init_broadcaster("127.0.0.1", 2, group="g")
        (operation,) = fleet.fleet.operations.running
        assert operation.kind == "init_broadcaster"
        # It ends with its caller, and its record says so.
        waiting.cancel()
        await until(lambda: not fleet.fleet.operations.running)
        recorded = await fleet.fleet.operations.get(operation.id)
        assert recorded is not None
        assert (recorded.status, recorded.error) == ("lost", "its caller left before it ended")
        assert {worker.state for worker in fleet.fleet.state.pool.workers} == {"serving"}
