"""A run that cannot go on says why in one typed error; one that can goes on and counts it."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.files import PutOffSyncs
from lockstep.run_record import Run
from lockstep.tokens import Sample
from lockstep.tokens.errors import BadRequest, Conflict, LockstepError, NotExact, RolloutFailed
from lockstep.train.envs.bundled import Reverse
from lockstep.train.envs.environment import Reward, RolloutContext, Split, Task
from lockstep.train.failure import one_error
from lockstep.train.group_queue import GroupQueue
from lockstep.train.learning.batch import Clock, Rollout, RolloutGroup, is_stale, version_lags
from tests.processes import TOKEN
from tests.train.conftest import Stack, run_config
from tests.train.learning.test_batch import sample

TASK = Task(({"role": "user", "content": "hi"},))
SECONDS = 30.0
ROOT = Path(__file__).parents[2]


class Short(Reverse):
    """Ends after so many training tasks."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        return islice(super().tasks(split, seed), self._count)


class Broken(Reverse):
    """Its source of tasks raises after the first three, or its judge does at once."""

    def __init__(self, *, source: bool) -> None:
        super().__init__()
        self._source = source

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        for at, task in enumerate(super().tasks(split, seed)):
            if self._source and at == 3:
                raise ValueError("the dataset is gone")
            yield task

    async def rollout(self, task: Task, context: RolloutContext) -> Reward:
        if not self._source:
            raise KeyError("no such answer")
        return await super().rollout(task, context)


class BrokenJudge(Broken):
    """As a config names it."""

    def __init__(self) -> None:
        super().__init__(source=False)


class Mute(Reverse):
    """Has no conversation in the steps named: there is nothing to learn from."""

    def __init__(self, tasks_per_step: int, *steps: int) -> None:
        super().__init__()
        self._per_step = tasks_per_step
        self._steps = steps

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        for at, task in enumerate(super().tasks(split, seed)):
            step = 1 + at // self._per_step
            yield replace(task, facts={**task.facts, "mute": step in self._steps})

    async def rollout(self, task: Task, context: RolloutContext) -> Reward:
        if task.facts["mute"]:
            return Reward(0.0, False)
        return await super().rollout(task, context)


class Tampering(Reverse):
    """Hands on other logprobs than the engine gave: a token of each sample is off by an eighth."""

    async def rollout(self, task: Task, context: RolloutContext) -> Reward:
        reward = await super().rollout(task, context)
        kept = context.samples

        def shifted(*, train_aborted: bool) -> list[Sample]:
            samples = kept(train_aborted=train_aborted)
            return [replace(one, logprobs=[*one.logprobs[:-1], one.logprobs[-1] - 0.125])
                    for one in samples]  # fmt: skip

        context.samples = shifted  # type: ignore[method-assign]
        return reward


async def never(_: int, __: Task) -> RolloutGroup:
    return RolloutGroup(())


async def test_a_queue_tells_the_end_of_its_tasks_after_the_last_group() -> None:
    async with asyncio.timeout(SECONDS):
        async with GroupQueue(enumerate([TASK, TASK]), never, limit=4) as queue:
            assert [await queue.take() for _ in range(3)] == [
                RolloutGroup(()),
                RolloutGroup(()),
                None,
            ]
        async with GroupQueue(enumerate([]), never, limit=4) as queue:
            assert await queue.take() is None


async def test_a_queue_gives_groups_in_the_order_of_their_tasks_whichever_end_first() -> None:
    """A step that took what ends first would learn from short answers, and drop long ones."""
    gate, played = asyncio.Event(), []

    async def run_group(number: int, _: Task) -> RolloutGroup:
        if number == 0:
            await gate.wait()
        played.append(number)
        return RolloutGroup((Rollout(Reward(float(number), False), (), 0, 1),))

    async with asyncio.timeout(SECONDS):
        async with GroupQueue(enumerate([TASK] * 3), run_group, limit=3) as queue:
            first = asyncio.create_task(queue.take())
            while played != [1, 2]:
                await asyncio.sleep(0)
            assert not first.done()
            gate.set()
            taken = [await first, await queue.take(), await queue.take()]
    assert [group.rollouts[0].reward.value for group in taken if group] == [0.0, 1.0, 2.0]


