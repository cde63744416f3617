"""A proxy in front of a real worker that makes calls of a method fail in a given way."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

import aiohttp
from aiohttp import web

from tests.processes import WorkerProcess

Kind = Literal[
    "delay",
    "drop",
    "swallow",
    "hang",
    "error",
    "null",
    "corrupt",
    "kill",
    "kill after",
    "hook",
    "hook before",
]
Hook = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Fault:
    """`count` calls of a method are struck, from the `number`-th on."""

    method: str
    kind: Kind
    number: int = 1
    count: int = 1
    seconds: float = 0.3
    hook: Hook | None = None


class Injector:
    """The data port and the system port of a worker, both through here."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker
        self.struck = 0
        self.calls: Counter[str] = Counter()
        self._faults: list[Fault] = []
        self._hanging = asyncio.Event()
        self._runners: list[web.AppRunner] = []
        self.url = self.system_url = ""

    async def __aenter__(self) -> Injector:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True), auto_decompress=False
        )
        self.url = await self._listen(lambda: self.worker.url)
        self.system_url = await self._listen(lambda: self.worker.system_url)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._hanging.set()
        for runner in self._runners:
            await runner.cleanup()
        await self._session.close()

    def strike(self, method: str, kind: Kind, **how: object) -> None:
        """Restart the count of calls."""
        self.calls.clear()
        self.struck = 0
        self._hanging = asyncio.Event()
        self._faults = []
        self.also(method, kind, **how)

    def also(self, method: str, kind: Kind, **how: object) -> None:
        """One more fault, beside those that were set before."""
        self._faults.append(Fault(method, kind, **how))  # type: ignore[arg-type]

    def heal(self) -> None:
        """Ends the faults, and whatever hangs because of them."""
        self._faults = []
        self._hanging.set()

    async def _listen(self, target: Callable[[], str]) -> str:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._handle(request, target())

        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{tail:.*}", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._runners.append(runner)
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _handle(self, request: web.Request, target: str) -> web.StreamResponse:
        method = request.path.rpartition("/")[2]
        self.calls[method] += 1
        for fault in self._faults:
            last = fault.number + fault.count
            if fault.method == method and fault.number <= self.calls[method] < last:
                self.struck += 1
                return await self._struck(fault, request, target)
        return await self._forward(request, target)

    async def _struck(self, fault: Fault, request: web.Request, target: str) -> web.StreamResponse:
        match fault.kind:
            case "delay":
                await asyncio.sleep(fault.seconds)
                return await self._forward(request, target)
            case "hook" if fault.hook is not None:
                response = await self._forward(request, target)
                await fault.hook()
                return response
            case "hook before" if fault.hook is not None:
                await fault.hook()
                return await self._forward(request, target)
            case "swallow":
                await self._forward(request, target)
            case "hang":
                await self._hanging.wait()
            case "error":
                return web.json_response({"status": "error", "message": "it went wrong"})
            case "null":
                return web.json_response(None)
            case "corrupt":
                return await self._corrupted(request, target)
            case "kill":
                self._kill()
            case "kill after":
                await self._forward(request, target)
                self._kill()
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    def _kill(self) -> None:
        self.worker.process.send_signal(signal.SIGKILL)
        self.worker.process.wait(10)

    async def _corrupted(self, request: web.Request, target: str) -> web.Response:
        response = await self._forward(request, target)
        assert isinstance(response, web.Response)
        assert isinstance(response.body, bytes)
        body = json.loads(response.body)
        if "logprobs" not in body:
            return web.Response(body=response.body[:-3], content_type="application/json")
        body["logprobs"][-1][-1] -= 0.01
        return web.json_response(body)

    async def _forward(self, request: web.Request, target: str) -> web.StreamResponse:
        body = await request.read()
        drop = ("host", "content-length", "connection", "transfer-encoding")
        headers = {k: v for k, v in request.headers.items() if k.lower() not in drop}
        try:
            async with self._session.request(
                request.method, target + request.path_qs, data=body, headers=headers
            ) as response:
                if "event-stream" in response.headers.get("content-type", ""):
                    return await self._relay(request, response)
                raw = await response.read()
                kind = response.headers.get("content-type", "").partition(";")[0]
                return web.Response(body=raw, status=response.status, content_type=kind)
        except aiohttp.ClientError:
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=502)

    @staticmethod
    async def _relay(request: web.Request, response: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        async for chunk in response.content.iter_any():
            await response.write(chunk)
        return response
