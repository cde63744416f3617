"""Errors of rollouts: one typed error instead of nested exception groups."""

from __future__ import annotations

import asyncio

import pytest

from lockstep.tokens.errors import Conflict, LockstepError
from lockstep.train.failure import one_error


async def test_nested_exception_groups_become_one_typed_error() -> None:
    async def fail(error: Exception) -> None:
        raise error

    async def many() -> None:
        async with asyncio.TaskGroup() as inner:
            inner.create_task(fail(ValueError("whatever")))
            inner.create_task(fail(Conflict("the cause")))

    async def more() -> None:
        with one_error():
            async with asyncio.TaskGroup() as outer:
                outer.create_task(many())

    with pytest.raises(LockstepError, match="the cause") as caught:
        await more()
    assert caught.value.__notes__ == ["1 other tasks failed at the same time"]