async def test_a_group_that_fails_is_told_while_an_earlier_one_still_plays() -> None:
    async def run_group(number: int, _: Task) -> RolloutGroup:
        if number == 0:
            await asyncio.Event().wait()
        raise BadRequest(f"group {number}")

    async with asyncio.timeout(SECONDS):
        async with GroupQueue(enumerate([TASK] * 2), run_group, limit=2) as queue:
            with pytest.raises(BadRequest, match="group 1"):
                await queue.take()


async def test_a_queue_raises_what_its_tasks_raise() -> None:
    def broken() -> Iterator[tuple[int, Task]]:
        yield 0, TASK
        raise BadRequest("the dataset is gone")

    async with asyncio.timeout(SECONDS):
        async with GroupQueue(broken(), never, limit=4) as queue:
            taken = [await asyncio.gather(queue.take(), return_exceptions=True) for _ in "ab"]
    assert "the dataset is gone" in [str(one) for (one,) in taken]


async def test_of_several_groups_that_fail_one_is_raised_and_none_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fails(number: int, _: Task) -> RolloutGroup:
        raise BadRequest(f"group {number}")

    async with asyncio.timeout(SECONDS):
        async with GroupQueue(enumerate([TASK] * 4), fails, limit=4) as queue:
            with pytest.raises(BadRequest, match="group 0"):
                await queue.take()
            await asyncio.sleep(0)
    del queue
    gc.collect()
    assert caplog.records == []


async def test_nested_groups_of_errors_become_the_one_that_names_its_cause() -> None:
    async def fail(error: Exception) -> None:
        raise error

    async def many() -> None:
        async with asyncio.TaskGroup() as inner:
            inner.create_task(fail(ValueError("whatever")))
            inner.create_task(fail(Conflict("the cause")))

    async def more() -> None:
        with one_error():
            async with asyncio.TaskGroup() as outer:
                outer.create_task(many())

    with pytest.raises(LockstepError, match="the cause") as caught:
        await more()
    assert caught.value.__notes__ == ["1 other tasks failed at the same time"]


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_source_that_ends_ends_the_run_with_the_number_of_tasks(
    stack: Stack, tmp_path: Path, mode: str
) -> None:
    config = run_config(tmp_path / "run", loop={"mode": mode, "max_off_policy": 1})
    trainer = stack.trainer(config, environment=Short(6))
    async with asyncio.timeout(SECONDS):
        with pytest.raises(BadRequest, match=r"ended after 6 train tasks, but the run needs 12"):
            await trainer.run()


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_source_that_raises_ends_the_run_with_its_error(
    stack: Stack, tmp_path: Path, mode: str
) -> None:
    config = run_config(tmp_path / "run", loop={"mode": mode, "max_off_policy": 1})
    trainer = stack.trainer(config, environment=Broken(source=True))
    async with asyncio.timeout(SECONDS):
        with pytest.raises(RolloutFailed, match="ValueError: the dataset is gone") as caught:
            await trainer.run()
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_an_environment_that_raises_is_one_error_that_names_its_line(
    stack: Stack, tmp_path: Path, mode: str
) -> None:
    config = run_config(tmp_path / "run", loop={"mode": mode, "max_off_policy": 1})
    trainer = stack.trainer(config, environment=Broken(source=False))
    async with asyncio.timeout(SECONDS):
        with pytest.raises(RolloutFailed, match=r"KeyError: 'no such answer' \(.*failures\.py:\d+"):
            await trainer.run()


