"""Environments of verifiers, played with their own harnesses and rewards, for `lockstep train`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from lockstep.integrations.verifiers.client import CHOICE, CHOSEN, install
from lockstep.integrations.verifiers.samples import trace_samples
from lockstep.tokens.errors import BadRequest, RolloutFailed, Unavailable
from lockstep.train.envs.environment import Player, Reward, Split, Task

API_KEY = "LOCKSTEP_VERIFIERS_API_KEY"
HELD_OUT = 10
"""One task of so many is for evaluation only."""


class VerifiersEnvironment:
    """The environment of a taskset of verifiers >= 0.4, as an Environment.

    `options` are those of verifiers' [env] block: taskset, agent (harness, runtime and the like),
    id and so on. Harnesses run in subprocesses unless agent.runtime says otherwise. `solved` is the
    reward from which a rollout counts as solved. Raises BadRequest for what verifiers cannot load.
    """

    def __init__(self, name: str, *, solved: float = 1.0, **options: Any) -> None:
        from pydantic import ValidationError
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        install()
        agent = {"runtime": {"type": "subprocess"}, **options.pop("agent", {})}
        taskset = {**options.pop("taskset", {}), "id": name}
        try:
            config = resolve_env_config({"taskset": taskset, "agent": agent, **options})
            self._env = load_environment(config)
            self._tasks = list(self._env.taskset.load())
        except (ImportError, ValueError, TypeError, AttributeError, ValidationError) as error:
            raise BadRequest(
                f"verifiers cannot load {name!r}: {type(error).__name__}: {error}", param="env.name"
            ) from None
        if not self._tasks:
            raise BadRequest(f"the taskset {name!r} has no tasks", param="env.name")
        self._solved = solved
        self._players = 0
        self._serving: asyncio.Task[None] | None = None

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Tasks without end, in an order of the seed; a taskset of one task is not evaluated."""
        held_out = [at % HELD_OUT == 0 and len(self._tasks) > 1 for at in range(len(self._tasks))]
        rows = [
            task for task, held in zip(self._tasks, held_out, strict=True)
            if held == (split == "eval")
        ]  # fmt: skip
        rng = random.Random(f"verifiers {split} {seed}")
        while rows:
            for task in rng.sample(rows, len(rows)):
                yield Task((), facts={"task": task})

    async def play(self, task: Task, player: Player) -> Reward:
        """Runs an episode; every branch of its traces that is trained is a sample."""
        async with self._served():
            episode = await self._env.run_episode(task.facts["task"], self._context(player))
        if not episode.ok:
            errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
            told = "; ".join(f"{e.type}: {e.message}"[:500] for e in errors) or "no error was told"
            passing = any((e.status_code or 0) in (429, 503, 504) for e in errors)
            # The first is tried again: a worker restarts, a queue empties.
            raise (Unavailable if passing else RolloutFailed)(f"an episode failed: {told}")
        for trace in episode.traces:
            player.add_samples(trace_samples(trace))
        value = float(sum(trace.reward for trace in episode.traces) / len(episode.traces))
        metrics = {
            name: number for trace in episode.traces for name, number in trace.metrics.items()
        }
        return Reward(value, value >= self._solved, metrics)

    def _context(self, player: Player) -> Any:
        from verifiers.v1.clients import ModelContext, TrainClientConfig
        from verifiers.v1.types import Sampling

        policy, options = player.policy, player.options
        headers = {CHOICE: CHOSEN}
        if policy.api_key is not None:
            headers["Authorization"] = f"Bearer {policy.api_key}"
        base = policy.url.rstrip("/").removesuffix("/v1") + "/v1"
        client = TrainClientConfig(base_url=base, api_key_var=API_KEY, headers=headers)
        chosen = {name: options[name] for name in ("temperature", "max_tokens") if name in options}
        return ModelContext(model=policy.model or "", client=client, sampling=Sampling(**chosen))

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[None]:
        """verifiers' servers run while any episode does."""
        self._players += 1
        try:
            if self._serving is None or self._serving.done():
                self._up, self._down = asyncio.Event(), asyncio.Event()
                self._serving = asyncio.create_task(self._serve(self._up, self._down))
            serving, up = self._serving, self._up
            waiting = asyncio.create_task(up.wait())
            await asyncio.wait((serving, waiting), return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if not up.is_set():
                await serving  # raises why they did not start
            yield
        finally:
            self._players -= 1
            if not self._players and self._serving is not None:
                self._down.set()
                await asyncio.gather(self._serving, return_exceptions=True)

    async def _serve(self, up: asyncio.Event, down: asyncio.Event) -> None:
        # In one task from beginning to end: what is inside must be left where it was entered.
        async with self._env.serving():
            up.set()
            await down.wait()
