"""Authentication of requests to a listener: API keys, Host headers, and sites of web pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from hashlib import sha256
from typing import Any, Protocol

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from lockstep.http.exposure import ANY_ORIGIN
from lockstep.http.handlers import CALLER, json_response, request_id_of
from lockstep.protocol.common.error_body import error_fields
from lockstep.tokens.errors import Forbidden, LockstepError, Unauthorized

OPEN_PATHS = ("/health",)
OWN_SITE = (b"same-origin", b"none")
"""Sec-Fetch-Site values of a page of this listener, and of an address typed into the browser."""


class KeyTable(Protocol):
    """The keys of a listener."""

    @property
    def required(self) -> bool:
        """Whether requests need a key."""
        ...

    async def find(self, digest: bytes) -> Any:
        """Return the caller whose key has this digest (see `key_digest`), or None."""
        ...


class FixedKeys:
    """Keys that are equivalent and do not change while the listener runs. Without keys it is
    open.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = {digest for key in keys for digest in key_digests(key)}

    @property
    def required(self) -> bool:
        return bool(self._digests)

    async def find(self, digest: bytes) -> str | None:
        return "key" if digest in self._digests else None


class RequestAuth:
    """Middleware that accepts requests with one of `keys`; `hosts` None accepts any Host header.

    A loopback listener accepts only loopback names as Host, so that a web page cannot reach it
    through a name that resolves to this machine.
    """

    def __init__(
        self, app: ASGIApp, *, keys: KeyTable | None = None, hosts: Iterable[str] | None = None
    ) -> None:
        self._app = app
        self._keys: KeyTable = FixedKeys() if keys is None else keys
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                await self.check(scope)
            except LockstepError as error:
                body = error_fields(error, request_id_of(Request(scope)))
                await json_response(body, error.status)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def check(self, scope: Scope) -> None:
        """Store the caller in the request's state. Raises Forbidden or Unauthorized for a request
        that is not allowed.
        """
        named: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # the first of a name counts
        if self._hosts is not None:
            host = bare_host(named.get(b"host", b"").decode("latin-1"))
            if host not in self._hosts:
                served = ", ".join(sorted(self._hosts))
                raise Forbidden(
                    f"host {host!r} is not served here: use one of {served}", param="host"
                )
        presented = presented_key(named)
        caller = await self._keys.find(key_digest(presented)) if presented else None
        if caller is not None:
            scope.setdefault("state", {})[CALLER] = caller
        elif self._keys.required and not self.is_open(scope["path"]):
            raise Unauthorized(
                "the API key that was sent is not one of this server's"
                if presented
                else "this server needs an API key: send 'Authorization: Bearer <key>'",
                param="authorization",
            )
        self.admit(scope, caller, presented)

    def is_open(self, path: str) -> bool:
        """Return whether requests for this path need no key."""
        return path in OPEN_PATHS

    def admit(self, scope: Scope, caller: Any, presented: bytes) -> None:
        """Raise the error of a request that this caller may not send. `caller` is None where no key
        is needed.
        """


def presented_key(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the key of a request, byte for byte as it was sent; empty when there is none."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    return token if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")


def key_digest(key: bytes) -> bytes:
    """Return the digest under which a key is stored and looked up.

    The time of a lookup depends on bits of the digest, which a client cannot choose, so it reveals
    nothing about the key.
    """
    return sha256(key).digest()


def key_digests(key: str) -> set[bytes]:
    """Return the digests of a key in every encoding that clients send: mostly UTF-8, some
    Latin-1.
    """
    encoded = {key.encode()}
    with suppress(UnicodeEncodeError):
        encoded.add(key.encode("latin-1"))
    return {key_digest(key_bytes) for key_bytes in encoded}


def bare_host(header: str) -> str:
    """The host of a Host header, without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


class CrossSiteFilter:
    """Application that rejects requests which a browser sends for a page of another site.

    A browser reports the origin of a request (Origin, Sec-Fetch-Site), and a page cannot change
    that; other clients send neither header. Pages of `origins`, such as https://app.example, may
    call `app`; "*" allows all.
    """

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
        """Return the site whose page sent a request that it may not send; None for any other
        request.
        """
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
        if ANY_ORIGIN in self._origins:
            return None
        if origin is None:
            # Following a link is not a call: the page cannot read the response, and GET changes
            # nothing.
            followed = mode == b"navigate" and scope["method"] in ("GET", "HEAD")
            return None if followed else "another site"
        named: str = origin.decode("latin-1")
        if named in self._origins:
            return None
        if host is not None and origin == b"%b://%b" % (scope["scheme"].encode(), host):
            return None
        return named.encode("unicode_escape").decode()[:200]
