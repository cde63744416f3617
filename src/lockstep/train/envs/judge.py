"""Rewards for the work of an agent: computed by a command or by a function."""

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
    """The finished run of an agent.

    `task` is its line of the tasks file, `status` its exit code (None after a timeout), `failure`
    why the rollout failed, and `output` the end of its output.
    """

    task: Mapping[str, Any]
    work: Path
    home: Path
    status: int | None
    failure: str | None
    output: str


Judge = Callable[[JudgedRun], Awaitable[Reward]]


def load_judge(reward: str | Sequence[str], seconds: float) -> Judge:
    """Return the judge for a command or a function "module:name". Raises BadRequest for neither.

    A command runs in the work directory with the task as JSON in LOCKSTEP_TASK; {cwd} in it is the
    directory of this process. Its reward is the number in its last line of output, or 1 without a
    number; with an exit code other than 0 the reward is 0. A function takes the JudgedRun and
    returns a number or a Reward; it may be async.
    """
    if not isinstance(reward, str):
        # The command runs in the work directory: {cwd} is how it names a file of this directory.
        here = str(Path.cwd())
        return CommandJudge(tuple(part.replace("{cwd}", here) for part in reward), seconds)
    module, colon, name = reward.partition(":")
    if not colon:
        raise BadRequest(
            f"env.options.reward is {reward!r}: expected a command as a list of strings, or a "
            "function as module:name",
            param="env.options.reward",
        )
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BadRequest(f"env.options.reward: {error}", param="env.options.reward") from None
    return FunctionJudge(function)


@dataclass(frozen=True, slots=True)
class FunctionJudge:
    """Computes the reward by a function. A number of 1 or more counts as solved."""

    function: Callable[[JudgedRun], Any]

    async def __call__(self, run: JudgedRun) -> Reward:
        if inspect.iscoroutinefunction(self.function):
            value = await self.function(run)
        else:
            value = await asyncio.to_thread(self.function, run)
        return value if isinstance(value, Reward) else _reward(value, {})


@dataclass(frozen=True, slots=True)
class CommandJudge:
    """Computes the reward by a command; see load_judge."""

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
                f"the reward command could not run (exit status {end.status}): {end.output}",
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
