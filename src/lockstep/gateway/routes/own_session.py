"""GET /v1/session: what the caller's own session holds so far; POST /v1/session/finish ends it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lockstep.gateway.context import GatewayContext, request_id, session_id
from lockstep.gateway.openapi.route_doc import RouteDoc
from lockstep.gateway.routes.sessions import SessionView, session_response
from lockstep.gateway.sessions.info import SessionInfo
from lockstep.gateway.tenants import ANYBODY, caller_of
from lockstep.http.handlers import json_response
from lockstep.tokens.errors import BadRequest, Forbidden

ROUTE_DOCS = (
    RouteDoc(
        "GET", "/v1/session", None, SessionView,
        "The session of the key, of X-Session-ID or of the path, and its samples.",
    ),
    RouteDoc(
        "POST", "/v1/session/finish", None, SessionInfo,
        "Ends the session of the key: whoever waits for its end is told.",
    ),
)  # fmt: skip


class OwnSessionRoutes:
    """Reading does not count as the trainer's: the session is kept as if nobody had read it."""

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
        """Ends the session for its harness; the reward is the trainer's to give."""
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
                "sessions are read here with an API key; without keys, the control plane has them: "
                "GET /v1/rl/sessions/{id}",
                param="authorization",
            )
        if name is None:
            raise BadRequest(
                "which session? Send X-Session-ID, or use /sessions/{id}/v1", param="x-session-id"
            )
        return name
