"""The fast path of the data plane: most requests go straight to their handler.

Starlette's router and middleware are 5 to 8 % of a request. Here the same is done for the paths
that carry the load, in one place: auth, handler, error, count.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from lockstep.gateway.metrics import GatewayMetrics
from lockstep.http.auth import RequestAuth
from lockstep.http.handlers import ClientGone, Handler, on_crash, on_gone, on_lockstep_error
from lockstep.tokens.errors import LockstepError

SESSIONS = "/sessions/"
SESSION_TEMPLATE = "/sessions/{session}"


class FastRoutes:
    """ASGI. POST routes without a variable in their path are found here, those of `in_sessions`
    also under a session; for everything else there is `rest`, which has these routes as well."""

    def __init__(
        self,
        rest: ASGIApp,
        auth: RequestAuth,
        metrics: GatewayMetrics,
        *,
        at_root: Iterable[BaseRoute],
        in_sessions: Iterable[BaseRoute],
    ) -> None:
        self._rest = rest
        self._auth = auth
        self._metrics = metrics
        self._in_sessions = _posts(in_sessions)
        self._at_root = _posts(at_root) | self._in_sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._find(scope)
        if found is None:
            await self._rest(scope, receive, send)
            return
        template, handler = found
        scope["endpoint"] = handler
        status, begun = 499, perf_counter()
        try:
            response = await self._answer(handler, Request(scope, receive))
            status = response.status_code
            await response(scope, receive, send)
        finally:
            self._metrics.count(template, status, perf_counter() - begun)

    def _find(self, scope: Scope) -> tuple[str, Handler] | None:
        """The template and the handler of a route, or None."""
        if scope["type"] != "http" or scope["method"] != "POST":
            return None
        path: str = scope["path"]
        if path.startswith(SESSIONS):
            session, slash, rest = path.removeprefix(SESSIONS).partition("/")
            inner = slash + rest
            handler = self._in_sessions.get(inner) if session else None
            scope["path_params"] = {"session": session}
            return None if handler is None else (SESSION_TEMPLATE + inner, handler)
        handler = self._at_root.get(path)
        return None if handler is None else (path, handler)

    async def _answer(self, handler: Handler, request: Request) -> Response:
        try:
            self._auth.check(request.scope)
            return await handler(request)
        except LockstepError as error:
            return await on_lockstep_error(request, error)
        except ClientGone as error:
            return await on_gone(request, error)
        except Exception as error:
            return await on_crash(request, error)


def _posts(routes: Iterable[BaseRoute]) -> dict[str, Handler]:
    return {
        route.path: route.endpoint
        for route in routes
        if isinstance(route, Route) and route.methods == {"POST"} and not route.param_convertors
    }
