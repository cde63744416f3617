"""Environments of verifiers, with their own harnesses and rewards, for `lockstep train`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from lockstep.integrations.verifiers.lockstep_client import SELECT_HEADER, SELECT_VALUE, install
from lockstep.integrations.verifiers.trace_samples import trace_samples
from lockstep.tokens.errors import BadRequest, RolloutFailed, Unavailable
from lockstep.train.envs.environment import Reward, RolloutContext, Split, Task

API_KEY = "LOCKSTEP_VERIFIERS_API_KEY"
HELD_OUT = 10
"""One task in HELD_OUT is used for evaluation only."""


class VerifiersEnvironment:
    """A taskset of verifiers >= 0.4 as an Environment.

    `options` are those of verifiers' [env] block: taskset, agent (harness, runtime and so on), id.
    Harnesses run in subprocesses unless agent.runtime is set. A rollout counts as solved from a
    reward of `solved` on. Raises BadRequest for a taskset that verifiers cannot load.
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
        self._episodes = 0
        self._serving: asyncio.Task[None] | None = None

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        """Yield tasks without end, shuffled by the seed. A single task has no eval split."""
        held_out = [at % HELD_OUT == 0 and len(self._tasks) > 1 for at in range(len(self._tasks))]
        rows = [
            task for task, held in zip(self._tasks, held_out, strict=True)
            if held == (split == "eval")
        ]  # fmt: skip
        rng = random.Random(f"verifiers {split} {seed}")
        while rows:
            for task in rng.sample(rows, len(rows)):
                yield Task((), facts={"task": task})

    async def rollout(self, task: Task, context: RolloutContext) -> Reward:
        """Run one episode and add a sample for every trained branch of its traces."""
        async with self._servers():
            episode = await self._env.run_episode(task.facts["task"], self._model_context(context))
        if not episode.ok:
            errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
            causes = "; ".join(f"{e.type}: {e.message}"[:500] for e in errors) or "without an error"
            transient = any((e.status_code or 0) in (429, 503, 504) for e in errors)
            # Unavailable is retried: a worker may be restarting, or a queue full.
            raise (Unavailable if transient else RolloutFailed)(f"an episode failed: {causes}")
        for trace in episode.traces:
            context.add_samples(trace_samples(trace))
        value = float(sum(trace.reward for trace in episode.traces) / len(episode.traces))
        metrics = {
            name: number for trace in episode.traces for name, number in trace.metrics.items()
        }
        return Reward(value, value >= self._solved, metrics)

    def _model_context(self, context: RolloutContext) -> Any:
        from verifiers.v1.clients import ModelContext, TrainClientConfig
        from verifiers.v1.types import Sampling

        policy, options = context.policy, context.options
        headers = {SELECT_HEADER: SELECT_VALUE}
        if policy.api_key is not None:
            headers["Authorization"] = f"Bearer {policy.api_key}"
        base = policy.url.rstrip("/").removesuffix("/v1") + "/v1"
        client = TrainClientConfig(base_url=base, api_key_var=API_KEY, headers=headers)
        names = ("temperature", "max_tokens")
        sampling = Sampling(**{name: options[name] for name in names if name in options})
        return ModelContext(model=policy.model or "", client=client, sampling=sampling)

    @asynccontextmanager
    async def _servers(self) -> AsyncIterator[None]:
        """Keep verifiers' servers running while any episode runs."""
        self._episodes += 1
        try:
            if self._serving is None or self._serving.done():
                self._up, self._down = asyncio.Event(), asyncio.Event()
                self._serving = asyncio.create_task(self._serve(self._up, self._down))
            serving, up = self._serving, self._up
            waiting = asyncio.create_task(up.wait())
            await asyncio.wait((serving, waiting), return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if not up.is_set():
                await serving  # raises the error of their start
            yield
        finally:
            self._episodes -= 1
            if not self._episodes and self._serving is not None:
                self._down.set()
                await asyncio.gather(self._serving, return_exceptions=True)

    async def _serve(self, up: asyncio.Event, down: asyncio.Event) -> None:
        # Entered and left in one task, as the task groups inside verifiers require.
        async with self._env.serving():
            up.set()
            await down.wait()
