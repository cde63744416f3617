"""Rollouts without training: run the tasks of a configuration and write their samples to a file."""

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
    """Totals over the rollouts so far. `failed` counts by cause; failed samples are not written."""

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
    """Run the rollouts of `loop.steps` steps and write one sample per line.

    `Sample.from_json` reads each line. Its reward is the rollout's, and its last note names the
    step, group and rollout. No weights change. Raises BadRequest for a file that exists, and what
    rollouts raise.
    """
    environment = load_environment(config.env.name, config.env.options)
    serve, rollout = config.serve, config.rollout
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(
            RemoteFleet(serve.admin_url, token=serve.admin_token, token_file=serve.admin_token_file)
        )
        policy = await stack.enter_async_context(
            connect(serve.url, serve.model, api_key=serve.api_key,
                    tokenizer=serve.tokenizer or config.model)
        )  # fmt: skip
        workers = await _count_workers(fleet)
        runner = RolloutRunner(
            policy, environment, config, RetryPolicy(serve.retry_seconds), _keep_weights,
            agent_sessions(serve.url, policy, fleet),
            workers=lambda: workers,
        )  # fmt: skip
        tasks, total = runner.tasks("train"), Collected()
        with _new_file(path) as file:
            for step in range(1, config.loop.steps + 1):
                step_tasks = list(itertools.islice(tasks, rollout.groups))
                if len(step_tasks) < rollout.groups:
                    raise tasks_ended(
                        config.env.name, "train", (step - 1) * rollout.groups + len(step_tasks),
                        config.loop.steps * rollout.groups,
                    )  # fmt: skip
                groups = await runner.groups(
                    step_tasks, rollout.group_size, (config.seed, "collect", step)
                )
                for sample in _samples(step, groups):
                    file.write(sample.to_json() + b"\n")
                file.flush()
                total = _add(total, groups)
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


async def _count_workers(fleet: RemoteFleet) -> int:
    """Return how many workers serve; 0 without a control plane, which collecting does not need."""
    try:
        workers = workers_of(await fleet.state())
    except LockstepError:
        return 0
    return sum(worker["state"] == "serving" for worker in workers)


async def _keep_weights(error: LockstepError) -> None:
    """Restore nothing before a rollout is retried: another trainer owns the weights."""


def _samples(step: int, groups: list[RolloutGroup]) -> Iterator[Sample]:
    for number, group in enumerate(groups):
        for at, rollout in enumerate(group.rollouts):
            if rollout.reward.failure is not None:
                continue
            note = {"step": step, "group": number, "rollout": at}
            for sample in rollout.samples:
                yield replace(sample, reward=rollout.reward.value, notes=(*sample.notes, note))


def _add(total: Collected, groups: list[RolloutGroup]) -> Collected:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    whole = [sample for rollout in rollouts if rollout.reward.failure is None
             for sample in rollout.samples]  # fmt: skip
    failed = dict(total.failed)
    for cause, count in failures(groups).items():
        failed[cause] = failed.get(cause, 0) + count
    count = total.rollouts + len(rollouts)
    rewards = total.reward * total.rollouts + sum(rollout.reward.value for rollout in rollouts)
    return Collected(
        rollouts=count,
        samples=total.samples + len(whole),
        tokens=total.tokens + sum(sum(sample.sampled_mask) for sample in whole),
        reward=rewards / max(count, 1),
        solved=total.solved + sum(rollout.reward.solved for rollout in rollouts),
        failed=tuple(sorted(failed.items())),
    )
