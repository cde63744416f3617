"""Rollouts without training: plays the tasks of a run and writes their samples to a file."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from lockstep.client.policy import connect
from lockstep.fleet.remote import RemoteFleet
from lockstep.tokens import Sample
from lockstep.tokens.errors import BadRequest, LockstepError
from lockstep.train.config import TrainConfig
from lockstep.train.envs.agent_session import agent_sessions
from lockstep.train.envs.environment import load_environment
from lockstep.train.failure import tasks_ended
from lockstep.train.learning.batch import RolloutGroup, failures
from lockstep.train.publish import workers_of
from lockstep.train.retry import RetryPolicy
from lockstep.train.rollout import RolloutRunner


@dataclass(frozen=True, slots=True)
class Collected:
    """What was played so far: `failed` rollouts by cause; their samples are not in the file."""

    rollouts: int = 0
    samples: int = 0
    tokens: int = 0
    reward: float = 0.0
    solved: int = 0
    failed: tuple[tuple[str, int], ...] = ()


async def collect(
    config: TrainConfig,
    path: Path,
    on_step: Callable[[int, Collected], None] | None = None,
) -> Collected:
    """Plays what `loop.steps` steps of the run would play, and writes one sample per line.

    Each line is what `Sample.from_json` reads; its reward is the rollout's, and its last note says
    which step, group and rollout it is of. Nothing is learnt and no weights change: that is for
    another trainer. Raises BadRequest for a file that is there already, and what rollouts raise.
    """
    environment = load_environment(config.env.name, config.env.options)
    serve, made = config.serve, config.rollout
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(
            RemoteFleet(serve.admin_url, token=serve.admin_token, token_file=serve.admin_token_file)
        )
        policy = await stack.enter_async_context(
            connect(serve.url, serve.model, api_key=serve.api_key,
                    tokenizer=serve.tokenizer or config.model)
        )  # fmt: skip
        workers = await _serving(fleet)
        runner = RolloutRunner(
            policy, environment, config, RetryPolicy(serve.retry_seconds), _wait,
            agent_sessions(serve.url, policy, fleet),
            workers=lambda: workers,
        )  # fmt: skip
        tasks, total = runner.tasks("train"), Collected()
        with _new_file(path) as file:
            for step in range(1, config.loop.steps + 1):
                chosen = list(itertools.islice(tasks, made.groups))
                if len(chosen) < made.groups:
                    raise tasks_ended(
                        config.env.name, "train", (step - 1) * made.groups + len(chosen),
                        config.loop.steps * made.groups,
                    )  # fmt: skip
                groups = await runner.groups(
                    chosen, made.group_size, (config.seed, "collect", step)
                )
                for sample in _samples(step, groups):
                    file.write(sample.to_json() + b"\n")
                file.flush()
                total = _added(total, groups)
                if on_step is not None:
                    on_step(step, total)
    return total


def _new_file(path: Path) -> BinaryIO:
    try:
        return path.open("xb")
    except OSError as error:
        raise BadRequest(
            f"{path} cannot be written: {error.strerror}; choose another file", param="out"
        ) from None


async def _serving(fleet: RemoteFleet) -> int:
    """How many workers serve; 0 where no control plane tells, which collecting does not need."""
    try:
        workers = workers_of(await fleet.state())
    except LockstepError:
        return 0
    return sum(worker["state"] == "serving" for worker in workers)


async def _wait(error: LockstepError) -> None:
    """Before a rollout is played again: nothing is to be restored, the fleet is somebody else's."""


def _samples(step: int, groups: list[RolloutGroup]) -> Iterator[Sample]:
    for number, group in enumerate(groups):
        for at, rollout in enumerate(group.rollouts):
            if rollout.reward.failure is not None:
                continue
            note = {"step": step, "group": number, "rollout": at}
            for sample in rollout.samples:
                yield replace(sample, reward=rollout.reward.value, notes=(*sample.notes, note))


def _added(total: Collected, groups: list[RolloutGroup]) -> Collected:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    whole = [sample for rollout in rollouts if rollout.reward.failure is None
             for sample in rollout.samples]  # fmt: skip
    failed = dict(total.failed)
    for cause, count in failures(groups).items():
        failed[cause] = failed.get(cause, 0) + count
    played = total.rollouts + len(rollouts)
    rewards = total.reward * total.rollouts + sum(each.reward.value for each in rollouts)
    return Collected(
        rollouts=played,
        samples=total.samples + len(whole),
        tokens=total.tokens + sum(sum(sample.sampled_mask) for sample in whole),
        reward=rewards / max(played, 1),
        solved=total.solved + sum(each.reward.solved for each in rollouts),
        failed=tuple(sorted(failed.items())),
    )
