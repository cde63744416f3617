"""GET /v1/session: the caller's own session and its samples; POST /v1/session/finish ends it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lockstep.gateway.callers import ANYBODY, caller_of, request_id, session_id
from lockstep.gateway.context import GatewayContext
from lockstep.gateway.openapi.route_doc import RouteDoc
from lockstep.gateway.routes.control_sessions import SessionView, session_response
from lockstep.gateway.sessions.info import SessionInfo
from lockstep.http.handlers import json_response
from lockstep.tokens.errors import BadRequest, Forbidden

ROUTE_DOCS = (
    RouteDoc(
        "GET", "/v1/session", None, SessionView,
        "The session that the key, X-Session-ID or the path names, and its samples.",
    ),
    RouteDoc(
        "POST", "/v1/session/finish", None, SessionInfo,
        "Ends the session of the key, and the waits for its end.",
    ),
)  # fmt: skip


class CallerSessionRoutes:
    """Routes for a session's own key. Reading here does not mark turns as read by the trainer."""

    def __init__(self, context: GatewayContext) -> None:
        self._sessions = context.sessions
        self.routes = [
            Route("/v1/session", self.read, methods=["GET"]),
            Route("/v1/session/finish", self.finish, methods=["POST"]),
        ]

    async def read(self, http: Request) -> Response:
        name = self._name(http)
        return await session_response(http, self._sessions, name, by_trainer=False)

    async def finish(self, http: Request) -> Response:
        """End the session for its harness; only the trainer sets the reward."""
        name = self._name(http)
        if await http.body():
            raise BadRequest("the body must be empty: the trainer sets the reward", param="body")
        await self._sessions.keys.leave(name)
        return json_response(await self._sessions.info(name))

    def _name(self, http: Request) -> str:
        request_id(http)
        name = session_id(http)
        if caller_of(http) is ANYBODY:
            raise Forbidden(
                "reading a session here needs an API key; without keys, use the control plane: "
                "GET /v1/rl/sessions/{id}",
                param="authorization",
            )
        if name is None:
            raise BadRequest(
                "no session is named: send X-Session-ID, or use /sessions/{id}/v1",
                param="x-session-id",
            )
        return name
