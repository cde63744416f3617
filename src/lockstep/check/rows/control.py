"""Pauses (--mutate): their effect on the generation in flight and on new requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lockstep.backends.admin import PauseMode
from lockstep.check.inflight import InFlight, in_flight
from lockstep.check.outcome import Broken, require, require_same
from lockstep.check.row import RowGroup
from lockstep.check.target import Target

GROUP = RowGroup("control", mutates=True)
STILL = 0.6
"""Seconds for which a paused server is watched."""
SETTLE = 0.2
"""Seconds without a token after which no token sampled before a pause is still in transit."""
ENDED = 10.0
"""Seconds in which an aborted request must have ended."""


@asynccontextmanager
async def paused(target: Target, mode: PauseMode) -> AsyncIterator[None]:
    """Pause the server for the block and resume it at the end, whatever happens."""
    await target.admin.pause(mode)
    try:
        yield
    finally:
        await target.admin.resume()


async def queues(target: Target) -> asyncio.Task[str]:
    """Send a request to a paused server, which must queue it. Raises Broken if it does not."""
    task = asyncio.create_task(_new(target))
    await asyncio.wait((task,), timeout=STILL)
    require(not task.done(), f"a new request did not wait: {task.result() if task.done() else ''}")
    return task


async def _new(target: Target) -> str:
    reply = await target.send_ids(target.prompt(seed=21))
    return reply.describe()


async def require_response(task: asyncio.Task[str]) -> None:
    status = await task
    require(status == "200", f"the request that waited was answered {status} after resume")


@GROUP.row("keep", "pause keep: frozen in mid-generation, then continued exactly", "L6 F43",
           seconds=180)  # fmt: skip
async def keep(target: Target) -> str:
    for length in target.lengths:
        request = target.request(target.prompt(seed=22), max_tokens=length)
        (whole,) = await target.transport.generate(request)
        async with in_flight(target, request) as running:
            await running.begun()
            async with paused(target, "keep"):
                before = await _settled(running)
                await asyncio.sleep(STILL)
                after = len(running.tokens)
            completion = await running.end()
        require(after == before, f"{after - before} tokens came in {STILL} s of a pause")
        if before < length:
            break
    else:
        raise Broken(f"all {before} tokens had come before the pause: nothing froze")
    evidence = require_same(whole, completion, target.tolerance, "with and without a pause")
    return f"frozen at {before} of {length} tokens; {evidence}"


async def _settled(running: InFlight) -> int:
    """Return the number of tokens received once none are in transit."""
    count = -1
    while count < (count := len(running.tokens)):
        await asyncio.sleep(SETTLE)
    return count


@GROUP.row("wait", "pause wait: requests in flight run to their end", "L6", seconds=180)
async def wait(target: Target) -> str:
    request = target.request(target.prompt(seed=23), max_tokens=target.long)
    async with in_flight(target, request) as running:
        seen = await running.begun()
        async with paused(target, "wait"):
            await asyncio.sleep(SETTLE)
            ended = running.task.done()
        completion = await running.end()
    count, finish = len(completion.token_ids), completion.finish
    evidence = f"paused at {seen} of {target.long} tokens: {count} came, {finish!r}"
    require(ended, f"{evidence}; but pause returned before it had ended")
    require(count == target.long and finish == "length", evidence)
    return f"{evidence}, before pause returned"


@GROUP.row(
    "abort",
    "pause abort: requests in flight end with abort and their tokens",
    "L6 F12",
    seconds=180,
)
async def abort(target: Target) -> str:
    for length in target.lengths:
        request = target.request(target.prompt(seed=24), max_tokens=length)
        (whole,) = await target.transport.generate(request)
        async with in_flight(target, request) as running:
            seen = await running.begun()
            async with paused(target, "abort"):
                # Before resume: a pause that only froze the request would let it finish normally
                # later.
                await asyncio.wait((running.task,), timeout=ENDED)
                ended = running.task.done()
            require(ended, f"the request in flight had not ended {ENDED:g} s after pause abort")
            completion = await running.end()
        count = len(completion.token_ids)
        if count < length:
            break
    evidence = f"paused at {seen} of {length} tokens: {count} kept, finish {completion.finish!r}"
    require(completion.finish == "abort" and seen <= count < length, evidence)
    require(
        completion.token_ids == whole.token_ids[:count],
        f"{evidence}; they are not those of the whole",
    )
    return f"{evidence}, the first of the whole answer"


@GROUP.row("queue", "while paused, new requests wait and are served later", "L6", seconds=120)
async def queue(target: Target) -> str:
    modes: tuple[PauseMode, ...] = ("keep", "wait", "abort")
    for mode in modes:
        async with paused(target, mode):
            task = await queues(target)
        await require_response(task)
    return f"{', '.join(modes)}: a new request waited {STILL} s, and was answered after resume"
