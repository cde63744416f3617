"""Base of transports whose server returns one choice per request: n choices are n requests."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from lockstep.backends.http_transport import HttpTransport
from lockstep.backends.merge_streams import merge_streams
from lockstep.backends.transport import CompletionStream, ModelCard
from lockstep.protocol.common.request import GenerateRequest
from lockstep.tokens import Completion


class RepeatedChoices(HttpTransport):
    """A transport that sends n requests at once for n choices."""

    gives_choices = False

    async def _prepare(self, request: GenerateRequest) -> tuple[GenerateRequest, ModelCard | None]:
        """Check a request before anything is sent; return it as sent, and the model's card."""
        raise NotImplementedError

    async def _generate(
        self, request: GenerateRequest, index: int, card: ModelCard | None
    ) -> Completion:
        """Return the completion of one choice."""
        raise NotImplementedError

    def _follow(
        self, request: GenerateRequest, index: int, card: ModelCard | None
    ) -> CompletionStream:
        """Yield the deltas of one choice, then its completion."""
        raise NotImplementedError

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Return the n completions in order. A failed request cancels the others."""
        request, card = await self._prepare(request)
        n = request.sampling.n
        if n == 1:
            return [await self._generate(request, 0, card)]
        try:
            async with asyncio.TaskGroup() as group:
                choices = [self._generate(request.alone(index), index, card) for index in range(n)]
                tasks = [group.create_task(choice) for choice in choices]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def stream(self, request: GenerateRequest) -> CompletionStream:
        """Yield the deltas of n streams as they arrive, then the n completions in order."""
        request, card = await self._prepare(request)
        choices = range(request.sampling.n)
        streams = [self._follow(request.alone(index), index, card) for index in choices]
        completions: list[Completion] = []
        async with aclosing(merge_streams(streams)) as arrivals:
            async for _, item in arrivals:
                if isinstance(item, Completion):
                    completions.append(item)
                else:
                    yield item
        for completion in sorted(completions, key=lambda completion: completion.index):
            yield completion
