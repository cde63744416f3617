"""Who may call a gateway: the admin token of the control plane, the keys of the data plane."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from lockstep.gateway.keys import TenantKeys
from lockstep.gateway.sessions.keys import PREFIX
from lockstep.http.auth import RequestAuth
from lockstep.http.handlers import json_response, require_bearer
from lockstep.http.route_templates import UNKNOWN, RouteTemplates
from lockstep.protocol.common.error_body import error_fields
from lockstep.tokens.errors import Forbidden, Unauthorized

SESSION_KEY = PREFIX.encode()


class AdminAuth:
    """Middleware that answers 401 to every request without the admin token.

    What is at or below /dashboard goes to `dashboard`, which has a login of its own.
    """

    def __init__(self, app: ASGIApp, token: str, dashboard: ASGIApp | None = None) -> None:
        self._app = app
        self._token = token
        self._dashboard = dashboard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            if self._dashboard is not None and (path + "/").startswith("/dashboard/"):
                await self._dashboard(scope, receive, send)
                return
            try:
                require_bearer(Request(scope), self._token)
            except Unauthorized as error:
                await json_response(error_fields(error), error.status)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class DataAuth(RequestAuth):
    """Middleware of the data plane. A key that was minted for a session may use `session_routes`
    only: those that store what they generate in the session, or generate nothing."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: TenantKeys,
        hosts: Iterable[str] | None,
        session_routes: RouteTemplates,
    ) -> None:
        super().__init__(app, keys=keys, hosts=hosts)
        self._session_routes = session_routes

    def admit(self, scope: Scope, caller: Any, presented: bytes) -> None:
        if caller is None:
            # Where no key is needed, one that has ended must not become more powerful by it.
            if presented.startswith(SESSION_KEY):
                raise Unauthorized(
                    "this key was minted for a session that has ended", param="authorization"
                )
        elif caller.session is not None and self._session_routes.of(scope["path"]) == UNKNOWN:
            raise Forbidden(
                "this key was minted for one session: it may use the routes that are recorded in "
                "it, such as /v1/chat/completions, and GET /v1/session",
                param="authorization",
            )
