"""Weight updates on simulated workers: all of them or none, and what each fault leaves behind."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from lockstep.checkpoint.manifest import PROBE
from lockstep.checkpoint.probe import Probe
from lockstep.fleet.update.proof import BUILTIN
from lockstep.storage.sqlite.control import SqliteControlStore
from lockstep.tokens.errors import LockstepError
from tests.fleet.fakes import until
from tests.simulator.fault_matrix import run
from tests.simulator.fleet import simulated
from tests.simulator.workers import (
    FIRST,
    Kind,
    SimulatedWorker,
    contents,
    score,
    write_checkpoint,
)


@pytest.mark.failure_mode("F24")
async def test_no_fault_in_any_phase_leads_to_a_mixture(tmp_path: Path) -> None:
    outcomes = await run(tmp_path)
    assert sum(outcome.struck for outcome in outcomes) >= 500
    assert [(outcome.trial, outcome.wrong) for outcome in outcomes if outcome.wrong] == []
    # The workers with faults come back, and the others served all the time.
    assert {outcome.healed for outcome in outcomes} == {3}
    assert min(outcome.serving for outcome in outcomes) >= 2


@pytest.mark.failure_mode("F24")
@pytest.mark.parametrize("method", ["stage", "commit"])
async def test_when_most_workers_fail_the_others_are_rolled_back(
    tmp_path: Path, method: str
) -> None:
    async with simulated(tmp_path) as fleet:
        for worker in fleet.workers[:2]:
            worker.strike(method, "drop")
        with pytest.raises(LockstepError) as failed:
            await fleet.update("a")
        assert failed.value.operation is not None
        assert {"w0", "w1", "w2"} == failed.value.operation.workers.keys()
        assert fleet.fleet.desired.version == FIRST
        fleet.check()
        await fleet.pool.look()
        assert len(fleet.serving()) == 3
        fleet.check()


@pytest.mark.failure_mode("F28")
@pytest.mark.parametrize(("struck", "probes_staged"), [("stage", True), ("commit", False)])
async def test_two_workers_that_differ_prove_nothing_without_a_probe(
    tmp_path: Path, struck: str, probes_staged: bool
) -> None:
    async with simulated(tmp_path, 2, probes_staged=probes_staged) as fleet:
        fleet.workers[0].strike(struck, "corrupt")
        with pytest.raises(LockstepError, match="most workers must agree"):
            await fleet.update("a")
        fleet.check()
        assert fleet.fleet.desired.version == FIRST


@pytest.mark.failure_mode("F28")
async def test_weights_disproved_while_staged_pause_no_worker(tmp_path: Path) -> None:
    async with simulated(tmp_path) as fleet:
        for worker in fleet.workers:
            worker.strike("stage", "corrupt")
        path = Path(fleet.checkpoint("a"))
        right = tuple(tuple(score(ids, fleet.meaning["a"])) for ids in BUILTIN)
        Probe(BUILTIN, right, 0.0).write(path / PROBE)
        with pytest.raises(LockstepError, match="its logprobs are off by") as failed:
            await fleet.fleet.update_weights(str(path), version="a")
        assert failed.value.operation is not None
        results = failed.value.operation.workers.values()
        assert {(one.status, one.phase) for one in results} == {("rolled_back", "prove")}
        for worker in fleet.workers:
            assert worker.calls["pause"] == worker.calls["commit"] == 0
            assert worker.staged is None
        assert len(fleet.serving()) == 3
        fleet.check()


@pytest.mark.failure_mode("F28")
async def test_a_swap_that_went_wrong_is_noticed_although_the_staged_weights_were_right(
    tmp_path: Path,
) -> None:
    async with simulated(tmp_path) as fleet:
        fleet.workers[0].strike("commit", "corrupt")
        operation = await fleet.update("a")
        assert {n: r.status for n, r in operation.workers.items()} == {
            "w0": "quarantined", "w1": "ok", "w2": "ok"
        }  # fmt: skip
        fleet.check()


async def test_weights_proved_while_staged_are_only_swapped_in_the_pause(tmp_path: Path) -> None:
    async with simulated(tmp_path) as fleet:
        for worker in fleet.workers:
            worker.calls.clear()
        await fleet.update("a")
        for worker in fleet.workers:
            # One probe of what was live before; none between commit and resume.
            assert worker.calls == {
                "probe": 1, "stage": 1, "probe staged": 1, "pause": 1, "commit": 1, "resume": 1
            }  # fmt: skip
        fleet.check()


@pytest.mark.failure_mode("F28")
@pytest.mark.parametrize("kind", ["restage", "restart before"])
@pytest.mark.parametrize("phase", ["pause", "commit"])
async def test_weights_that_differ_from_the_proved_ones_are_not_committed(
    tmp_path: Path, kind: Kind, phase: str
) -> None:
    """Between proof and commit, other weights are staged under the same label, or it restarts."""
    async with simulated(tmp_path) as fleet:
        fleet.workers[0].strike(phase, kind)
        operation = await fleet.update("a")
        assert {n: r.status for n, r in operation.workers.items()} == {
            "w0": "quarantined", "w1": "ok", "w2": "ok"
        }  # fmt: skip
        assert operation.workers["w0"].phase == "commit"
        assert fleet.workers[0].weights == fleet.meaning[FIRST]
        fleet.check()
        await fleet.pool.look()
        assert len(fleet.serving()) == 3
        fleet.check()


@pytest.mark.failure_mode("F28")
async def test_a_worker_that_restarted_after_the_commit_is_not_resumed(
    tmp_path: Path,
) -> None:
    async with simulated(tmp_path) as fleet:
        fleet.workers[0].strike("resume", "restart before")
        operation = await fleet.update("a")
        assert (operation.workers["w0"].status, operation.workers["w0"].phase) == (
            "quarantined",
            "resume",
        )
        fleet.check()


@pytest.mark.failure_mode("F28")
async def test_when_most_workers_hold_other_weights_than_they_proved_all_are_rolled_back(
    tmp_path: Path,
) -> None:
    async with simulated(tmp_path) as fleet:
        for worker in fleet.workers[:2]:
            worker.strike("commit", "restage")
        with pytest.raises(LockstepError, match="is staged, and"):
            await fleet.update("a")
        assert fleet.fleet.desired.version == FIRST
        assert {worker.staged for worker in fleet.workers} == {None}
        assert len(fleet.serving()) == 3
        fleet.check()


@pytest.mark.failure_mode("F28")
async def test_a_worker_that_keeps_its_old_weights_does_not_prove_the_new_label(
    tmp_path: Path,
) -> None:
    async with simulated(tmp_path, 1) as fleet:
        fleet.checkpoint("a", seed=0)  # the very weights that are served
        with pytest.raises(LockstepError, match="differ from those before"):
            await fleet.update("a")
        assert fleet.fleet.desired.version == FIRST


async def test_the_same_weights_under_a_new_label_are_accepted_when_their_digest_is_the_same(
    tmp_path: Path,
) -> None:
    async with simulated(tmp_path, model_dir=tmp_path / FIRST) as fleet:
        fleet.checkpoint("again", seed=0)
        await fleet.update("again")
        fleet.check()
        assert fleet.fleet.desired.version == "again"


@pytest.mark.failure_mode("F25")
async def test_a_label_names_one_set_of_weights_forever(tmp_path: Path) -> None:
    async with simulated(tmp_path) as fleet:
        await fleet.update("a")
        await fleet.update("b")
        await fleet.update("a")  # back to what it meant
        fleet.check()
        write_checkpoint(tmp_path / "a", 77)  # written over by a trainer that started again
        for label in ("a", "b", FIRST):
            with pytest.raises(LockstepError, match="other weights need another label"):
                await fleet.fleet.update_weights(str(tmp_path / "a"), version=label)
        assert fleet.workers[0].calls["commit"] == 3
        fleet.check()


@pytest.mark.failure_mode("F25")
async def test_the_next_gateway_remembers_what_a_label_names(tmp_path: Path) -> None:
    where = str(tmp_path / "state.sqlite")
    async with simulated(tmp_path, store=SqliteControlStore(where)) as fleet:
        await fleet.update("a")
    async with simulated(tmp_path, store=SqliteControlStore(where)) as fleet:
        fleet.meaning["a"] = ""
        fleet.checkpoint("a")
        fleet.check()
        write_checkpoint(tmp_path / "a", 77)
        with pytest.raises(LockstepError, match="other weights need another label"):
            await fleet.fleet.update_weights(str(tmp_path / "a"), version="a")


@pytest.mark.failure_mode("F51")
async def test_a_directory_called_like_other_weights_gets_a_label_of_its_own(
    tmp_path: Path,
) -> None:
    """A second run of a trainer that only sends the directory: step_1 again, with other weights."""
    where = str(tmp_path / "state.sqlite")
    runs = [tmp_path / run / "step_1" for run in ("first", "second")]
    for seed, path in enumerate(runs, 50):
        write_checkpoint(path, seed)
    async with simulated(tmp_path, store=SqliteControlStore(where)) as fleet:
        fleet.meaning["step_1"] = contents(runs[0])
        await fleet.fleet.update_weights(str(runs[0]))
        fleet.check()
    async with simulated(tmp_path, store=SqliteControlStore(where)) as fleet:
        fleet.meaning["step_1"] = contents(runs[0])
        operation = await fleet.fleet.update_weights(str(runs[1]))
        label = fleet.fleet.desired.version or ""
        assert label == operation.version
        assert re.fullmatch(r"step_1@[0-9a-f]{12}", label)
        assert any(label in warning for warning in operation.warnings)
        fleet.meaning[label] = contents(runs[1])
        fleet.check()
        commits = fleet.workers[0].calls["commit"]
        again = await fleet.fleet.update_weights(str(runs[1]))
        assert (again.version, fleet.workers[0].calls["commit"]) == (label, commits)
        with pytest.raises(LockstepError, match="other weights need another label"):
            await fleet.fleet.update_weights(str(runs[1]), version="step_1")
        await fleet.fleet.update_weights(str(runs[0]))
        assert fleet.fleet.desired.version == "step_1"
        fleet.check()


@pytest.mark.failure_mode("F26")
async def test_a_worker_that_joins_during_an_update_serves_the_new_version(
    tmp_path: Path,
) -> None:
    """The first worker's state becomes the fleet's; another that joined at that moment is
    slower."""
    async with simulated(tmp_path, 0) as fleet:
        first = fleet.meaning[FIRST]
        quick, slow = SimulatedWorker("quick", first), SimulatedWorker("slow", first)
        slow.latency = lambda: 0.05
        joining = asyncio.create_task(fleet.add(slow))
        await fleet.add(quick)
        await until(lambda: slow.calls["probe"] >= 1)  # it has seen what the fleet serves now
        await fleet.update("a")
        await joining
        assert sorted(fleet.serving()) == ["quick", "slow"]
        fleet.check()


@pytest.mark.failure_mode("F26")
async def test_a_worker_ejected_during_an_update_does_not_return_before_it_ends(
    tmp_path: Path,
) -> None:
    """It is healthy again while the update, which fails later, still works on it."""
    async with simulated(tmp_path) as fleet:
        for worker in fleet.workers[1:]:
            worker.strike("commit", "hang after")
        update = asyncio.create_task(fleet.update("a"))
        while fleet.workers[0].version != "a":
            await asyncio.sleep(0)
        fleet.pool.eject("w0", "a request failed on it")
        looks = asyncio.create_task(fleet.pool.look())
        with pytest.raises(LockstepError) as failed:
            await update
        assert failed.value.operation is not None
        assert failed.value.operation.workers["w0"].status == "rolled_back"
        await looks
        fleet.check()
        await fleet.pool.look()
        assert len(fleet.serving()) == 3
        fleet.check()


@pytest.mark.failure_mode("F26")
async def test_a_worker_ejected_during_an_update_is_not_brought_up_before_it_ends(
    tmp_path: Path,
) -> None:
    """Bringing it up would drop its staged weights, and the commit would find nothing."""
    async with simulated(tmp_path) as fleet:
        fleet.workers[1].strike("stage", "delay")
        update = asyncio.create_task(fleet.update("a"))
        while fleet.workers[0].staged is None:
            await asyncio.sleep(0)
        fleet.pool.eject("w0", "a request failed on it")
        looks = asyncio.create_task(fleet.pool.look())
        assert {result.status for result in (await update).workers.values()} == {"ok"}
        await looks
        assert len(fleet.serving()) == 3
        fleet.check()


@pytest.mark.parametrize("phase", ["stage", "pause", "commit", "resume"])
async def test_a_worker_removed_during_an_update_does_not_stop_it(
    tmp_path: Path, phase: str
) -> None:
    async with simulated(tmp_path) as fleet:
        fleet.workers[1].strike(phase, "hang")
        update = asyncio.create_task(fleet.update("a"))
        while not fleet.workers[1].struck:
            await asyncio.sleep(0)
        await fleet.fleet.remove("w1")
        operation = await update
        assert operation.status == "done"
        assert sorted(fleet.serving()) == ["w0", "w2"]
        fleet.check()


async def test_a_failure_to_record_the_agreement_undoes_the_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with simulated(tmp_path) as fleet:

        async def full(*_: object) -> None:
            raise OSError("no space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(fleet.fleet.state.store, "save", full)
            with pytest.raises(LockstepError, match="no space left"):
                await fleet.update("a")
        assert fleet.fleet.desired.version == FIRST
        assert len(fleet.serving()) == 3
        fleet.check()


async def test_a_bug_in_a_driver_affects_its_own_worker_only(tmp_path: Path) -> None:
    async with simulated(tmp_path) as fleet:

        async def broken(*_: str) -> None:
            raise ZeroDivisionError

        fleet.fleet.worker("w1").admin.commit_proved = broken  # type: ignore[attr-defined]
        operation = await fleet.update("a")
        assert operation.workers["w1"].status == "quarantined"
        assert sorted(fleet.serving()) == ["w0", "w2"]
        fleet.check()


@pytest.mark.parametrize("paused", [False, True])
async def test_workers_that_score_only_while_running_are_held_until_they_have_proved(
    tmp_path: Path, paused: bool
) -> None:
    async with simulated(tmp_path, mute=True) as fleet:
        if paused:
            await fleet.fleet.pause("keep")
        fleet.workers[0].strike("probe", "corrupt", 1 if paused else 2)
        operation = await fleet.update("a")
        assert operation.workers["w0"].status == "quarantined"
        fleet.check()
        await fleet.pool.look()
        assert len(fleet.serving()) == 3  # no worker stays held
        fleet.check()


@pytest.mark.failure_mode("F24")
async def test_a_worker_without_scores_from_before_is_not_accepted_as_rolled_back(
    tmp_path: Path,
) -> None:
    async with simulated(tmp_path, probes_staged=False) as fleet:
        fleet.workers[0].strike("probe", "drop")
        for worker in fleet.workers[1:]:
            worker.strike("commit", "corrupt")
        fleet.workers[2].strike("probe", "corrupt", 2)
        with pytest.raises(LockstepError) as failed:
            await fleet.update("a")
        assert failed.value.operation is not None
        statuses = {n: r.status for n, r in failed.value.operation.workers.items()}
        assert statuses == {"w0": "quarantined", "w1": "rolled_back", "w2": "rolled_back"}
        fleet.check()
        await fleet.pool.look()
        assert len(fleet.serving()) == 3
        fleet.check()
