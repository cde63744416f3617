"""n choices from a server that gives one per response: n requests at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from lockstep.backends.merge_streams import merge_streams
from lockstep.backends.transport import CompletionStream
from lockstep.protocol.common.request import GenerateRequest
from lockstep.tokens import Completion

One = Callable[[GenerateRequest, int], Awaitable[Completion]]
OneStream = Callable[[GenerateRequest, int], CompletionStream]


async def gather(request: GenerateRequest, one: One) -> list[Completion]:
    """The n completions in order; when one fails the others are cancelled and its error raised."""
    n = request.sampling.n
    if n == 1:
        return [await one(request, 0)]

    async def generate_one(index: int) -> Completion:
        return await one(request.alone(index), index)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(generate_one(index)) for index in range(n)]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def merge(request: GenerateRequest, one: OneStream) -> CompletionStream:
    """The deltas of n streams as they come, then the n completions in order."""
    streams = [one(request.alone(index), index) for index in range(request.sampling.n)]
    completions: list[Completion] = []
    async with aclosing(merge_streams(streams)) as arrivals:
        async for _, item in arrivals:
            if isinstance(item, Completion):
                completions.append(item)
            else:
                yield item
    for completion in sorted(completions, key=lambda each: each.index):
        yield completion
