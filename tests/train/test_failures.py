"""Failures of a run: one typed error with the cause, or a skipped step that is counted."""

from __future__ import annotations

import asyncio
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
from lockstep.tokens.errors import BadRequest, Conflict, NotExact, RolloutFailed
from lockstep.train.envs.bundled import Reverse
from lockstep.train.envs.environment import Reward, RolloutContext, Split, Task
from lockstep.train.learning.batch import Clock, Rollout, RolloutGroup, is_stale, version_lags
from tests.processes import TOKEN
from tests.train.conftest import Stack, run_config
from tests.train.learning.test_batch import sample

TASK = Task(({"role": "user", "content": "hi"},))
SECONDS = 30.0
ROOT = Path(__file__).parents[2]


class Short(Reverse):
    """An environment with `count` training tasks."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        return islice(super().tasks(split, seed), self._count)


class Broken(Reverse):
    """An environment whose tasks raise after three, or whose rollout raises immediately."""

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
    """`Broken` under an import path."""

    def __init__(self) -> None:
        super().__init__(source=False)


class Mute(Reverse):
    """An environment without a conversation, and so without tokens, in the given steps."""

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
    """An environment that shifts one logprob of each sample by an eighth."""

    async def rollout(self, task: Task, context: RolloutContext) -> Reward:
        reward = await super().rollout(task, context)
        kept = context.samples

        def shifted(*, train_aborted: bool) -> list[Sample]:
            samples = kept(train_aborted=train_aborted)
            return [replace(one, logprobs=[*one.logprobs[:-1], one.logprobs[-1] - 0.125])
                    for one in samples]  # fmt: skip

        context.samples = shifted  # type: ignore[method-assign]
        return reward


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_run_that_runs_out_of_tasks_fails_with_their_number(
    stack: Stack, tmp_path: Path, mode: str
) -> None:
    config = run_config(tmp_path / "run", loop={"mode": mode, "max_off_policy": 1})
    trainer = stack.trainer(config, environment=Short(6))
    async with asyncio.timeout(SECONDS):
        with pytest.raises(BadRequest, match=r"ended after 6 train tasks, but the run needs 12"):
            await trainer.run()


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_an_error_of_the_task_source_ends_the_run(
    stack: Stack, tmp_path: Path, mode: str
) -> None:
    config = run_config(tmp_path / "run", loop={"mode": mode, "max_off_policy": 1})
    trainer = stack.trainer(config, environment=Broken(source=True))
    async with asyncio.timeout(SECONDS):
        with pytest.raises(RolloutFailed, match="ValueError: the dataset is gone") as caught:
            await trainer.run()
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_an_error_of_the_environment_names_its_line(
    stack: Stack, tmp_path: Path, mode: str
) -> None:
    config = run_config(tmp_path / "run", loop={"mode": mode, "max_off_policy": 1})
    trainer = stack.trainer(config, environment=Broken(source=False))
    async with asyncio.timeout(SECONDS):
        with pytest.raises(RolloutFailed, match=r"KeyError: 'no such answer' \(.*failures\.py:\d+"):
            await trainer.run()


def test_the_command_prints_one_error_with_its_cause(stack: Stack, tmp_path: Path) -> None:
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


async def test_a_step_without_tokens_to_learn_from_is_skipped_and_counted(
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
async def test_too_many_skipped_steps_end_the_run(stack: Stack, tmp_path: Path, mode: str) -> None:
    loop: dict[str, Any] = {"mode": mode, "steps": 9, "max_skipped": 1, "max_off_policy": 1}
    config = run_config(tmp_path / "run", loop=loop)
    trainer = stack.trainer(config, environment=Mute(4, *range(2, 9)))
    async with asyncio.timeout(SECONDS):
        with pytest.raises(Conflict, match=r"the last 2 steps: no token to learn from"):
            await trainer.run()


@pytest.mark.parametrize("demanded", [True, None])
async def test_a_mismatch_is_recorded_and_ends_an_exact_run(
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


def test_a_skipped_step_does_not_age_versions() -> None:
    clock = Clock({"step-0": 0, "step-1": 1})
    clock.skip()
    assert version_lags(sample("step-0", "step-1"), clock, 2).tolist() == [0, 0, 1, 0]


def test_a_group_without_samples_is_not_stale() -> None:
    assert not is_stale(RolloutGroup((Rollout(Reward(0.0, False), ()),)), Clock(), 5, 0)


async def test_a_disk_error_ends_the_run_and_deletes_no_checkpoint(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older checkpoints are deleted only after the newest is on disk."""
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
