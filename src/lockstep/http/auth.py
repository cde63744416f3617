"""Who may call a listener: API keys, and host names that a browser cannot be tricked into."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from lockstep.http.handlers import json_response
from lockstep.protocol.common.error_body import error_fields
from lockstep.tokens.errors import Forbidden, LockstepError, Unauthorized

OPEN_PATHS = ("/health",)
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class RequestAuth:
    """Middleware. Empty `keys` let everyone in; `hosts` None takes any Host header.

    On a loopback listener only loopback names are taken as Host, so that a web page cannot reach
    it through a name that resolves to this machine.
    """

    def __init__(
        self, app: ASGIApp, *, keys: Iterable[str] = (), hosts: Iterable[str] | None = None
    ) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in keys)
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self.check(scope)
            except LockstepError as error:
                body = error_fields(error, Headers(scope=scope).get("x-request-id"))
                await json_response(body, error.status)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def check(self, scope: Scope) -> None:
        """Raises Forbidden or Unauthorized for a request that may not pass."""
        headers = Headers(scope=scope)
        host = bare_host(headers.get("host", ""))
        if self._hosts is not None and host not in self._hosts:
            raise Forbidden(
                f"host {host!r} is not served here: use one of {', '.join(sorted(self._hosts))}",
                param="host",
            )
        if self._keys and scope["path"] not in OPEN_PATHS:
            self._check_key(headers)

    def _check_key(self, headers: Headers) -> None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        presented = (token if scheme.lower() == "bearer" else headers.get("x-api-key", "")).encode()
        # Every key is compared, so that the time tells nothing about which one is near.
        if not sum(hmac.compare_digest(presented, key) for key in self._keys):
            raise Unauthorized(
                "this server needs an API key: send 'Authorization: Bearer <key>'",
                param="authorization",
            )


def bare_host(header: str) -> str:
    """The host of a Host header, without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


def hosts_of(listening_on: str) -> tuple[str, ...] | None:
    """The Host headers to take on a listener: any, unless it is on loopback."""
    return LOOPBACK if listening_on in LOOPBACK else None


def check_exposure(listening_on: str, keys: Iterable[str], insecure: bool) -> None:
    """Raises Forbidden for a listener that anybody on the network could use."""
    if hosts_of(listening_on) is None and not tuple(keys) and not insecure:
        raise Forbidden(
            f"--host {listening_on} would serve everybody who can reach this machine: set "
            "LOCKSTEP_API_KEYS, or say --insecure if that is meant",
            param="host",
        )
