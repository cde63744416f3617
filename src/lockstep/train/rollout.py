"""Runs rollouts: groups of them concurrently, each with its own seed, with retries."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lockstep.client.policy import Policy
from lockstep.models import model_directory
from lockstep.tokens.errors import LockstepError, Unavailable
from lockstep.train.config import TrainConfig
from lockstep.train.envs.agent_session import AgentSessions
from lockstep.train.envs.environment import Environment, RolloutContext, Split, Task, check_reward
from lockstep.train.failure import from_env, one_error, tasks_ended
from lockstep.train.group_requests import GroupRequests, SiblingWaits
from lockstep.train.learning.batch import Rollout, RolloutGroup
from lockstep.train.records.step_metrics import Evaluation
from lockstep.train.retry import RetryPolicy

Restore = Callable[[LockstepError], Awaitable[None]]


class RolloutRunner:
    """Runs the rollouts of tasks. `restore` is called before a failed rollout is retried."""

    def __init__(
        self,
        policy: Policy,
        environment: Environment,
        config: TrainConfig,
        retry: RetryPolicy,
        restore: Restore,
        sessions: AgentSessions | None = None,
        *,
        workers: Callable[[], int],
    ) -> None:
        """`workers` returns how many workers serve the policy now; 0 where that is not known."""
        self._policy = policy
        self._environment = environment
        self._config = config
        self._retry = retry
        self._restore = restore
        self._sessions = sessions
        self._workers = workers
        self._waits = SiblingWaits()
        self._concurrency = asyncio.Semaphore(config.rollout.concurrency)

    def tasks(self, split: Split, skip: int = 0) -> Iterator[Task]:
        """Yield the tasks of this run's seed after the first `skip`.

        Raises RolloutFailed for an exception of the environment.
        """
        with from_env(self._config.env.name, f"{split} tasks"):
            source = self._environment.tasks(split, self._config.seed)
            yield from itertools.islice(source, skip, None)

    async def evaluate(self, step: int) -> Evaluation | None:
        """Run each held-out prompt once, always with the same seeds; None where eval.prompts is 0.

        An environment with fewer prompts is evaluated on those. Raises BadRequest if it has none.
        """
        prompts = self._config.eval.prompts
        if not prompts:
            return None
        tasks = list(itertools.islice(self.tasks("eval"), prompts))
        if not tasks:
            raise tasks_ended(self._config.env.name, "eval", 0, prompts)
        count = len(tasks)
        groups = await self.groups(tasks, 1, (self._config.seed, "eval"))
        rewards = [group.rollouts[0].reward for group in groups]
        return Evaluation(
            step=step,
            reward=sum(reward.value for reward in rewards) / count,
            solved=sum(reward.solved for reward in rewards) / count,
            prompts=count,
        )

    async def groups(
        self, tasks: Sequence[Task], size: int, seeds: tuple[Any, ...], version: str | None = None
    ) -> list[RolloutGroup]:
        """Run each task `size` times, with the weights of `version` if it is given.

        Raises the error of the first rollout that failed for good.
        """
        groups = []
        with one_error():
            async with asyncio.TaskGroup() as running:
                for at, task in enumerate(tasks):
                    work = self.group(task, size, (*seeds, at), version)
                    groups.append(running.create_task(work))
                    # Let the first requests go out while the next groups are rendered.
                    await asyncio.sleep(0)
        return [group.result() for group in groups]

    async def group(
        self, task: Task, size: int, seeds: tuple[Any, ...], version: str | None = None
    ) -> RolloutGroup:
        """Run the task `size` times. Raises the error of the first rollout that failed."""
        requests = GroupRequests(
            self._policy.transport, self._waits, size=size, max_choices=self._max_choices(size)
        )
        with one_error():
            async with asyncio.TaskGroup() as running:
                rollouts = [
                    running.create_task(self._rollout(task, seeds, at, version, requests))
                    for at in range(size)
                ]
        return RolloutGroup(tuple(rollout.result() for rollout in rollouts), task, seeds)

    def _max_choices(self, size: int) -> int:
        """Return the choices per request that give every worker work in a step of all groups."""
        workers = self._workers()
        return -(-self._config.rollout.groups * size // workers) if workers else 1

    async def _rollout(
        self,
        task: Task,
        seeds: tuple[Any, ...],
        at: int,
        version: str | None,
        requests: GroupRequests,
    ) -> Rollout:
        options = rollout_options(self._config, seeds, at)
        if version is not None:
            options["weight_version"] = version
        train_aborted = self._config.loop.aborted == "keep"

        async def run(attempt: int) -> Rollout:
            # A retry starts over with the same seed, so that it samples what the first attempt
            # would have sampled.
            transport = requests.member()
            policy = self._policy.over(transport, requests.openings)
            context = RolloutContext(
                policy, sessions=self._sessions, train_aborted=train_aborted, **options
            )
            reward = check_reward(await self._environment.rollout(task, context))
            samples = tuple(context.samples(train_aborted=train_aborted))
            if version is not None and any(sample.aborts for sample in samples) and attempt < 3:
                raise Unavailable("a turn of the rollout was aborted")
            return Rollout(reward, samples, context.breaks, attempt, tuple(transport.draws))

        where = "rollout " + " ".join(map(str, (*seeds[1:], at)))
        async with self._concurrency:
            with from_env(self._config.env.name, where):
                return await self._retry.call("rollout", run, between=self._restore)


def rollout_options(config: TrainConfig, seeds: tuple[Any, ...], at: int) -> dict[str, Any]:
    """Return the options of every turn of rollout `at` of a group."""
    rollout = config.rollout
    options: dict[str, Any] = {
        # Consecutive within a group, as are the seeds of the choices of one request.
        "seed": seed_of(*seeds) + at,
        "max_tokens": rollout.max_tokens,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "min_p": rollout.min_p,
        "logprob_mode": rollout.logprobs,
    }
    if requests_experts(config):
        options["experts_start"] = 0
    return options


def requests_experts(config: TrainConfig) -> bool:
    """Whether rollouts request routed experts: as the config says, or if the learner needs them."""
    if config.rollout.experts is not None:
        return config.rollout.experts
    return config.learner.replay_experts and has_experts(model_directory(config.model))


@cache
def has_experts(directory: Path) -> bool:
    """Whether a directory's config.json describes a mixture of experts. False without the file."""
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return bool(config.get("num_experts") or config.get("text_config", {}).get("num_experts"))


def seed_of(*parts: Any) -> int:
    """Return a seed of 62 bits from these parts: seeds of runs, steps and groups do not overlap."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 2
