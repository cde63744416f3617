"""One real worker of three fails in one phase of an update: the fleet never serves a mixture."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.storage.sqlite.control import SqliteControlStore
from lockstep.tokens.errors import LockstepError
from tests.fleet.fakes import until
from tests.fleet.fault_injector import Kind
from tests.fleet.live_fleet import FIRST, SEQUENCES, Checkpoints, Workers, live, running


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with running(3) as workers:
        yield workers


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints.make(tmp_path_factory.mktemp("checkpoints"))


FAULTS: list[tuple[str, int, Kind]] = [
    ("probe", 1, "drop"),
    ("stage", 1, "hang"),
    ("stage", 1, "error"),
    ("stage", 1, "null"),
    ("stage", 1, "swallow"),
    ("pause_generation", 1, "corrupt"),
    ("commit", 1, "drop"),
    ("commit", 1, "swallow"),
    ("commit", 1, "null"),
    ("commit", 1, "error"),
    ("probe", 2, "corrupt"),
    ("probe", 2, "null"),
    ("resume_generation", 1, "error"),
    ("resume_generation", 1, "swallow"),
]


@pytest.mark.failure_mode("F24")
@pytest.mark.failure_mode("F23")
async def test_all_serving_workers_hold_the_label_whatever_one_worker_does_in_any_phase(
    workers: Workers, made: Checkpoints
) -> None:
    """One fleet goes through all faults, from one checkpoint to the next and back."""
    async with live(workers, made) as fleet:
        happened = []
        for turn, (method, number, kind) in enumerate(FAULTS):
            before = fleet.fleet.desired.version
            aim = "b" if before == "a" else "a"
            struck = fleet.injectors[turn % 3]
            struck.strike(method, kind, number=number, count=9)
            try:
                await fleet.update(aim)
            except LockstepError as failed:
                assert "worker" in failed.message
                assert await fleet.check() == before
            else:
                assert await fleet.check() == aim
                happened.append((method, kind))
            assert struck.struck, (method, kind)
            assert await fleet.healed() == fleet.fleet.desired.version
        # A worker that refuses the checkpoint stops the update; one that is lost does not.
        refused = [(m, k) for m, _, k in FAULTS if (m, k) not in happened]
        assert refused == [("stage", "error")]


@pytest.mark.failure_mode("F35")
@pytest.mark.parametrize(("method", "kind"), [("stage", "kill"), ("commit", "kill after")])
async def test_a_worker_killed_during_an_update_is_named_and_returns_to_the_agreed_version(
    workers: Workers, made: Checkpoints, method: str, kind: Kind
) -> None:
    async with live(workers, made) as fleet:
        fleet.injectors[1].strike(method, kind)
        operation = await fleet.update("a")
        assert operation.workers["w1"].status == "quarantined"
        assert operation.workers["w1"].error
        assert 1 not in fleet.serving()
        assert await fleet.check() == "a"
        assert await fleet.healed() == "a"


@pytest.mark.failure_mode("F36")
async def test_a_worker_that_hangs_in_pause_is_quarantined_in_time_and_no_other_stays_paused(
    workers: Workers, made: Checkpoints
) -> None:
    async with live(workers, made) as fleet:
        fleet.injectors[2].strike("pause_generation", "hang", count=99)
        async with asyncio.timeout(20):
            operation = await fleet.update("a", mode="abort")
        assert operation.workers["w2"].status == "quarantined"
        assert operation.pause_seconds is not None
        assert sorted(fleet.serving()) == [0, 1]
        assert await fleet.check() == "a"  # which says that they are not paused
        assert await fleet.healed() == "a"


@pytest.mark.failure_mode("F28")
async def test_a_silently_wrong_worker_is_caught_and_corrected(
    workers: Workers, made: Checkpoints
) -> None:
    async with live(workers, made) as fleet:

        async def other_weights() -> None:
            """Its label stays right; what it computes with is something else."""
            await workers.processes[0].control(
                "update_weights_from_disk", model_path=str(made.paths["x"]), weight_version="a"
            )

        fleet.injectors[0].strike("commit", "hook", hook=other_weights)
        operation = await fleet.update("a")
        assert operation.workers["w0"].status == "quarantined"
        assert "as proved was requested" in (operation.workers["w0"].error or "")
        assert 0 not in fleet.serving()
        assert await fleet.check() == "a"
        assert await fleet.healed() == "a"


@pytest.mark.failure_mode("F28")
async def test_without_a_probe_the_worker_that_scores_differently_is_quarantined(
    workers: Workers, made: Checkpoints
) -> None:
    async with live(workers, made) as fleet:

        async def other_weights() -> None:
            await workers.processes[0].control(
                "update_weights_from_disk", model_path=str(made.paths["x"]), weight_version="c"
            )

        fleet.injectors[0].strike("commit", "hook", hook=other_weights)
        operation = await fleet.update("c")
        assert {n: r.status for n, r in operation.workers.items()} == {
            "w0": "quarantined", "w1": "ok", "w2": "ok"
        }  # fmt: skip
        assert await fleet.check() == "c"


@pytest.mark.failure_mode("F24")
@pytest.mark.failure_mode("F28")
async def test_a_probe_that_no_worker_reproduces_rolls_all_back(
    workers: Workers, made: Checkpoints, tmp_path: Path
) -> None:
    """The trainer shipped one checkpoint and the probe of another."""
    wrong = shutil.copytree(made.paths["c"], tmp_path / "wrong")
    shutil.copy(made.paths["a"] / "probe.safetensors", wrong)
    async with live(workers, made) as fleet:
        with pytest.raises(LockstepError) as failed:
            await fleet.fleet.update_weights(str(wrong), version="wrong")
        assert failed.value.operation is not None
        results = failed.value.operation.workers
        assert {result.status for result in results.values()} == {"rolled_back"}
        assert len(fleet.serving()) == 3
        assert await fleet.check() == FIRST


@pytest.mark.failure_mode("F26")
async def test_a_worker_that_joins_or_restarts_gets_no_traffic_before_it_holds_everything(
    workers: Workers, made: Checkpoints
) -> None:
    async with live(workers, made, joined=2) as fleet:
        await fleet.update("a")
        fleet.injectors[2].strike("probe", "corrupt", count=99)
        await fleet.add(2)
        assert fleet.fleet.worker("w2").state == "quarantined"
        assert sorted(fleet.serving()) == [0, 1]
        assert await fleet.healed() == "a"
        seen = fleet.fleet.worker("w2").since
        fleet.injectors[2].worker = workers.restart(2)  # holds what it was started with
        await until(lambda: fleet.fleet.worker("w2").since > seen and 2 in fleet.serving(), 30)
        assert await fleet.check() == "a"


@pytest.mark.failure_mode("F26")
async def test_the_desired_state_survives_the_gateway_and_workers_are_brought_to_it(
    workers: Workers, made: Checkpoints, tmp_path: Path
) -> None:
    where = str(tmp_path / "state.sqlite")
    async with live(workers, made, store=SqliteControlStore(where)) as fleet:
        await fleet.update("b", key="once")
        await fleet.fleet.pause("keep", lease_seconds=60)
    await workers.reset(made.paths[FIRST])  # the workers restarted as well
    async with live(workers, made, store=SqliteControlStore(where)) as fleet:
        assert fleet.fleet.desired.paused == "keep"
        assert await fleet.healed() == "b"
        staged = fleet.injectors[0].calls["stage"]
        assert (await fleet.update("b", key="once")).status == "done"
        assert fleet.injectors[0].calls["stage"] == staged
        await fleet.fleet.resume()
        assert await fleet.check() == "b"


@pytest.mark.failure_mode("F25")
async def test_an_update_continues_without_its_caller_and_its_retry_does_not_update_again(
    workers: Workers, made: Checkpoints
) -> None:
    async with live(workers, made) as fleet:
        fleet.injectors[0].strike("commit", "delay", seconds=0.5)
        calls = fleet.injectors[0].calls
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await fleet.update("a", key="k1")
        first, second = await asyncio.gather(
            fleet.update("a", key="k1"), fleet.update("a", key="k1")
        )
        assert first.id == second.id
        assert (await fleet.update("a")).status == "done"  # the same weights, without a key
        assert (calls["stage"], calls["commit"]) == (1, 1)
        assert await fleet.check() == "a"


async def test_a_trainer_that_paused_the_fleet_finds_it_paused_after_an_update(
    workers: Workers, made: Checkpoints
) -> None:
    async with live(workers, made) as fleet:
        await fleet.fleet.pause("keep")
        await fleet.update("a")
        assert await fleet.check() == "a"
        fleet.injectors[1].strike("commit", "null")
        await fleet.update("b")
        assert await fleet.healed() == "b"
        assert fleet.fleet.desired.paused == "keep"
        await fleet.fleet.resume()
        assert await fleet.check() == "b"


@pytest.mark.failure_mode("F37")
async def test_the_pause_of_a_trainer_that_died_ends_by_itself(
    workers: Workers, made: Checkpoints
) -> None:
    async with live(workers, made) as fleet:
        await fleet.update("a")
        await fleet.fleet.pause("keep", lease_seconds=0.3)
        assert await fleet.check() == "a"
        await until(lambda: fleet.fleet.desired.paused is None, 10)
        await until(lambda: not fleet.fleet.operations.running, 10)
        assert await fleet.check() == "a"


def test_the_probe_sequences_tell_all_checkpoints_apart(made: Checkpoints) -> None:
    assert [made.held(scores) for scores in made.scores.values()] == list(made.scores)
    assert len(SEQUENCES) == 2