def test_the_command_ends_in_one_error_that_names_the_cause(stack: Stack, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        f'run_dir = "{tmp_path / "run"}"\n'
        f'[serve]\nurl = "{stack.process.url}"\nadmin_url = "{stack.process.admin_url}"\n'
        f'[env]\nname = "{__name__}:BrokenJudge"\n[eval]\nprompts = 0\n'
    )
    process = subprocess.run(
        [sys.executable, "-m", "lockstep", "train", str(config), "--json"],
        capture_output=True, text=True, timeout=60, cwd=ROOT, check=False,
        env={**os.environ, "LOCKSTEP_ADMIN_TOKEN": TOKEN, "COLUMNS": "300"},
    )  # fmt: skip
    assert process.returncode == 1, process.stderr
    assert "error (rollout_failed): env" in process.stderr
    assert "raised KeyError: 'no such answer'" in process.stderr
    assert "Traceback" not in process.stderr
    assert "ExceptionGroup" not in process.stderr


async def test_a_step_without_anything_to_learn_is_skipped_and_counted(
    stack: Stack, tmp_path: Path
) -> None:
    config = run_config(tmp_path / "run", loop={"steps": 4})
    result = await stack.trainer(config, environment=Mute(4, 2, 3)).run()
    assert [step.skipped for step in result.steps] == [0, 1, 1, 0]
    first, second, third, last = result.steps
    assert first.version == second.version == third.version
    assert last.version.startswith("step-4")
    assert (last.off_policy_max, last.dropped) == (0, 0)
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    events = [event for event in map(json.loads, lines) if event["kind"] == "skipped"]
    assert [(event["step"], event["in_a_row"]) for event in events] == [(2, 1), (3, 2)]
    assert Run.read(tmp_path / "run").summary().skipped == 2


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_too_many_steps_without_anything_to_learn_end_the_run(
    stack: Stack, tmp_path: Path, mode: str
) -> None:
    loop: dict[str, Any] = {"mode": mode, "steps": 9, "max_skipped": 1, "max_off_policy": 1}
    config = run_config(tmp_path / "run", loop=loop)
    trainer = stack.trainer(config, environment=Mute(4, *range(2, 9)))
    async with asyncio.timeout(SECONDS):
        with pytest.raises(Conflict, match=r"the last 2 steps: no token to learn from"):
            await trainer.run()


@pytest.mark.parametrize("demanded", [True, None])
async def test_a_mismatch_is_written_down_and_ends_a_run_that_demanded_none(
    stack: Stack, tmp_path: Path, demanded: bool | None
) -> None:
    where = tmp_path / "run"
    config = run_config(where, learner={"exact": demanded}, loop={"steps": 1})
    trainer = stack.trainer(config, environment=Tampering())
    if demanded:
        with pytest.raises(NotExact, match=r"learner\.exact is true"):
            await trainer.run()
    else:
        (step,) = (await trainer.run()).steps
        assert step.more["mismatch_max"] == pytest.approx(0.125, abs=1e-2)
    if json.loads((where / "run.json").read_text())["numerics"]["mode"] == "exact" or not demanded:
        lines = map(json.loads, (where / "events.jsonl").read_text().splitlines())
        (event,) = [one for one in lines if one["kind"] == "mismatch"]
        assert event["mismatch_max"] == pytest.approx(0.125, abs=1e-2)
        assert not Run.read(where).summary().kept if not demanded else True


def test_no_version_grows_older_by_a_step_without_an_update() -> None:
    clock = Clock({"step-0": 0, "step-1": 1})
    clock.skip()
    assert version_lags(sample("step-0", "step-1"), clock, 2).tolist() == [0, 0, 1, 0]


def test_a_group_without_samples_is_not_stale() -> None:
    assert not is_stale(RolloutGroup((Rollout(Reward(0.0, False), ()),)), Clock(), 5, 0)


async def test_a_disk_that_fails_ends_the_run_and_deletes_nothing(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older checkpoints go only after the newest is on disk, which happens beside the rollouts."""
    synced = 0

    def fail(self: PutOffSyncs) -> None:
        nonlocal synced
        synced += 1
        if synced == 2:
            raise OSError(5, "the disk is broken")

    monkeypatch.setattr(PutOffSyncs, "sync", fail)
    config = run_config(tmp_path / "run", loop={"steps": 3, "keep_checkpoints": 1})
    with pytest.raises(OSError, match="the disk is broken"):
        await stack.trainer(config).run()
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == ["step-0", "step-1"]
