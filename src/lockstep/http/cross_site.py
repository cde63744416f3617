"""Requests that a web page of somebody else has a browser send are refused, on every listener.

A browser says where a request comes from (Origin, Sec-Fetch-Site) and a page cannot make it lie.
Other clients send neither, and are not concerned.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from lockstep.http.handlers import json_response
from lockstep.protocol.common.error_body import error_fields
from lockstep.tokens.errors import BadRequest, Forbidden

OWN_SITE = (b"same-origin", b"none")
"""Sent by a page of this listener, and for an address that somebody typed."""
ANY = "*"


class CrossSiteFilter:
    """An application in front of another. `origins` are those whose pages may call it, such as
    https://app.example; "*" takes all."""

    def __init__(self, app: ASGIApp, origins: Iterable[str] = ()) -> None:
        self._origins = frozenset(origins)
        self._app = app
        if self._origins:
            self._app = CORSMiddleware(
                app, allow_origins=sorted(self._origins), allow_methods=["*"], allow_headers=["*"]
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (where := self._foreign(scope)) is not None:
            error = Forbidden(
                f"a page of {where} may not call this server: --allow-origin names those that may",
                param="origin",
            )
            await json_response(error_fields(error), error.status)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _foreign(self, scope: Scope) -> str | None:
        """Whose page has sent a request, when it may not; None for any other request."""
        origin = site = mode = host = None
        for name, value in scope["headers"]:
            if name == b"origin":
                origin = value
            elif name == b"sec-fetch-site":
                site = value
            elif name == b"sec-fetch-mode":
                mode = value
            elif name == b"host":
                host = value
        if origin is None and (site is None or site in OWN_SITE):
            return None
        if ANY in self._origins:
            return None
        if origin is None:
            # Following a link is no call: nothing of it can be read, and GET changes nothing.
            followed = mode == b"navigate" and scope["method"] in ("GET", "HEAD")
            return None if followed else "another site"
        named: str = origin.decode("latin-1")
        if named in self._origins:
            return None
        if host is not None and origin == b"%b://%b" % (scope["scheme"].encode(), host):
            return None
        return named.encode("unicode_escape").decode()[:200]


def check_origins(origins: Iterable[str]) -> tuple[str, ...]:
    """The origins as they stand in a header. Raises BadRequest for what can be none."""
    checked = []
    for origin in origins:
        scheme, slashes, rest = origin.partition("://")
        if origin != ANY and (not scheme or not slashes or not rest or "/" in rest):
            raise BadRequest(
                f"--allow-origin is {origin!r}: expected SCHEME://HOST[:PORT] without a path, or *",
                param="allow_origin",
            )
        checked.append(origin.lower() if origin != ANY else ANY)
    return tuple(checked)
