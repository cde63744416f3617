"""An environment that runs a coding agent as a program, in a scratch directory per rollout."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import msgspec

from lockstep.tokens.errors import BadRequest
from lockstep.tokens.lineage import check_kinds, check_weights
from lockstep.train.envs.agent_process import ProcessEnd, run_command
from lockstep.train.envs.agent_session import AgentSession
from lockstep.train.envs.environment import Reward, RolloutContext, Split, Task
from lockstep.train.envs.judge import Judge, JudgedRun, load_judge

GRACE_SECONDS = 30.0
"""How much longer than the agent its session key is valid, for a turn that is being sampled."""
END_SECONDS = 5.0
"""How long an agent may keep running after its session has ended."""
PLACEHOLDERS = ("task", "model", "base_url", "url", "key", "work", "home", "cwd")


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessOptions:
    """The options of the environment, [env.options].

    `command` starts the agent. In it, in the values of `environment` and in the files of `home`,
    these placeholders are replaced: {task}, {model}, {base_url} (ends in /v1), {url} (without /v1),
    {key}, {work}, {home} and {cwd} (the directory of this process). `tasks` is a file of JSON lines
    with `task`, optionally `id`, `files` and `split` ("eval" holds it out), and further fields for
    the reward. The directory `files` is copied into the work directory, `home` into HOME.

    The agent gets PATH, HOME, LANG, the variables of `environment` and those listed in `inherit`.
    `reward` is a command that runs in the work directory, or a function "module:name"; see
    judge.py. `seconds`, `max_calls` and `max_tokens` are the budget. `kinds` and `weights` select
    and weigh branches. With `train_failed`, rollouts whose agent failed, timed out or used up its
    budget are learnt from as well.
    """

    command: tuple[str, ...]
    tasks: str
    reward: str | tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    inherit: tuple[str, ...] = ()
    files: str | None = None
    home: str | None = None
    seconds: float = 600.0
    reward_seconds: float = 60.0
    max_calls: int | None = 100
    max_tokens: int | None = None
    kinds: tuple[str, ...] | None = None
    weights: str | None = None
    train_failed: bool = False


class Harness:
    """Runs `command` once per rollout, in its own session. Each branch of the session is a sample.

    Raises BadRequest that names the wrong option.
    """

    def __init__(self, **options: Any) -> None:
        names = [own.name for own in fields(HarnessOptions)]
        for name in options:
            if name not in names:
                raise BadRequest(
                    f"env.options.{name} is not a known field: expected one of {', '.join(names)}",
                    param=f"env.options.{name}",
                )
        try:
            self.options = msgspec.convert(options, HarnessOptions)
        except msgspec.ValidationError as error:
            raise BadRequest(f"env.options: {error}", param="env.options") from None
        for name in ("command", "tasks", "reward"):
            if not getattr(self.options, name):
                raise BadRequest(f"env.options.{name} is empty", param=f"env.options.{name}")
        for name in ("seconds", "reward_seconds", "max_calls", "max_tokens"):
            value = getattr(self.options, name)
            if value is not None and not value > 0:
                raise BadRequest(
                    f"env.options.{name} is {value}: expected more than 0",
                    param=f"env.options.{name}",
                )
        for name in ("files", "home"):
            _check_directory(getattr(self.options, name), f"env.options.{name}")
        check_kinds(self.options.kinds)
        check_weights(self.options.weights)
        self._judge: Judge = load_judge(self.options.reward, self.options.reward_seconds)
        self._tasks = _read_tasks(Path(self.options.tasks))

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Yield the tasks of the file in a random order, over and over."""
        tasks = [task for task in self._tasks if (task.facts.get("split") == "eval") == (
            split == "eval"
        )]  # fmt: skip
        rng = random.Random(f"harness {split} {seed}")
        while tasks:
            yield from rng.sample(tasks, len(tasks))

    async def rollout(self, task: Task, context: RolloutContext) -> Reward:
        """Run the agent and return the reward of its work.

        Raises what the gateway raises, and BadRequest for a command that cannot be started.
        """
        options = self.options
        session = await context.open_session(
            seconds=options.seconds + GRACE_SECONDS,
            max_calls=options.max_calls,
            max_tokens=options.max_tokens,
        )
        try:
            with tempfile.TemporaryDirectory(
                prefix="lockstep-rollout-", ignore_cleanup_errors=True
            ) as scratch:
                reward = await self._run(task, session, Path(scratch))
        except BaseException:
            await context.drop_session(session)
            raise
        await context.end_session(
            session, reward.value, kinds=options.kinds, weights=options.weights
        )
        return reward

    async def _run(self, task: Task, session: AgentSession, scratch: Path) -> Reward:
        options = self.options
        work, home = scratch / "work", scratch / "home"
        values = {
            "task": task.facts["task"], "model": session.model, "base_url": session.base_url,
            "url": session.url, "key": session.key, "work": str(work), "home": str(home),
            "cwd": str(Path.cwd()),
        }  # fmt: skip
        files = task.facts.get("files", options.files)
        await asyncio.to_thread(_copy, files, work)
        await asyncio.to_thread(_copy, options.home, home, values)
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "LANG": "C.UTF-8",
            **{name: os.environ[name] for name in options.inherit if name in os.environ},
            **{name: _fill(value, values) for name, value in options.environment.items()},
            "HOME": str(home),
        }
        end = await run_command(
            [_fill(part, values) for part in options.command],
            directory=work,
            environment=environment,
            mark=session.id,
            log=scratch / "output.txt",
            seconds=options.seconds,
            stop=functools.partial(_wait_for_end, session),
        )
        failure = await _failure(end, session)
        run = JudgedRun(
            task=task.facts, work=work, home=home, status=end.status, failure=failure,
            output=end.output,
        )  # fmt: skip
        reward = await self._judge(run)
        detail = {**reward.detail, "failure": failure, "agent_output": end.output[-500:]}
        return replace(reward, detail=detail, failure=None if options.train_failed else failure)


