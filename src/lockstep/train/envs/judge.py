"""Judges what an agent left behind: by a command that runs there, or by a function."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.tokens.errors import BadRequest, RolloutFailed
from lockstep.train.envs.agent_process import run_command
from lockstep.train.envs.environment import Reward

NOT_RUN = (126, 127)
"""Exit codes of a shell that could not run the command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRun:
    """An agent's run that has ended. `task` is the line of the tasks file, `status` the exit code
    (None when its time had run out), `failure` why it is no whole run, `output` the end of what it
    wrote."""

    task: Mapping[str, Any]
    work: Path
    home: Path
    status: int | None
    failure: str | None
    output: str


Judge = Callable[[JudgedRun], Awaitable[Reward]]


def load_judge(reward: str | Sequence[str], seconds: float) -> Judge:
    """The judge of a command, or of a function "module:name". Raises BadRequest for neither.

    A command's reward is the number in its last line; without one it is 1 for exit code 0. Another
    exit code is 0. It runs in the work directory, {cwd} in it is where this process was started,
    and it finds the task in LOCKSTEP_TASK, as JSON. A function gets the JudgedRun and returns a
    number or a Reward; it may be async.
    """
    if not isinstance(reward, str):
        # It runs elsewhere: {cwd} is how it names a file of the run's own.
        here = str(Path.cwd())
        return CommandJudge(tuple(part.replace("{cwd}", here) for part in reward), seconds)
    module, colon, name = reward.partition(":")
    if not colon:
        raise BadRequest(
            f"env.options.reward is {reward!r}: expected a list of strings, which is a command, or "
            "a function as module:name",
            param="env.options.reward",
        )
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BadRequest(f"env.options.reward: {error}", param="env.options.reward") from None
    return FunctionJudge(function)


@dataclass(frozen=True, slots=True)
class FunctionJudge:
    """The reward of a function; a number of 1 or more counts as solved."""

    function: Callable[[JudgedRun], Any]

    async def __call__(self, run: JudgedRun) -> Reward:
        if inspect.iscoroutinefunction(self.function):
            value = await self.function(run)
        else:
            value = await asyncio.to_thread(self.function, run)
        return value if isinstance(value, Reward) else _reward(value, {})


@dataclass(frozen=True, slots=True)
class CommandJudge:
    """The reward of a command; see load_judge."""

    command: tuple[str, ...]
    seconds: float

    async def __call__(self, run: JudgedRun) -> Reward:
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "LANG": "C.UTF-8",
            "HOME": str(run.home),
            "LOCKSTEP_TASK": json.dumps(run.task),
        }
        end = await run_command(
            self.command,
            directory=run.work,
            environment=environment,
            mark=f"reward-{run.work.parent.name}",
            log=run.work.parent / "reward.txt",
            seconds=self.seconds,
        )
        if end.status is not None and (end.status in NOT_RUN or end.status < 0):
            raise RolloutFailed(
                f"the reward command ended with {end.status}, which is no reward: {end.output}",
                param="env.options.reward",
            )
        detail = {"judge": end.output[-500:], "judge_status": end.status}
        if end.status != 0:
            return Reward(0.0, False, detail)
        lines = end.output.rstrip().splitlines() or [""]
        return _reward(_number(lines[-1]), detail)


def _number(line: str) -> float:
    try:
        return float(line)
    except ValueError:
        return 1.0


def _reward(value: Any, detail: Mapping[str, Any]) -> Reward:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RolloutFailed(
            f"the reward is {value!r}: expected a finite number", param="env.options.reward"
        )
    return Reward(float(value), value >= 1.0, detail)
