"""A gateway with all its data routes in front of a scripted worker, for tests of agent dialects."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx

from lockstep.gateway.sessions.sessions import Sessions
from lockstep.render import Renderer
from lockstep.tokens import Sample
from tests.gateway.data_gateway import data_gateway
from tests.processes import WorkerProcess

Event = tuple[str, Any]


@contextmanager
def scripted_worker(
    directory: Path, rules: list[dict[str, Any]], *more: str
) -> Iterator[WorkerProcess]:
    path = directory / "script.jsonl"
    path.write_text("\n".join(map(json.dumps, rules)))
    process = WorkerProcess("--script", str(path), *more)
    try:
        yield process
    finally:
        process.stop()


class DialectServer:
    """The gateway's URL, and what its sessions hold."""

    def __init__(self, url: str, worker: WorkerProcess, sessions: Sessions) -> None:
        self.url, self.worker, self.sessions = url, worker, sessions
        self.http = httpx.AsyncClient(base_url=url, timeout=60)
        self.renderer = Renderer.load("tiny")

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        return await self.http.post(path, json=body, headers=headers)

    async def ok(self, path: str, body: dict[str, Any], **headers: str) -> Any:
        """The response to a request that must succeed."""
        response = await self.post(path, body, **headers)
        assert response.status_code == 200, response.text
        return response.json()

    async def events(self, path: str, body: dict[str, Any], **headers: str) -> list[Event]:
        """The named events of a streamed response."""
        response = await self.post(path, {**body, "stream": True}, **headers)
        assert response.status_code == 200, response.text
        return named_events(response.text)

    async def samples(self, session: str) -> list[Sample]:
        """The session's samples, each re-scored by the worker to the bit."""
        samples = await self.sessions.samples(session)
        for sample in samples:
            _, probe = await self.worker.control("probe", token_ids=[list(sample.token_ids)])
            scores = [0.0, *probe["logprobs"][0]]
            for at, sampled in enumerate(sample.sampled_mask):
                assert not sampled or sample.logprobs[at] == scores[at], at
        return samples

    def breaks(self, session: str) -> dict[str, int]:
        cached = self.sessions.cache.find(session)
        assert cached is not None
        return dict(cached.ledger.break_counts)


def named_events(text: str) -> list[Event]:
    events = []
    for block in text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        data = json.loads(lines["data"])
        assert lines["event"] == data["type"], block
        events.append((lines["event"], data))
    return events


@asynccontextmanager
async def dialect_server(worker: WorkerProcess, **options: Any) -> AsyncIterator[DialectServer]:
    async with data_gateway(worker.url, **options) as (url, sessions):
        server = DialectServer(url, worker, sessions)
        try:
            yield server
        finally:
            await server.http.aclose()
