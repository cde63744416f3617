"""Merged requests of a group give each rollout what its own request would have returned."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

import lockstep
from lockstep.backends.transport import GenerateRequest, Transport
from lockstep.client.chat import TURN_STRIDE
from lockstep.client.policy import Policy
from lockstep.tokens import Completion, Sampling, VersionSpan
from lockstep.tokens.errors import ContractError, LockstepError, Unavailable
from lockstep.train import TrainConfig
from lockstep.train.envs.bundled import Calc, Reverse
from lockstep.train.envs.environment import CHAT_STRIDE, Environment
from lockstep.train.group_requests import GroupRequests, SiblingWaits
from lockstep.train.learning.batch import RolloutGroup
from lockstep.train.retry import RetryPolicy
from lockstep.train.rollout import RolloutRunner
from tests.processes import WorkerProcess

GROUPS, SIZE = 4, 8


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    process = WorkerProcess("--max-model-len", "256", "--max-num-seqs", "16")
    yield process
    process.stop()


@pytest.fixture
async def policy(worker: WorkerProcess) -> AsyncIterator[Policy]:
    async with lockstep.connect(worker.url, model="tiny") as policy:
        policy.renderer().render([{"role": "user", "content": "the first is slow"}])
        yield policy


class Counting:
    """A transport that counts requests and fails selected ones."""

    gives_choices = True

    def __init__(self, transport: Transport, fails: Callable[[int], bool] = lambda _: False):
        self._transport = transport
        self._fails = fails
        self.choices: list[int] = []

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        self.choices.append(request.sampling.n)
        if self._fails(len(self.choices)):
            raise Unavailable("the worker died")
        return await self._transport.generate(request)


async def played(
    policy: Policy, environment: Environment, *, workers: int, counting: Counting | None = None
) -> tuple[list[RolloutGroup], list[int]]:
    """Run groups; return them and the number of choices of each request."""
    counting = counting or Counting(policy.transport)
    config = TrainConfig.of({"rollout": {"groups": GROUPS, "group_size": SIZE}})

    async def restore(_: LockstepError) -> None:
        pass

    runner = RolloutRunner(
        policy.over(cast(Transport, counting)), environment, config, RetryPolicy(30), restore,
        workers=lambda: workers,
    )  # fmt: skip
    tasks = list(itertools.islice(runner.tasks("train"), GROUPS))
    return await runner.groups(tasks, SIZE, (1, "step", 1)), counting.choices


@pytest.mark.parametrize("environment", [Reverse(), Calc()])
async def test_a_merged_request_gives_the_rollouts_of_separate_requests(
    policy: Policy, environment: Environment
) -> None:
    alone, singles = await played(policy, environment, workers=0)
    shared, choices = await played(policy, environment, workers=1)
    # Ids, logprobs, versions, rewards, breaks and retries: the whole record.
    assert shared == alone
    assert choices[:GROUPS] == [SIZE] * GROUPS
    assert singles == [1] * len(singles)
    assert len({tuple(rollout.samples[0].token_ids) for rollout in shared[0].rollouts}) > 1


async def test_every_worker_gets_work_when_there_are_few_groups(policy: Policy) -> None:
    _, choices = await played(policy, Reverse(), workers=GROUPS * 4)
    assert choices == [SIZE // 4] * GROUPS * 4


async def test_a_failed_merged_request_is_retried_by_each_rollout(policy: Policy) -> None:
    whole, _ = await played(policy, Reverse(), workers=1)
    failing = Counting(policy.transport, lambda count: count == 2)
    again, _ = await played(policy, Reverse(), workers=1, counting=failing)
    retries = [[rollout.retries for rollout in group.rollouts] for group in again]
    assert sorted(retries) == [[0] * SIZE] * (GROUPS - 1) + [[1] * SIZE]
    first_tries = [
        replace(group, rollouts=tuple(replace(rollout, retries=0) for rollout in group.rollouts))
        for group in again
    ]
    assert first_tries == whole


async def test_a_server_without_choices_gets_separate_requests(policy: Policy) -> None:
    counting = Counting(policy.transport)
    counting.gives_choices = False
    _, choices = await played(policy, Reverse(), workers=1, counting=counting)
    assert choices == [1] * GROUPS * SIZE


def test_no_two_turns_of_a_group_share_a_seed() -> None:
    """Seeds of rollouts, their conversations and their turns never overlap."""
    seeds = {
        at + chat * CHAT_STRIDE + turn * TURN_STRIDE
        for at in range(64)
        for chat in range(16)
        for turn in range(64)
    }
    assert len(seeds) == 64 * 16 * 64


# Misbehaving transports, and the order in which requests arrive


class Scripted:
    """A transport whose choices have given lengths and wait for a signal."""

    gives_choices = True

    def __init__(self, *lengths: int) -> None:
        self.requests: list[GenerateRequest] = []
        self.cancelled = 0
        self.go = asyncio.Event()
        self._lengths = lengths or (1,) * 8

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        self.requests.append(request)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return [
            Completion(
                token_ids=[at] * length, logprobs=[-1.0] * length, prompt_ids=request.prompt_ids,
                finish="stop", versions=(VersionSpan("v", 0, length),), index=at,
            )
            for at, length in enumerate(self._lengths[: request.sampling.n])
        ]  # fmt: skip


def request(seed: int | None, **options: Any) -> GenerateRequest:
    sampling = Sampling(seed=seed, **options)
    return GenerateRequest(prompt_ids=[1, 2, 3], sampling=sampling, model="tiny")


def group_of(scripted: Scripted, size: int, waits: SiblingWaits | None = None) -> GroupRequests:
    return GroupRequests(
        cast(Transport, scripted), waits or SiblingWaits(), size=size, max_choices=8
    )


async def sent(*requests: GenerateRequest) -> list[tuple[int | None, int]]:
    """Return seed and number of choices of each request that is sent."""
    scripted = Scripted()
    scripted.go.set()
    group = group_of(scripted, len(requests))
    await asyncio.gather(*(group.member().generate(each) for each in requests))
    return [(each.sampling.seed, each.sampling.n) for each in scripted.requests]


async def test_only_requests_with_consecutive_seeds_are_merged() -> None:
    assert await sent(request(7), request(5), request(6)) == [(5, 3)]
    assert await sent(request(5), request(7)) == [(5, 1), (7, 1)]
    assert await sent(request(5), request(5)) == [(5, 1), (5, 1)]
    assert await sent(request(5), request(6, temperature=0.5)) == [(5, 1), (6, 1)]
    assert await sent(request(None), request(None)) == [(None, 1), (None, 1)]
    named = [replace(request(seed), request_id="mine") for seed in (5, 6)]
    assert sorted(await sent(*named)) == [(5, 1), (6, 1)]


async def test_a_request_without_siblings_does_not_wait_long() -> None:
    """Some rollouts of a group may send no request, or send it later."""
    scripted = Scripted()
    scripted.go.set()
    group = group_of(scripted, 8)
    async with asyncio.timeout(1):
        await group.member().generate(request(5))
        await asyncio.gather(*(group.member().generate(request(seed)) for seed in (6, 7)))
    assert [each.sampling.n for each in scripted.requests] == [1, 2]


async def test_each_rollout_gets_its_own_choice_with_index_0() -> None:
    scripted = Scripted()
    scripted.go.set()
    group = group_of(scripted, 2)
    made = await asyncio.gather(*(group.member().generate(request(seed)) for seed in (6, 5)))
    assert [(each.token_ids, each.index) for (each,) in made] == [([1], 0), ([0], 0)]


async def test_too_few_choices_are_an_error_for_every_rollout() -> None:
    scripted = Scripted(1, 1)
    scripted.go.set()
    group = group_of(scripted, 3)
    tasks = [group.member().generate(request(seed)) for seed in range(3)]
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in errors] == [ContractError] * 3
    assert len({id(error) for error in errors}) == 3


async def test_a_merged_request_is_cancelled_with_its_last_rollout() -> None:
    scripted = Scripted()
    group = group_of(scripted, 2)
    tasks = [asyncio.create_task(group.member().generate(request(seed))) for seed in range(2)]
    while not scripted.requests:
        await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.wait(tasks[:1])
    await asyncio.sleep(0)
    assert not scripted.cancelled
    tasks[1].cancel()
    await asyncio.wait(tasks)
    await asyncio.sleep(0)
    assert scripted.cancelled == 1


async def test_multi_turn_rollouts_stop_merging_requests_when_they_wait_too_long() -> None:
    """The next turn of a short response must not wait for the longest sibling."""
    scripted, waits = Scripted(300, 1), SiblingWaits()
    scripted.go.set()
    group = group_of(scripted, 2, waits)
    members = [group.member(), group.member()]
    await asyncio.gather(*(m.generate(request(seed)) for seed, m in enumerate(members)))
    assert not waits.too_long  # both may have ended with it
    later = [request(TURN_STRIDE + seed) for seed in range(2)]
    await asyncio.gather(*(m.generate(r) for m, r in zip(members, later, strict=True)))
    assert waits.too_long
    next_group = group_of(scripted, 2, waits)
    await asyncio.gather(*(next_group.member().generate(request(seed)) for seed in range(2)))
    assert [each.sampling.n for each in scripted.requests] == [2, 1, 1, 1, 1]
