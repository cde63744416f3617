"""Playing: groups of rollouts, each with a seed of its own, tried again if need be."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from lockstep.client.policy import Policy
from lockstep.tokens.errors import LockstepError, Unavailable
from lockstep.train.batch import Group, Rollout
from lockstep.train.config import TrainConfig
from lockstep.train.env import Environment, Player, Split, Task
from lockstep.train.metrics import Evaluation
from lockstep.train.patience import Patience

Heal = Callable[[LockstepError], Awaitable[None]]


class Players:
    """Plays tasks with a policy. `heal` is called before a failed rollout is played again."""

    def __init__(
        self,
        policy: Policy,
        environment: Environment,
        config: TrainConfig,
        patience: Patience,
        heal: Heal,
    ) -> None:
        self._policy = policy
        self._environment = environment
        self._config = config
        self._patience = patience
        self._heal = heal
        self._slots = asyncio.Semaphore(config.rollout.concurrency)

    def tasks(self, split: Split, skip: int = 0) -> Iterator[Task]:
        """The tasks of this run's seed, after the first `skip`."""
        return itertools.islice(self._environment.tasks(split, self._config.seed), skip, None)

    async def evaluate(self, step: int) -> Evaluation | None:
        """Each held-out prompt once, always with the same seeds; None where there are none."""
        count = self._config.eval.prompts
        if not count:
            return None
        chosen = list(itertools.islice(self.tasks("eval"), count))
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
    ) -> list[Group]:
        """Each task `size` times, in order. `version` demands the weights to play with."""
        made = []
        async with asyncio.TaskGroup() as running:
            for at, task in enumerate(tasks):
                made.append(running.create_task(self.group(task, size, (*seeds, at), version)))
                # The first prompts are on their way while those of the next groups are rendered.
                await asyncio.sleep(0)
        return [task.result() for task in made]

    async def group(
        self, task: Task, size: int, seeds: tuple[Any, ...], version: str | None = None
    ) -> Group:
        async with asyncio.TaskGroup() as running:
            made = [
                running.create_task(self._rollout(task, seed_of(*seeds, at), version))
                for at in range(size)
            ]
        return Group(tuple(each.result() for each in made))

    async def _rollout(self, task: Task, seed: int, version: str | None) -> Rollout:
        rollout = self._config.rollout
        options: dict[str, Any] = {
            "seed": seed,
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
            # From the beginning, and with the same seed: a rollout that was tried twice is the
            # one that would have been played at once.
            player = Player(self._policy, **options)
            reward = await self._environment.play(task, player)
            samples = tuple(player.samples(train_aborted=keeps))
            if version is not None and any(sample.aborts for sample in samples) and attempt < 3:
                raise Unavailable("a turn was cut off by an abort")
            return Rollout(reward, samples, player.breaks, attempt)

        async with self._slots:
            return await self._patience.call("rollout", play, between=self._heal)


def seed_of(*parts: Any) -> int:
    """A seed of 62 bits that only these parts have: runs, steps and indices do not overlap."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 2
