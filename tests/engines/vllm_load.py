"""Requests that keep a server busy, each checked against the weights it says it was made with."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from lockstep.backends.transport import GenerateRequest
from lockstep.tokens import Completion, Sampling
from tests.engines.vllm_models import VOCABULARY, Reference
from tests.engines.vllm_servers import Vllm

RUNNING = 4
LENGTH = 48


async def begun(server: Vllm, request: GenerateRequest) -> asyncio.Task[Completion]:
    """A request that has its first token and goes on; the task ends with its completion."""
    first = asyncio.Event()

    async def run() -> Completion:
        async with server.transport() as transport:
            async for item in transport.stream(request):
                if isinstance(item, Completion):
                    return item
                first.set()
        raise AssertionError("the stream ended without a completion")

    task = asyncio.create_task(run())
    waiting = asyncio.create_task(first.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return task


@asynccontextmanager
async def under_load(server: Vllm) -> AsyncIterator[list[Completion]]:
    """Requests come and go while the block runs; the list holds those that are done."""
    completions: list[Completion] = []
    stop = asyncio.Event()

    async def one(number: int) -> None:
        draw = random.Random(number)
        async with server.transport() as transport:
            while not stop.is_set():
                prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randrange(4, 200))]
                sampling = Sampling(max_tokens=LENGTH, logprobs=0, ignore_eos=True)
                request = GenerateRequest(prompt_ids=prompt, sampling=sampling, timeout=120.0)
                completions.extend(await transport.generate(request))

    async with asyncio.TaskGroup() as group:
        for number in range(RUNNING):
            group.create_task(one(number))
        try:
            yield completions
        finally:
            stop.set()


def furthest_off(completions: list[Completion], weights: Mapping[str, Path]) -> float:
    """The largest difference from transformers, each token under the version it carries."""
    known = {path: Reference(path) for path in set(weights.values())}
    worst = 0.0
    for each in completions:
        ids = [*each.prompt_ids, *each.token_ids]
        for span in each.versions:
            right = known[weights[span.version]].score(ids)[len(each.prompt_ids) - 1 :]
            for at in range(span.start, span.end):
                worst = max(worst, abs(each.logprobs[at] - right[at]))
    return worst
