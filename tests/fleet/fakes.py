"""Workers that are real HTTP servers and behave as a test sets them up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from aiohttp import web

from lockstep.fleet.routing.pool import Pool
from lockstep.fleet.worker import Worker

WORK = "/work"
Behaviour = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeWorker:
    """Answers /work with its name, unless `behave` says otherwise. It can die and come back."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.port = 0
        self.requests = 0
        self.health: dict[str, object] = {"status": "ok"}
        self.healthy = True
        self.hangs = False
        self.models = [{"id": "m", "owned_by": "lockstep", "max_model_len": 100}]
        self.aborted: int | None = 0
        self.behave: Behaviour = self.respond
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()
        self.left = asyncio.Event()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/inference/v1/abort_requests", self._abort)
        app.router.add_post(WORK, self._work)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def die(self) -> None:
        """Closes its port and every connection."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, _: web.Request) -> web.Response:
        if self.hangs:
            await self.gate.wait()
        return web.json_response(self.health, status=200 if self.healthy else 503)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.models})

    async def _abort(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "aborted", "aborted": self.aborted})

    async def _work(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        self.begun.set()
        return await self.behave(request)

    async def respond(self, _: web.Request) -> web.Response:
        return web.Response(text=self.name)

    async def held(self, _: web.Request) -> web.Response:
        """Answers when the gate opens; notices a client that leaves before."""
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.left.set()
            raise
        return web.Response(text=self.name)

    async def reset(self, request: web.Request) -> web.Response:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    def states(self, status: int) -> Behaviour:
        async def behave(_: web.Request) -> web.Response:
            error = {"message": f"{self.name} says {status}", "code": status}
            return web.json_response({"error": error}, status=status)

        return behave

    def events(self, count: int, *, then: str = "end") -> Behaviour:
        """Streams its name `count` times, then ends, breaks off ("cut") or waits ("hold")."""

        async def behave(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            for _ in range(count):
                await response.write(f"data: {self.name}\n\n".encode())
            if then == "cut" and request.transport is not None:
                request.transport.abort()
            if then == "hold":
                try:
                    await self.gate.wait()
                except asyncio.CancelledError:
                    self.left.set()
                    raise
            if then == "end":
                await response.write(b"data: [DONE]\n\n")
            return response

        return behave


@asynccontextmanager
async def fleet(count: int, **options: float) -> AsyncIterator[tuple[Pool, list[FakeWorker]]]:
    """A pool over fakes called w0, w1, ..."""
    fakes = [FakeWorker(f"w{index}") for index in range(count)]
    options = {"probe_seconds": 0.05, **options}
    try:
        async with Pool(**options) as pool:  # type: ignore[arg-type]
            for fake in fakes:
                await fake.start()
                await pool.add(fake.url, worker_id=fake.name)
            yield pool, fakes
    finally:
        for fake in fakes:
            fake.gate.set()
            await fake.die()


async def work(worker: Worker) -> str:
    """The call of most tests: the name of the worker that got it."""
    return (await worker.client.post(WORK, b"{}")).decode()


def work_stream(worker: Worker) -> AsyncIterator[bytes]:
    return worker.client.events(WORK, b"{}")


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Lets the loop run until `condition` holds; fails when it never does."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.002)
    assert condition()
