"""The control plane: admin routes on their own listener, behind their own token."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from lockstep.fleet.fleet import Fleet
from lockstep.gateway.context import GatewayContext
from lockstep.gateway.routes.fleet import FleetRoutes
from lockstep.gateway.routes.sessions import SessionRoutes
from lockstep.http.auth import RequestAuth
from lockstep.http.handlers import EXCEPTION_HANDLERS, json_response, require_bearer
from lockstep.protocol.common.error_body import error_fields
from lockstep.tokens.errors import Unauthorized


class ControlPlane:
    """Routes of the admin listener. Every one of them needs the admin token."""

    def __init__(
        self,
        gateway: GatewayContext,
        fleet: Fleet,
        token: str,
        *,
        hosts: Iterable[str] | None = None,
    ) -> None:
        self.app = Starlette(
            routes=[*FleetRoutes(gateway, fleet).routes, *SessionRoutes(gateway).routes],
            middleware=[
                Middleware(RequestAuth, hosts=hosts),
                Middleware(_Admin, token=token),
            ],
            exception_handlers=EXCEPTION_HANDLERS,
        )


class _Admin:
    """Middleware that lets nobody in without the admin token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                require_bearer(Request(scope), self._token)
            except Unauthorized as error:
                await json_response(error_fields(error), error.status)(scope, receive, send)
                return
        await self._app(scope, receive, send)