async def _wait_for_end(session: AgentSession) -> None:
    """Wait until END_SECONDS after the session: agents retry rejected requests for a long time."""
    await session.wait_end()
    await asyncio.sleep(END_SECONDS)


async def _failure(end: ProcessEnd, session: AgentSession) -> str | None:
    """Return why the rollout failed (timeout, used budget or exit code), or None."""
    if end.late:
        return "timeout"
    used = await session.budget_used()
    if used is not None:
        return f"budget: {used}"
    return None if end.status in (0, None) else f"exit {end.status}"


def _fill(text: str, values: Mapping[str, str]) -> str:
    # Not str.format: commands and configuration files contain braces. The task is replaced last, so
    # that placeholders in its text are left alone.
    for name in (*PLACEHOLDERS[1:], PLACEHOLDERS[0]):
        text = text.replace("{" + name + "}", values[name])
    return text


def _copy(source: str | None, target: Path, values: Mapping[str, str] | None = None) -> None:
    target.mkdir()
    if source is None:
        return
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    if values is None:
        return
    for path in target.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.write_text(_fill(path.read_text(), values))


def _check_directory(path: str | None, name: str) -> None:
    if path is not None and not Path(path).is_dir():
        raise BadRequest(f"{name} is {path!r}: expected a directory", param=name)


def _read_tasks(path: Path) -> list[Task]:
    name = "env.options.tasks"
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise BadRequest(f"{name}: {path} cannot be read: {error.strerror}", param=name) from None
    tasks = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            facts = json.loads(line)
        except ValueError:
            facts = None
        if not isinstance(facts, dict) or not isinstance(facts.get("task"), str):
            raise BadRequest(
                f"{name}: line {number} of {path} is not a JSON object with a text `task`",
                param=name,
            )
        _check_directory(facts.get("files"), f"{name}: line {number}: files")
        message = {"role": "user", "content": facts["task"]}
        tasks.append(Task((message,), facts={"id": str(number), **facts}))
    if not tasks:
        raise BadRequest(f"{name}: {path} has no tasks", param=name)
    return tasks
