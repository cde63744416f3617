"""n choices from a server that returns one per request: n requests at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from lockstep.backends.merge_streams import merge_streams
from lockstep.backends.transport import CompletionStream
from lockstep.protocol.common.request import GenerateRequest
from lockstep.tokens import Completion

Generate = Callable[[GenerateRequest, int], Awaitable[Completion]]
Stream = Callable[[GenerateRequest, int], CompletionStream]


async def gather(request: GenerateRequest, generate: Generate) -> list[Completion]:
    """Return the n completions in order. When a request fails, cancel the others and raise its
    error."""
    n = request.sampling.n
    if n == 1:
        return [await generate(request, 0)]

    async def generate_choice(index: int) -> Completion:
        return await generate(request.alone(index), index)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(generate_choice(index)) for index in range(n)]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def merge(request: GenerateRequest, stream: Stream) -> CompletionStream:
    """Yield the deltas of n streams as they arrive, then the n completions in order."""
    streams = [stream(request.alone(index), index) for index in range(request.sampling.n)]
    completions: list[Completion] = []
    async with aclosing(merge_streams(streams)) as arrivals:
        async for _, item in arrivals:
            if isinstance(item, Completion):
                completions.append(item)
            else:
                yield item
    for completion in sorted(completions, key=lambda completion: completion.index):
        yield completion
