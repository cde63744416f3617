"""The fast path of the data plane: POST requests that skip Starlette's router and middleware.

These take 5 to 8 % of the time of a request. For the paths that carry the load, FastRoutes does
their work in one place: authenticate, handle, turn errors into responses, count.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter

from prometheus_client import Counter, Histogram
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from lockstep.gateway.metrics import GatewayMetrics
from lockstep.http.auth import RequestAuth
from lockstep.http.handlers import Handler, on_crash, on_gone, on_lockstep_error
from lockstep.http.http_request import ClientGone, IndexedRequest
from lockstep.tokens.errors import LockstepError

SESSIONS = "/sessions/"
SESSION_TEMPLATE = "/sessions/{session}"


class FastRoutes:
    """An ASGI application that looks up POST routes by their path, in one dictionary.

    Routes of `in_sessions` are also served under /sessions/{session}. All other requests go to
    `fallback`, which must have these routes too: other methods get their error from it.
    """

    def __init__(
        self,
        fallback: ASGIApp,
        auth: RequestAuth,
        metrics: GatewayMetrics,
        *,
        at_root: Iterable[BaseRoute],
        in_sessions: Iterable[BaseRoute],
    ) -> None:
        self._fallback = fallback
        self._auth = auth
        self._metrics = metrics
        self._series: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self._in_sessions = _posts(in_sessions)
        self._at_root = _posts(at_root) | self._in_sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match = self._match(scope)
        if match is None:
            await self._fallback(scope, receive, send)
            return
        template, handler = match
        scope["endpoint"] = handler
        # 499 is counted when the client disconnects: then no response is made.
        status, started = 499, perf_counter()
        try:
            response = await self._respond(handler, IndexedRequest(scope, receive))
            status = response.status_code
            await response(scope, receive, send)
        finally:
            series = self._series.get((template, status))
            if series is None:
                # Looking labels up costs more than counting: the series is kept.
                series = self._series[template, status] = self._metrics.series(template, status)
            requests, times = series
            requests.inc()
            times.observe(perf_counter() - started)

    def _match(self, scope: Scope) -> tuple[str, Handler] | None:
        """Return the path template and the handler of a request; None for the fallback."""
        if scope["type"] != "http" or scope["method"] != "POST":
            return None
        path: str = scope["path"]
        if path.startswith(SESSIONS):
            session, slash, tail = path.removeprefix(SESSIONS).partition("/")
            inner = slash + tail
            handler = self._in_sessions.get(inner) if session else None
            scope["path_params"] = {"session": session}
            return None if handler is None else (SESSION_TEMPLATE + inner, handler)
        handler = self._at_root.get(path)
        return None if handler is None else (path, handler)

    async def _respond(self, handler: Handler, request: Request) -> Response:
        try:
            await self._auth.check(request.scope)
            return await handler(request)
        except LockstepError as error:
            return await on_lockstep_error(request, error)
        except ClientGone as error:
            return await on_gone(request, error)
        except Exception as error:
            # As Starlette's outermost middleware does: one request must not end the connection.
            return await on_crash(request, error)


def _posts(routes: Iterable[BaseRoute]) -> dict[str, Handler]:
    return {
        route.path: route.endpoint
        for route in routes
        if isinstance(route, Route) and route.methods == {"POST"} and not route.param_convertors
    }
