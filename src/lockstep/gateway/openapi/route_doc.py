"""A route as it is documented: what a face says about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RouteDoc:
    """`request` and `response` are wire structs; a response of None is plain text.

    `streams` says that the answer may be server-sent events, `sessions` that the route also
    stands under /sessions/{session}.
    """

    method: str
    path: str
    request: Any
    response: Any
    summary: str
    streams: bool = False
    sessions: bool = True
