"""Failures on every worker alike are undone without blaming a worker, and recovery without any."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest

from lockstep.backends.admin import Source
from lockstep.checkpoint import safetensors_file as tensor_file
from lockstep.fleet.fan_out import PhaseBudgets
from lockstep.tokens.errors import BadRequest, Conflict, LockstepError, Unavailable, UpdateFailed
from tests.fleet.fakes import until
from tests.simulator.fleet import Simulation, simulated
from tests.simulator.workers import Kind, write_adapter, write_checkpoint

PATIENT = PhaseBudgets(
    stage=60, pause=60, swap=0.3, commit=60, prove=60, resume=1, straggler=0.3, stage_straggler=0.3
)


def states(fleet: Simulation) -> set[str]:
    return {worker.state for worker in fleet.pool.workers}


@pytest.mark.failure_mode("F29")
async def test_an_adapter_that_no_worker_can_score_is_undone_everywhere(tmp_path: Path) -> None:
    first = str(write_adapter(tmp_path / "one", 31))
    second = str(write_adapter(tmp_path / "two", 32))
    async with simulated(tmp_path) as fleet:
        for name, before in (("y", {}), ("x", {"x"})):
            if before:
                await fleet.fleet.load_adapter("x", first)
            labels = [dict(worker.adapters) for worker in fleet.workers]
            for worker in fleet.workers:
                worker.strike("probe", "null")
            with pytest.raises(UpdateFailed, match="all hold what they held") as failed:
                await fleet.fleet.load_adapter(name, second)
            assert failed.value.operation is not None
            results = failed.value.operation.workers.values()
            assert {result.status for result in results} == {"rolled_back"}
            assert states(fleet) == {"serving"}
            assert [dict(worker.adapters) for worker in fleet.workers] == labels
            fleet.check()


@pytest.mark.failure_mode("F29")
@pytest.mark.parametrize("kind", ["kill", "hang"])
async def test_an_update_is_done_although_its_last_worker_is_lost_before_the_adapters(
    tmp_path: Path, kind: Kind
) -> None:
    async with simulated(tmp_path, 1) as fleet:
        await fleet.fleet.load_adapter("x", str(write_adapter(tmp_path / "one", 31)))
        fleet.workers[0].strike("resume", kind)
        operation = await fleet.update("a")
        assert (operation.status, fleet.fleet.desired.version) == ("done", "a")
        assert "adapter 'x' was not proved on the new weights" in " ".join(operation.warnings)


@pytest.mark.failure_mode("F36")
async def test_an_absent_broadcaster_quarantines_no_worker(tmp_path: Path) -> None:
    async with simulated(tmp_path) as fleet:
        for worker in fleet.workers:
            worker.strike("join", "error")
        with pytest.raises(Unavailable, match="join failed on all 3 workers: it returned 200"):
            await fleet.fleet.init_broadcaster("127.0.0.1", 1)
        assert states(fleet) == {"serving"}
        fleet.check()


@pytest.mark.failure_mode("F36")
async def test_a_source_that_never_sends_quarantines_no_worker(tmp_path: Path) -> None:
    async with simulated(tmp_path) as fleet:
        for worker in fleet.workers:
            worker.strike("stage", "hang")
        with pytest.raises(LockstepError, match="stage took longer"):
            await fleet.fleet.update_weights(source=Source(group="weights"), version="a")
        assert states(fleet) == {"serving"}
        fleet.check()


async def test_a_worker_that_fails_alone_is_quarantined(tmp_path: Path) -> None:
    async with simulated(tmp_path) as fleet:
        fleet.workers[0].strike("flush", "error")
        await fleet.fleet.flush()
        assert fleet.state(fleet.workers[0]) == "quarantined"


@pytest.mark.failure_mode("F22")
async def test_when_no_worker_serves_an_update_runs_on_quarantined_workers(tmp_path: Path) -> None:
    async with simulated(tmp_path) as fleet:
        await fleet.update("a")
        shutil.rmtree(fleet.checkpoint("a"))
        for worker in fleet.workers:
            worker.kill()
            worker.start()
        fleet.workers[2].kill()
        await fleet.pool.look()
        assert fleet.serving() == []
        operation = await fleet.update("b")
        assert "ran on w0, w1, quarantined until then" in operation.warnings[0]
        assert {n: r.status for n, r in operation.workers.items()} == {"w0": "ok", "w1": "ok"}
        await fleet.pool.look()
        assert fleet.serving() == ["w0", "w1"]
        fleet.check()


@pytest.mark.failure_mode("F22")
async def test_the_agreed_version_can_be_loaded_again_from_another_directory(
    tmp_path: Path,
) -> None:
    async with simulated(tmp_path) as fleet:
        await fleet.update("a")
        moved = tmp_path / "elsewhere"
        shutil.move(fleet.checkpoint("a"), moved)
        for worker in fleet.workers:
            worker.kill()
            worker.start()
        await fleet.pool.look()
        assert fleet.serving() == []
        operation = await fleet.fleet.update_weights(str(moved), version="a")
        assert operation.status == "done"
        assert fleet.fleet.desired.checkpoint == str(moved)
        await fleet.pool.look()
        assert len(fleet.serving()) == 3
        fleet.check()


@pytest.mark.failure_mode("F35")
@pytest.mark.parametrize("phase", ["probe", "stage", "probe staged", "pause", "commit", "resume"])
async def test_a_worker_that_hangs_in_any_phase_does_not_block_the_others(
    tmp_path: Path, phase: str
) -> None:
    async with simulated(tmp_path, budget=PATIENT) as fleet:
        fleet.workers[0].strike(phase, "hang")
        begun = perf_counter()
        operation = await fleet.update("a")
        assert perf_counter() - begun < 5
        assert operation.status == "done"
        # Its scores of before are not needed: without them it is judged all the same.
        expected = "ok" if phase == "probe" else "quarantined"
        assert operation.workers["w0"].status == expected
        await fleet.pool.look()
        assert len(fleet.serving()) == 3
        fleet.check()


@pytest.mark.failure_mode("F36")
async def test_a_commit_that_stalls_everywhere_pauses_the_fleet_for_seconds_only(
    tmp_path: Path,
) -> None:
    async with simulated(tmp_path, budget=PATIENT) as fleet:
        for worker in fleet.workers:
            worker.strike("commit", "hang")
        begun = perf_counter()
        with pytest.raises(UpdateFailed, match=r"commit took longer than 0\.3 s"):
            await fleet.update("a")
        assert perf_counter() - begun < 5
        assert not any(worker.paused for worker in fleet.workers)
        assert states(fleet) == {"serving"}
        fleet.check()


async def test_a_worker_that_is_a_little_slower_is_waited_for(tmp_path: Path) -> None:
    # Long enough for a machine that has other things to do, too.
    budget = replace(PATIENT, swap=60, resume=60, straggler=5, stage_straggler=5)
    async with simulated(tmp_path, budget=budget) as fleet:
        fleet.workers[0].latency = lambda: 0.1
        operation = await fleet.update("a")
        assert {result.status for result in operation.workers.values()} == {"ok"}


async def test_two_loads_of_one_adapter_at_once_are_refused(tmp_path: Path) -> None:
    path = str(write_adapter(tmp_path / "one", 31))
    async with simulated(tmp_path) as fleet:
        fleet.workers[0].strike("load", "delay")
        first = asyncio.create_task(fleet.fleet.load_adapter("x", path, key="k"))
        await until(lambda: bool(fleet.fleet.operations.running))
        with pytest.raises(Conflict, match="load_lora_adapter of 'x' is under way as operation"):
            await fleet.fleet.load_adapter("x", path)
        with pytest.raises(Conflict, match="is under way"):
            await fleet.fleet.unload_adapter("x")
        again = asyncio.create_task(fleet.fleet.load_adapter("x", path, key="k"))
        assert (await first).id == (await again).id
        await fleet.fleet.load_adapter("x", path)


@pytest.mark.parametrize("name", ["a\r\nb", "a b", "\x1b[31m", "", "x" * 200, "ü"])
async def test_a_worker_id_that_could_not_be_deleted_again_is_refused(
    tmp_path: Path, name: str
) -> None:
    async with simulated(tmp_path, 1) as fleet:
        admin = fleet.fleet.worker("w0").control
        with pytest.raises(BadRequest, match=r"^id is"):
            await fleet.fleet.add("http://127.0.0.1:1", admin, worker_id=name or "\n")
    assert PhaseBudgets.parse(["stage=5", "swap=0.5"]) == PhaseBudgets(stage=5, swap=0.5)


@pytest.mark.parametrize("option", ["stage", "stage=", "stage=-1", "stage=inf", "lease=3", "a=1=2"])
def test_a_budget_is_a_known_name_and_seconds(option: str) -> None:
    with pytest.raises(BadRequest, match="expected NAME=SECONDS"):
        PhaseBudgets.parse([option])


async def test_oddities_of_a_checkpoint_are_warnings_of_the_operation(tmp_path: Path) -> None:
    async with simulated(tmp_path) as fleet:
        path = Path(fleet.checkpoint("a"))
        rows = np.zeros((256, 8), "<f4")
        tensor_file.write(path / "model.safetensors", {"model.embed_tokens.weight": rows})
        operation = await fleet.update("a")
        assert operation.warnings == [
            "tensor 'model.embed_tokens.weight' of model.safetensors holds nothing but zeros"
        ]
        assert (await fleet.fleet.operations.get(operation.id)) == operation


@pytest.mark.failure_mode("F50")
@pytest.mark.parametrize("name", ["a+b", "a\nb", "a\x1b[1m", "[", "x" * 200, " ", "ü"])
async def test_a_directory_whose_name_is_no_label_needs_one(tmp_path: Path, name: str) -> None:
    async with simulated(tmp_path) as fleet:
        path = write_checkpoint(tmp_path / name, 9)
        with pytest.raises(BadRequest, match=r"^version is"):
            await fleet.fleet.update_weights(str(path))
        assert await fleet.fleet.operations.latest(1) == []
        operation = await fleet.fleet.update_weights(str(path), version="step-9")
        assert operation.status == "done"
