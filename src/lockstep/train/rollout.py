"""Rollouts: groups of them at once, each with a seed of its own, tried again where that helps."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from lockstep.client.policy import Policy
from lockstep.tokens.errors import LockstepError, Unavailable
from lockstep.train.config import TrainConfig
from lockstep.train.envs.agent_session import AgentSessions
from lockstep.train.envs.environment import Environment, Player, Split, Task, check_reward
from lockstep.train.failure import from_env, one_error, tasks_ended
from lockstep.train.group_requests import GroupRequests, SiblingWaits
from lockstep.train.learning.batch import Rollout, RolloutGroup
from lockstep.train.records.metrics import Evaluation
from lockstep.train.retry import RetryPolicy

Restore = Callable[[LockstepError], Awaitable[None]]


class RolloutRunner:
    """Plays tasks with a policy. `restore` is called before a failed rollout is played again."""

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
        """`workers` says how many serve the policy now; 0 where that is not known."""
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
        """The tasks of this run's seed, after the first `skip`. Raises RolloutFailed for what the
        environment raises."""
        with from_env(self._config.env.name, f"{split} tasks"):
            source = self._environment.tasks(split, self._config.seed)
            yield from itertools.islice(source, skip, None)

    async def evaluate(self, step: int) -> Evaluation | None:
        """Plays each held-out prompt once, always with the same seeds; None where none is wanted.

        An environment that has fewer is evaluated on those. Raises BadRequest where it has none.
        """
        wanted = self._config.eval.prompts
        if not wanted:
            return None
        chosen = list(itertools.islice(self.tasks("eval"), wanted))
        if not chosen:
            raise tasks_ended(self._config.env.name, "eval", 0, wanted)
        count = len(chosen)
        groups = await self.groups(chosen, 1, (self._config.seed, "eval"))
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
        """Plays each task `size` times, with the weights of `version` where one is named.

        Raises the error of the first rollout that failed for good.
        """
        made = []
        with one_error():
            async with asyncio.TaskGroup() as running:
                for at, task in enumerate(tasks):
                    made.append(running.create_task(self.group(task, size, (*seeds, at), version)))
                    # The first prompts are on their way while the next groups are rendered.
                    await asyncio.sleep(0)
        return [task.result() for task in made]

    async def group(
        self, task: Task, size: int, seeds: tuple[Any, ...], version: str | None = None
    ) -> RolloutGroup:
        """Plays the task `size` times. Raises the error of the first rollout that failed."""
        requests = GroupRequests(
            self._policy.transport, self._waits, size=size, most=self._most_choices(size)
        )
        with one_error():
            async with asyncio.TaskGroup() as running:
                made = [
                    running.create_task(self._rollout(task, seeds, at, version, requests))
                    for at in range(size)
                ]
        return RolloutGroup(tuple(each.result() for each in made))

    def _most_choices(self, size: int) -> int:
        """Choices of one request such that every worker has work when all groups of a step play."""
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
        rollout = self._config.rollout
        options: dict[str, Any] = {
            # They count up within a group: those of the choices of one request do as well.
            "seed": seed_of(*seeds) + at,
            "max_tokens": rollout.max_tokens,
            "temperature": rollout.temperature,
            "logprob_mode": rollout.logprobs,
        }
        if version is not None:
            options["weight_version"] = version
        if rollout.experts:
            options["experts_start"] = 0
        keeps = self._config.loop.aborted == "keep"

        async def play(attempt: int) -> Rollout:
            # From the beginning and with the same seed: a rollout that was tried twice is the
            # one that a first try would have been.
            policy = self._policy.over(requests.member(), requests.openings)
            player = Player(policy, sessions=self._sessions, train_aborted=keeps, **options)
            reward = check_reward(await self._environment.play(task, player))
            samples = tuple(player.samples(train_aborted=keeps))
            if version is not None and any(sample.aborts for sample in samples) and attempt < 3:
                raise Unavailable("a turn was cut off by an abort")
            return Rollout(reward, samples, player.breaks, attempt)

        where = "rollout " + " ".join(map(str, (*seeds[1:], at)))
        async with self._concurrency:
            with from_env(self._config.env.name, where):
                return await self._retry.call("rollout", play, between=self._restore)


def seed_of(*parts: Any) -> int:
    """A seed of 62 bits that only these parts have: runs, steps and groups do not overlap."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 2
