"""The documentation of one route, for the OpenAPI document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class QueryDoc:
    """One query parameter, with its JSON schema."""

    name: str
    schema: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RouteDoc:
    """One route. `request` and `response` are wire structs; a response of None is plain text.

    With `streams`, the response may be server-sent events; with `sessions`, the route is also
    served under /sessions/{session}. `status` is that of success; `headers` are optional.
    """

    method: str
    path: str
    request: Any
    response: Any
    summary: str
    streams: bool = False
    sessions: bool = True
    status: int = 200
    body_required: bool = True
    query: tuple[QueryDoc, ...] = ()
    headers: tuple[str, ...] = ("X-Request-Id",)
