"""A proxy before a real worker that breaks the contract in one place, as the test says."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

Change = Callable[[dict[str, Any]], dict[str, Any]]


def same(body: dict[str, Any]) -> dict[str, Any]:
    return body


@dataclass(frozen=True)
class Fault:
    """How requests, whole responses, errors and streamed events are changed; or what happens
    instead.

    `swallow` names a path whose POST is answered with that body and does nothing, unless the body
    is None; `token` is added to requests that have none; `as_post` turns every GET into a POST;
    `dies` drops connections; `holds` sends the events of a stream when it has ended.
    """

    request: Change = same
    response: Change = same
    error: Change = same
    event: Change = same
    swallow: tuple[str, Callable[[dict[str, Any]], dict[str, Any] | None]] | None = None
    token: str | None = None
    as_post: bool = False
    dies: bool = False
    holds: bool = False


def per_choice(change: Change) -> Change:
    """A change of every choice of a response or event."""

    def apply(body: dict[str, Any]) -> dict[str, Any]:
        return body | {"choices": [change(dict(one)) for one in body.get("choices", [])]}

    return apply


def values_of(choice: dict[str, Any]) -> list[Any]:
    """The list that holds the logprobs, in either form."""
    logprobs = choice.get("logprobs") or {}
    return logprobs.get("values") or logprobs.get("content") or []


@asynccontextmanager
async def broken(url: str, fault: Fault) -> AsyncIterator[str]:
    """The URL of a server that passes everything on to `url`, less what the fault breaks."""
    async with aiohttp.ClientSession() as session:

        async def handle(request: web.Request) -> web.StreamResponse:
            if fault.dies and request.path != "/v1/models":
                if request.transport is not None:
                    request.transport.abort()
                return web.Response()
            return await pass_on(session, url, fault, request)

        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        try:
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()


async def pass_on(
    session: aiohttp.ClientSession, url: str, fault: Fault, request: web.Request
) -> web.StreamResponse:
    raw = await request.read()
    body = json.loads(raw) if raw else {}
    path, swallow = fault.swallow or ("", same)
    if request.path == path and (answer := swallow(body)) is not None:
        return web.json_response(answer)
    headers = {"content-type": "application/json"}
    if fault.token is not None:
        headers["authorization"] = f"Bearer {fault.token}"
    elif "authorization" in request.headers:
        headers["authorization"] = request.headers["authorization"]
    method = "POST" if fault.as_post else request.method
    sent = None if method == "GET" else json.dumps(fault.request(body))
    async with session.request(method, url + request.path, data=sent, headers=headers) as upstream:
        if upstream.content_type != "text/event-stream":
            whole = await upstream.json(content_type=None)
            changed = (fault.response if upstream.status == 200 else fault.error)(whole)
            return web.json_response(changed, status=upstream.status)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        held = b""
        async for line in upstream.content:
            if line.startswith(b"data: {"):
                line = b"data: " + json.dumps(fault.event(json.loads(line[6:]))).encode() + b"\n"
            if fault.holds:
                held += line
            else:
                await response.write(line)
        if held:
            await response.write(held)
        return response
