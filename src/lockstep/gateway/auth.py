"""The admin token: no route of the control plane is served without it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from lockstep.http.handlers import json_response, require_bearer
from lockstep.protocol.common.error_body import error_fields
from lockstep.tokens.errors import Unauthorized


class AdminAuth:
    """Middleware that answers 401 to every request without the admin token."""

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
