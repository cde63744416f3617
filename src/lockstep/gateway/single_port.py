"""One port for both planes, as prime-rl's pools expect of an inference server.

A pool that finds its servers by host name knows one port: it generates below /v1 there, and loads
adapters and weights at the root.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from lockstep.http.handlers import require_bearer
from lockstep.tokens.errors import Unauthorized

CONTROL = "/v1/rl"
CALLS = frozenset(
    f"{prefix}/{name}"
    for prefix in ("", "/v1")
    for name in ("load_lora_adapter", "unload_lora_adapter")
) | {"/pause", "/resume", "/update_weights", "/init_broadcaster"}
"""Paths of changes, which always go to the control plane and need the admin token."""
VIEWS = frozenset(("/v1/models", "/metrics"))
"""Paths of both planes; with the admin token they go to the control plane."""


class SinglePort:
    """The data plane, which forwards a pool's control calls to the control plane.

    It allows nothing that the admin port would not allow the same caller.
    """

    def __init__(self, data: ASGIApp, control: ASGIApp, token: str) -> None:
        self._data, self._control, self._token = data, control, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._is_control(scope):
            path = CONTROL + scope["path"]
            scope = {**scope, "path": path, "raw_path": path.encode()}
            await self._control(scope, receive, send)
            return
        await self._data(scope, receive, send)

    def _is_control(self, scope: Scope) -> bool:
        if scope["path"] in CALLS:
            return True
        if scope["path"] not in VIEWS:
            return False
        try:
            require_bearer(Request(scope), self._token)
        except Unauthorized:
            return False
        return True
