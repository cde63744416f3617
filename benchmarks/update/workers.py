"""Two worker processes under load, and two ways to give them new weights while they generate."""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp

from lockstep.backends.lockstep.admin import LockstepAdmin
from lockstep.fleet.fleet import Fleet
from lockstep.fleet.routing.pool import Pool

ARGUMENTS = ("--max-model-len", "512", "--max-num-seqs", "16", "--drain-seconds", "0")
STREAMS = 2
"""Requests that each worker has while it is updated."""
PROMPT, TOKENS = 16, 64
"""Tokens of each."""
SETTLE = 4
"""Tokens that each of them has before an update begins, and gets after it."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A `lockstep worker` process."""

    url: str
    system_url: str
    token: str

    async def engine(self, session: aiohttp.ClientSession, method: str, **body: Any) -> Any:
        """One call of its system port. Raises when it is refused."""
        headers = {"authorization": f"Bearer {self.token}"}
        url = f"{self.system_url}/engine/{method}"
        async with session.post(url, json=body, headers=headers) as response:
            response.raise_for_status()
            return await response.json()


@contextmanager
def workers(model: Path, count: int = 2) -> Iterator[list[Worker]]:
    """So many workers on that model, one torch thread each."""
    token = secrets.token_hex(8)
    environ = {**os.environ, "LOCKSTEP_ADMIN_TOKEN": token}
    command = [sys.executable, "-m", "lockstep", "worker", str(model), *ARGUMENTS]
    started: list[subprocess.Popen[str]] = []
    try:
        for _ in range(count):
            started.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
            )
        yield [_ready(process, token) for process in started]
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


def _ready(process: subprocess.Popen[str], token: str) -> Worker:
    line = process.stdout.readline() if process.stdout else ""
    if not line:
        raise RuntimeError(f"a worker ended with code {process.wait()}")
    ready = json.loads(line)
    return Worker(ready["url"], ready["system_url"], token)


@dataclass
class Load:
    """Streaming requests on every worker: when each of their tokens came, per worker."""

    arrivals: list[list[float]] = field(default_factory=list)

    def gap(self) -> float:
        """The longest time that one of the workers sent no token."""
        return max(after - before for times in self.arrivals for before, after in pairwise(times))


@asynccontextmanager
async def load(session: aiohttp.ClientSession, fleet: list[Worker]) -> AsyncIterator[Load]:
    """Requests that run all the while; entered once each of them has begun to stream, left once
    each went on afterwards."""
    running = Load([[] for _ in fleet])
    rng = random.Random(0)
    counts = [[0] * STREAMS for _ in fleet]

    async def read(at: int, stream: int) -> None:
        """One request after the other, so that none is long whatever an update takes."""
        url, sampling = fleet[at].url + "/inference/v1/generate", {"max_tokens": TOKENS}
        while True:
            prompt = [rng.randrange(1000) for _ in range(PROMPT)]
            body = {
                "token_ids": prompt,
                "stream": True,
                "sampling_params": {**sampling, "ignore_eos": True},
            }
            async with session.post(url, json=body) as response:
                response.raise_for_status()
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        running.arrivals[at].append(perf_counter())
                        counts[at][stream] += 1

    async def more() -> None:
        wanted = [[count + SETTLE for count in row] for row in counts]
        while any(
            have < want
            for row, aim in zip(counts, wanted, strict=True)
            for have, want in zip(row, aim, strict=True)
        ):
            for task in reading:
                if task.done():
                    task.result()
            await asyncio.sleep(0.002)

    reading = [
        asyncio.create_task(read(at, stream))
        for at in range(len(fleet))
        for stream in range(STREAMS)
    ]
    try:
        await more()
        yield running
        await more()
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


async def transaction(fleet: list[Worker], checkpoint: Path, version: str) -> float:
    """Lockstep's update; returns the seconds from the first worker's stop to the last one's go.

    The fleet's own record has them: its pause begins as it tells all workers to stop, and the first
    of them has stopped as soon as it responds.
    """
    async with Pool() as pool, Fleet(pool) as lockstep:
        for at, worker in enumerate(fleet):
            admin = LockstepAdmin(worker.system_url, worker.token)
            await lockstep.add(worker.url, admin, worker_id=f"w{at}")
        operation = await lockstep.update_weights(str(checkpoint), version=version, mode="keep")
        if operation.pause_seconds is None or {
            one.status for one in operation.workers.values()
        } != {"ok"}:
            raise RuntimeError(f"the update went wrong: {operation}")
        first_stop = min(one.seconds["quiesce"] for one in operation.workers.values())
        return operation.pause_seconds - first_stop


async def reload(
    session: aiohttp.ClientSession, fleet: list[Worker], checkpoint: Path, version: str
) -> float:
    """prime-rl's update: pause all, have all read the checkpoint, resume all; the same seconds."""

    async def pause(worker: Worker) -> float:
        await worker.engine(session, "pause_generation", mode="keep", clear_cache=False)
        return perf_counter()

    stopped = await asyncio.gather(*map(pause, fleet))
    where = {"model_path": str(checkpoint), "weight_version": version}
    await asyncio.gather(*(one.engine(session, "update_weights_from_disk", **where)
                           for one in fleet))  # fmt: skip
    await asyncio.gather(*(one.engine(session, "resume_generation") for one in fleet))
    return perf_counter() - min(stopped)
