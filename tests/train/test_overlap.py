"""Async mode: a step is learnt while the previous update is proved, and no update is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lockstep.engine.probe import save_checkpoint
from lockstep.fleet.remote import RemoteFleet
from lockstep.tokens import Sample
from lockstep.tokens.errors import CheckpointError
from lockstep.tokens.operation import Operation
from lockstep.train.learning.batch import TrainBatch
from lockstep.train.learning.learner import Learner, StepOutcome
from lockstep.train.publish import Publisher, Worker, workers_of
from lockstep.train.retry import RetryPolicy
from lockstep.train.steps import StepRunner
from tests.processes import TOKEN
from tests.train.conftest import Stack, run_config
from tests.train.rollouts import directory, grouped, relabelled, sampled

AHEAD = {"mode": "async", "max_off_policy": 1, "steps": 3}


class HeldFleet(RemoteFleet):
    """A fleet that delays the first update until the second step is being learnt."""

    learning: asyncio.Event

    async def update_weights(self, weight_dir: Any, version: Any = None, **more: Any) -> Operation:
        if str(version).startswith("step-1"):
            await asyncio.wait_for(self.learning.wait(), 60)
        return await super().update_weights(weight_dir, version, **more)


class RefusingFleet(RemoteFleet):
    """A fleet that rejects the second update."""

    async def update_weights(self, weight_dir: Any, version: Any = None, **more: Any) -> Operation:
        if str(version).startswith("step-2"):
            raise CheckpointError("these weights are refused")
        return await super().update_weights(weight_dir, version, **more)


async def test_the_next_step_is_learnt_during_an_update(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with HeldFleet(stack.process.admin_url, token=TOKEN) as fleet:
        fleet.learning = asyncio.Event()
        loop, learn = asyncio.get_running_loop(), Learner.step

        def step(learner: Learner, batch: TrainBatch, number: int) -> StepOutcome:
            if number == 2:
                loop.call_soon_threadsafe(fleet.learning.set)
            return learn(learner, batch, number)

        monkeypatch.setattr(Learner, "step", step)
        result = await stack.trainer(run_config(tmp_path / "run", loop=AHEAD), fleet=fleet).run()
    assert [step.step for step in result.steps] == [1, 2, 3]
    assert result.steps[0].mismatch_kl == 0.0
    assert all(step.off_policy_max <= 1 for step in result.steps)
    assert all(step.version.startswith(f"step-{step.step}") for step in result.steps)
    assert result.version == result.steps[-1].version


async def test_an_update_that_fails_during_the_next_step_ends_the_run(
    stack: Stack, tmp_path: Path
) -> None:
    async with RefusingFleet(stack.process.admin_url, token=TOKEN) as fleet:
        with pytest.raises(CheckpointError, match="are refused"):
            await stack.trainer(run_config(tmp_path / "run", loop=AHEAD), fleet=fleet).run()
    assert not (tmp_path / "run/checkpoints/step-3").exists()


class CountingFleet(RemoteFleet):
    """A fleet that counts state requests, and may report a worker without an update."""

    state_calls = 0
    updates = 0
    absent: str | None = None

    async def state(self) -> dict[str, Any]:
        self.state_calls += 1
        return await super().state()

    async def update_weights(self, weight_dir: Any, version: Any = None, **more: Any) -> Operation:
        self.updates += 1
        operation = await super().update_weights(weight_dir, version, **more)
        if self.updates > 1 and self.absent is not None:
            operation.workers[next(iter(operation.workers))].status = "quarantined"
        return operation


def by_id(worker: Worker) -> str:
    return str(worker["id"])


@pytest.mark.parametrize(("absent", "state_calls"), [(None, 1), ("one", 3)])
async def test_only_an_update_of_the_whole_fleet_needs_no_state_request(
    stack: Stack, tmp_path: Path, absent: str | None, state_calls: int
) -> None:
    async with CountingFleet(stack.process.admin_url, token=TOKEN) as fleet:
        fleet.absent = absent
        publisher = Publisher(
            fleet, RetryPolicy(60), adapter=None, mode="keep", suffix=f"-{absent}"
        )
        model = AutoModelForCausalLM.from_pretrained(directory("tiny"), dtype=torch.float32)
        for step in range(3):
            where = save_checkpoint(model, tmp_path / f"step-{step}")
            published = await publisher.publish(where, step)
            state = await RemoteFleet.state(fleet)
            assert sorted(published.workers, key=by_id) == sorted(workers_of(state), key=by_id)
            assert published.version == state["version"] == f"step-{step}-{absent}"
            assert publisher.serving() == 2
        assert fleet.state_calls == state_calls


@pytest.fixture(scope="module")
def sample() -> Sample:
    return sampled(count=1)[0]


def runner() -> StepRunner:
    nothing: Any = None
    return StepRunner(
        config=run_config(Path("unused")), directory=nothing, learner=nothing, publisher=nothing,
        exactness=nothing, policy=nothing, teacher=None, in_thread=nothing, on_step=None,
        sinks=nothing, recorder=nothing,
    )  # fmt: skip


async def test_tokens_of_a_pending_update_wait_for_its_report(
    sample: Sample,
) -> None:
    steps = runner()
    steps.clock.tick("step-0", 0)

    async def publish() -> None:
        await asyncio.sleep(0.01)
        steps.clock.tick("step-1", 1)

    steps._publishing = asyncio.create_task(publish())
    await steps.settle_for(grouped([relabelled(sample, "step-0")]))
    assert "step-1" not in steps.clock.steps
    await steps.settle_for(grouped([relabelled(sample, "step-1")]))
    assert steps.clock.step_of("step-1") == 1


async def test_a_pending_update_is_cancelled_when_the_run_fails() -> None:
    steps = runner()

    async def fail() -> None:
        async with steps.overlapping():
            steps._publishing = asyncio.create_task(asyncio.sleep(60))
            await asyncio.sleep(0)
            raise RuntimeError("the run's own")

    with pytest.raises(RuntimeError, match="the run's own"):
        await fail()
    assert steps._publishing is not None
    assert steps._publishing.cancelled()
