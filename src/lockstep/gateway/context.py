"""What the routes of a gateway share."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from lockstep.fleet.routing.pool import Pool
from lockstep.gateway.models import ModelRegistry
from lockstep.gateway.sessions.session import Session
from lockstep.gateway.sessions.sessions import Sessions
from lockstep.gateway.tenants import caller_of
from lockstep.ledger.breaks import GATEWAY_BREAKS, check_breaks
from lockstep.protocol.common.request_id import check_request_id
from lockstep.protocol.json.limits import LIMITS, RequestLimits
from lockstep.render import Renderer
from lockstep.tokens.errors import BadRequest

SESSION = "session"
"""Where a request's state holds the name of its session, once it was asked for."""
SESSION_ID = re.compile(r"[A-Za-z0-9._:@=+-]{1,200}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayContext:
    """The fleet's workers, the models they serve, and the sessions that requests may join."""

    pool: Pool
    models: ModelRegistry
    sessions: Sessions
    limits: RequestLimits = LIMITS


def session_id(http: Request) -> str | None:
    """The full name of the session a request joins: the caller's one that the header X-Session-ID,
    the path /sessions/{session}/..., or a key that was minted for it names.

    Raises BadRequest when header and path are given and differ, or when it cannot be an id, and
    NotFound when the key is for another session.
    """
    state: dict[str, Any] = http.scope.setdefault("state", {})
    if SESSION not in state:
        state[SESSION] = _session_id(http)
    name: str | None = state[SESSION]
    return name


def _session_id(http: Request) -> str | None:
    header, path = http.headers.get("x-session-id"), http.path_params.get("session")
    if path is not None and header == http.headers.get("x-session-affinity"):
        header = None  # opencode's name for its own session, which it sends whatever the URL is
    if header is not None and path is not None and header != path:
        raise BadRequest(
            f"X-Session-ID is {header!r}, but the path names session {path!r}: send one of them",
            param="x-session-id",
        )
    name = path if header is None else header
    if name is not None:
        check_session_id(name, "x-session-id")
    return caller_of(http).session_name(name)


async def join_session(
    http: Request, context: GatewayContext, renderer: Renderer
) -> Session | None:
    """The session a request joins, opened; None when it names none.

    Raises BadRequest when X-Session-Breaks is neither strict nor fork, and what `Sessions.open`
    raises.
    """
    breaks = check_breaks(http.headers.get("x-session-breaks", GATEWAY_BREAKS), "X-Session-Breaks")
    name = session_id(http)
    if name is None:
        return None
    # The key of a session that is gone must not begin another one without its terms.
    begun = caller_of(http).session is not None
    return await context.sessions.open(name, renderer, breaks=breaks, begun=begun)


def check_session_id(name: str, param: str) -> None:
    """Raises BadRequest for what cannot be the id of a session."""
    if not SESSION_ID.fullmatch(name):
        raise BadRequest(
            f"session id {name!r} is not valid: 1 to 200 letters, digits or ._:@=+-", param=param
        )


def request_id(http: Request, from_body: str | None = None) -> str:
    """The id of a request: the header X-Request-Id, else the body's, else a new one.

    It is also put where error responses find it. Raises BadRequest for one that cannot be an id.
    """
    state = http.scope.setdefault("state", {})
    current, header = state.get("request_id"), http.headers.get("x-request-id")
    check_request_id(header or None, "x-request-id")
    check_request_id(from_body or None)
    chosen: str = header or from_body or current or secrets.token_hex(12)
    state["request_id"] = chosen
    return chosen
