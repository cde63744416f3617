"""A worker that joins or returns is brought to the agreed state, whatever it holds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.simulator.fleet import simulated
from tests.simulator.workers import SimulatedWorker, write_adapter


@pytest.mark.failure_mode("F26")
async def test_a_joiner_gets_version_adapters_and_pause_and_is_proved(tmp_path: Path) -> None:
    adapter = str(write_adapter(tmp_path / "adapter", 40))
    async with simulated(tmp_path, 2) as fleet:
        await fleet.update("a")
        await fleet.fleet.load_adapter("x", adapter)
        await fleet.fleet.pause("keep")
        joiner = SimulatedWorker("new", fleet.meaning["default"])
        joiner.adapters["left over"] = "from another fleet"
        await fleet.add(joiner)
        assert "new" in fleet.serving()
        assert (joiner.version, joiner.paused, list(joiner.adapters)) == ("a", True, ["x"])
        fleet.check()


@pytest.mark.failure_mode("F26")
async def test_a_joiner_that_reports_the_right_version_must_prove_it_by_its_scores(
    tmp_path: Path,
) -> None:
    async with simulated(tmp_path, 2) as fleet:
        await fleet.update("a")
        liar = SimulatedWorker("liar", "other weights")
        liar.version = "a"
        await fleet.add(liar)
        assert liar.calls["stage"] == 1  # its label is right, its weights are replaced
        fleet.check()


@pytest.mark.failure_mode("F28")
async def test_a_joiner_with_other_scores_is_kept_out_when_there_is_no_checkpoint(
    tmp_path: Path,
) -> None:
    async with simulated(tmp_path, 2) as fleet:
        await fleet.add(SimulatedWorker("other", "other weights"))
        assert sorted(fleet.serving()) == ["w0", "w1"]
        reason = fleet.fleet.worker("other").reason
        assert reason is not None
        assert "its logprobs are off by" in reason


@pytest.mark.failure_mode("F49")
async def test_a_worker_that_cannot_show_its_weights_is_kept_out_when_that_is_required(
    tmp_path: Path,
) -> None:
    async with simulated(tmp_path, 1, require_proof="held") as fleet:
        assert fleet.serving() == []
        reason = fleet.fleet.worker("w0").reason
        assert reason is not None
        assert "--require-proof held is set, and this worker shows less" in reason


@pytest.mark.failure_mode("F24")
async def test_a_commit_undone_on_other_workers_is_undone_on_a_returning_worker(
    tmp_path: Path,
) -> None:
    """There is no checkpoint of the first weights, so the worker can only roll back."""
    async with simulated(tmp_path, probes_staged=False) as fleet:
        fleet.workers[0].strike("commit", "swallow")
        fleet.workers[1].strike("probe", "corrupt", 2)
        with pytest.raises(Exception, match="was undone"):
            await fleet.update("a")
        assert fleet.workers[0].version == "a"
        fleet.check()
        await fleet.pool.look()
        assert len(fleet.serving()) == 3
        fleet.check()


async def test_removing_a_worker_ends_its_bring_up(tmp_path: Path) -> None:
    async with simulated(tmp_path) as fleet:
        await fleet.update("a")
        fleet.workers[0].kill()
        fleet.workers[0].start()
        fleet.workers[0].strike("stage", "delay")
        looking = asyncio.create_task(fleet.pool.look())
        while not fleet.workers[0].struck:
            await asyncio.sleep(0)
        await fleet.fleet.remove("w0")
        await looking
        assert sorted(fleet.serving()) == ["w1", "w2"]
        assert [worker.id for worker in fleet.fleet.workers] == ["w1", "w2"]
        fleet.check()
