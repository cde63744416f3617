"""The queue of rollout groups: taken in the order of their tasks, with their errors."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from lockstep.tokens.errors import BadRequest
from lockstep.train.envs.environment import Reward, Task
from lockstep.train.group_queue import GroupQueue
from lockstep.train.learning.batch import Rollout, RolloutGroup

SECONDS = 60.0
TASK = Task(({"role": "user", "content": "Reverse: 123"},))


async def empty_group(_: int, __: Task) -> RolloutGroup:
    return RolloutGroup(())


async def test_take_returns_none_after_the_last_group() -> None:
    async with asyncio.timeout(SECONDS):
        async with GroupQueue(enumerate([TASK, TASK]), empty_group, limit=4) as queue:
            assert [await queue.take() for _ in range(3)] == [
                RolloutGroup(()),
                RolloutGroup(()),
                None,
            ]
        async with GroupQueue(enumerate([]), empty_group, limit=4) as queue:
            assert await queue.take() is None


async def test_groups_are_taken_in_the_order_of_their_tasks() -> None:
    """In the order of completion a step would learn from short responses and drop long ones."""
    gate, finished = asyncio.Event(), []

    async def run_group(number: int, _: Task) -> RolloutGroup:
        if number == 0:
            await gate.wait()
        finished.append(number)
        return RolloutGroup((Rollout(Reward(float(number), False), (), 0, 1),))

    async with asyncio.timeout(SECONDS):
        async with GroupQueue(enumerate([TASK] * 3), run_group, limit=3) as queue:
            first = asyncio.create_task(queue.take())
            while finished != [1, 2]:
                await asyncio.sleep(0)
            assert not first.done()
            gate.set()
            taken = [await first, await queue.take(), await queue.take()]
    assert [group.rollouts[0].reward.value for group in taken if group] == [0.0, 1.0, 2.0]


async def test_a_failed_group_raises_while_an_earlier_one_is_running() -> None:
    async def run_group(number: int, _: Task) -> RolloutGroup:
        if number == 0:
            await asyncio.Event().wait()
        raise BadRequest(f"group {number}")

    async with asyncio.timeout(SECONDS):
        async with GroupQueue(enumerate([TASK] * 2), run_group, limit=2) as queue:
            with pytest.raises(BadRequest, match="group 1"):
                await queue.take()


async def test_an_error_of_the_task_source_is_raised() -> None:
    def broken() -> Iterator[tuple[int, Task]]:
        yield 0, TASK
        raise BadRequest("the dataset is gone")

    async with asyncio.timeout(SECONDS):
        async with GroupQueue(broken(), empty_group, limit=4) as queue:
            taken = [await asyncio.gather(queue.take(), return_exceptions=True) for _ in "ab"]
    assert "the dataset is gone" in [str(result) for (result,) in taken]


async def test_one_of_several_failed_groups_is_raised_and_none_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fails(number: int, _: Task) -> RolloutGroup:
        raise BadRequest(f"group {number}")

    async with asyncio.timeout(SECONDS):
        async with GroupQueue(enumerate([TASK] * 4), fails, limit=4) as queue:
            with pytest.raises(BadRequest, match="group 0"):
                await queue.take()
            await asyncio.sleep(0)
    del queue
    gc.collect()
    assert caplog.records == []
