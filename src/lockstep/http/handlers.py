"""Shared parts of HTTP routes: typed errors, event streams, and disconnected clients."""

from __future__ import annotations

import hmac
import logging
import math
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lockstep import tracing
from lockstep.http import sse
from lockstep.http.http_request import ClientGone, unless_gone
from lockstep.http.route_templates import UNKNOWN, RouteTemplates
from lockstep.protocol.common.error_body import error_body, error_fields
from lockstep.protocol.common.request_id import is_request_id
from lockstep.protocol.json.strict import too_deep
from lockstep.tokens.errors import WORKER_FAILURES, LockstepError, Unauthorized

log = logging.getLogger(__name__)
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]
CALLER = "caller"
"""Key in the state of a request under which its caller is stored: the tenant of its API key."""


def json_response(body: bytes | bytearray | object, status: int = 200) -> Response:
    """Return a JSON response; bytes are sent unchanged, because they are JSON already."""
    raw = body if isinstance(body, bytes | bytearray) else msgspec.json.encode(body)
    return Response(bytes(raw), status, media_type="application/json")


def require_bearer(request: Request, token: str) -> None:
    """Raise Unauthorized unless the request has this bearer token."""
    scheme, _, presented = request.headers.get("authorization", "").partition(" ")
    # Compare bytes: header values are decoded as Latin-1, and compare_digest rejects text beyond
    # ASCII.
    sent = presented.encode("latin-1")
    if scheme.lower() != "bearer" or not hmac.compare_digest(sent, token.encode()):
        raise Unauthorized(
            "the admin token that was sent is not the one of this server"
            if presented
            else "this route needs the header 'Authorization: Bearer <admin token>'",
            param="authorization",
        )


class EventStream(Response):
    """Server-sent events from an async iterator, which is closed when the client disconnects.

    An error after the start becomes an event `{"error": ...}`; `done` always ends the stream. With
    `open_end`, a failure of the worker ends it without `done`, after a comment that names it: for
    clients that continue from a stream without an end, and give up on an event with an error.
    """

    media_type = sse.MEDIA_TYPE

    def __init__(
        self,
        events: AsyncIterator[bytes],
        request_id: str | None = None,
        *,
        done: bytes = sse.DONE,
        open_end: bool = False,
    ) -> None:
        super().__init__(None, 200)
        del self.headers["content-length"]
        self._events = events
        self._request_id = request_id
        self._done = done
        self._open_end = open_end

    @classmethod
    async def started(
        cls, request: Request, events: AsyncGenerator[bytes, None], request_id: str | None = None
    ) -> EventStream:
        """Return the stream once its first event is ready, so that an earlier failure still has a
        status.

        Raises ClientGone, and any error that `events` raises before its first event.
        """
        return cls(_Started(await unless_gone(request, _first(events)), events), request_id)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"cache-control", b"no-store"), *self.raw_headers]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        with suppress(ClientGone):
            await unless_gone(Request(scope), self._send(send))

    async def _send(self, send: Send) -> None:
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except LockstepError as error:
            if tracing.active is not None:
                tracing.active.request_failed(error)
            fields = error_fields(error, self._request_id)
            if self._open_end and isinstance(error, WORKER_FAILURES):
                log.warning("request %s: stream cut: %s", self._request_id, error.message)
                await send({"type": "http.response.body", "body": sse.comment(fields)})
                return
            event = sse.event(fields)
            await send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            close = getattr(self._events, "aclose", None)
            if close is not None:
                await close()
        await send({"type": "http.response.body", "body": self._done})


class _Started:
    """Events whose first one is already read; closing them closes the rest."""

    def __init__(self, first: bytes | None, rest: AsyncGenerator[bytes, None]) -> None:
        self._first = first
        self._rest = rest

    def __aiter__(self) -> _Started:
        return self

    async def __anext__(self) -> bytes:
        if (first := self._first) is not None:
            self._first = None
            return first
        return await anext(self._rest)

    async def aclose(self) -> None:
        await self._rest.aclose()


async def _first(events: AsyncGenerator[bytes, None]) -> bytes | None:
    return await anext(events, None)


async def on_lockstep_error(request: Request, error: Exception) -> Response:
    """Return the response for a typed error, with Retry-After if the error has one."""
    if not isinstance(error, LockstepError):
        raise error
    if tracing.active is not None:
        tracing.active.request_failed(error)
    response = json_response(error_fields(error, request_id_of(request)), error.status)
    if error.retry_after is not None:
        response.headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    elif error.status == 409:
        # OpenAI's client retries a request after a 409 unless this header forbids it.
        response.headers["x-should-retry"] = "false"
    return response


async def on_http_error(request: Request, error: Exception) -> Response:
    """Return the response for an error of the router: no such route, or another method."""
    if not isinstance(error, HTTPException):
        raise error
    where = f"{request.method} {request.url.path}"
    reason = {404: "no_such_route", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    hint = _hint(request) if error.status_code == 404 else ""
    body = error_body(error.status_code, f"{error.detail}: {where}{hint}", reason)
    response = json_response(body, error.status_code)
    response.headers.update(error.headers or {})
    return response


@lru_cache(maxsize=16)
def _templates(app: Starlette) -> RouteTemplates:
    return RouteTemplates(app.routes)


def _hint(request: Request) -> str:
    """Return a hint for a path without a route: mostly `/v1` is repeated or missing."""
    path, templates = request.url.path, _templates(request.app)
    guesses = (
        path.replace("/v1/v1/", "/v1/", 1),
        f"/v1{path}",
        path.replace("/session/", "/sessions/", 1),
        re.sub("^(/sessions/[^/]+)/", r"\1/v1/", path),
    )
    for guess in guesses:
        if guess != path and templates.of(guess) != UNKNOWN:
            return f"; did you mean {guess}?"
    return "; GET /docs lists the routes" if templates.of("/docs") != UNKNOWN else ""


async def on_gone(_: Request, __: Exception) -> Response:
    """Return the status that is logged for a request whose client disconnected; it is never
    sent.
    """
    return Response(status_code=499)


async def on_crash(request: Request, error: Exception) -> Response:
    """Return the response for an unexpected error: a request id to find its cause in the log."""
    if isinstance(error, RecursionError):
        # JSON within every limit may still be nested too deep for recursive code.
        return await on_lockstep_error(request, too_deep())
    if tracing.active is not None:
        tracing.active.request_failed(error)
    path = request.scope["path"].encode("unicode_escape").decode()
    named = request_id_of(request) or secrets.token_hex(8)
    # The cause is only logged: the text of an unexpected error may hold secrets.
    caller = request.scope.get("state", {}).get(CALLER)
    log.error(
        "%s %s failed, request %s, key %s", request.method, path, named, caller, exc_info=error
    )
    why = f"internal error: see the log of this server for its cause, under the request id {named}"
    return json_response(error_body(500, why, "internal_error", request_id=named), 500)


EXCEPTION_HANDLERS: dict[Any, Any] = {
    LockstepError: on_lockstep_error,
    HTTPException: on_http_error,
    ClientGone: on_gone,
    RecursionError: on_crash,
    Exception: on_crash,
}


def request_id_of(request: Request) -> str | None:
    """Return the id of a request: the one its handler chose, else a valid one in its header."""
    chosen: str | None = getattr(request.state, "request_id", None)
    if chosen is None:
        header = request.headers.get("x-request-id", "")
        return header if is_request_id(header) else None
    return chosen
