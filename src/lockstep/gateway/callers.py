"""The caller of a request: its tenant, and the names of sessions and requests that belong to it."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from starlette.requests import Request

from lockstep.http.handlers import CALLER
from lockstep.protocol.common.request_id import (
    TENANT_HEADER,
    check_request_id,
    is_request_id,
)
from lockstep.storage.api_keys import DEFAULT_TENANT
from lockstep.tokens.errors import BadRequest, NotFound

SESSION_ID = re.compile(r"[A-Za-z0-9._:@=+-]{1,200}")
SEPARATOR = "~"
"""Separates tenant and session in the full name of a session; no client's id can contain it."""
SESSION = "session"
"""Key of the session's full name in the state of a request, set by `session_id`."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. Callers of another tenant cannot reach its sessions, request ids and
    cached prompts.

    `session` is the full name of the only session that a minted key may use. `scope` and
    `cache_scope` are secret: with another tenant's, a caller could name its requests or prompts.
    Both are empty for the default tenant, whose ids and salts reach the workers unchanged.
    `share` stands for the tenant in requests to workers, which bound what each tenant uses.
    """

    tenant: str = DEFAULT_TENANT
    key_id: str | None = None
    session: str | None = None
    scope: str = ""
    cache_scope: str = ""
    share: str = ""

    def __str__(self) -> str:
        return self.key_id or "none"

    def session_name(self, name: str | None) -> str | None:
        """Return the full name of the caller's session `name`; None stands for the key's own.

        Raises NotFound for a session other than the one that the key was minted for.
        """
        if name is not None:
            name = full_name(self.tenant, name)
        if self.session is None or name == self.session:
            return name
        if name is not None:
            raise NotFound(
                "there is no such session: this key is for one session only, leave its id out",
                param="x-session-id",
            )
        return self.session

    def request_id(self, name: str) -> str:
        """Return the id by which workers know the request that this caller calls `name`."""
        if not self.scope:
            return name
        # With the secret scope, no other tenant can abort the request by guessing its id.
        scoped = f"{name}{SEPARATOR}{self.scope}"
        return scoped if is_request_id(scoped) else f"{_hash(name)}{SEPARATOR}{self.scope}"

    def headers(self, request_id: str) -> dict[str, str]:
        """Return the headers of a request to a worker: its id there, and whose share it uses."""
        headers = {"X-Request-Id": request_id}
        if self.share:
            headers[TENANT_HEADER] = self.share
        return headers

    def cache_salt(self, salt: str | None) -> str | None:
        """Return the salt that keeps cached prompts of this caller apart from other tenants'."""
        if not self.cache_scope:
            return salt
        return self.cache_scope if salt is None else _hash(f"{self.cache_scope}\0{salt}")


ANYBODY = Caller()
"""The caller of a request without a key."""


class Scopes:
    """Derives callers from a secret, which must not change while sessions are stored."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def of_tenant(self, tenant: str, key_id: str | None) -> Caller:
        """Return a caller of that tenant."""
        if tenant == DEFAULT_TENANT:
            return Caller(tenant, key_id)
        return Caller(
            tenant, key_id, None, self._scope("requests", tenant), self._scope("cache", tenant),
            self._share(tenant),
        )  # fmt: skip

    def of_session(self, name: str, key_id: str, cache_salt: str | None) -> Caller:
        """Return the caller with the key of one session.

        Sessions of one tenant that were minted with the same salt share cached prompts; all others
        share none.
        """
        tenant = tenant_of(name)
        shared = ("session", name) if cache_salt is None else ("group", tenant, cache_salt)
        return Caller(
            tenant, key_id, name, self._scope("session", name), self._scope("cache", *shared),
            self._share(tenant),
        )  # fmt: skip

    def key_name(self, key: str) -> str:
        """Return a short name for a key that has none.

        The hash is keyed: a plain hash of a weak key, seen in a log, would help to guess it.
        """
        return "key-" + self._scope("key", key)[:8]

    def _share(self, tenant: str) -> str:
        return "" if tenant == DEFAULT_TENANT else self._scope("share", tenant)

    def _scope(self, *parts: str) -> str:
        return blake2b("\0".join(parts).encode(), key=self._secret, digest_size=8).hexdigest()


def caller_of(http: Request) -> Caller:
    """Return the caller of a request; ANYBODY if it sent no key."""
    caller: Caller = http.scope.get("state", {}).get(CALLER, ANYBODY)
    return caller


def full_name(tenant: str, name: str) -> str:
    """Return the name of a tenant's session among those of all tenants."""
    return name if tenant == DEFAULT_TENANT else f"{tenant}{SEPARATOR}{name}"


def tenant_of(name: str) -> str:
    """Return the tenant of a session by its full name."""
    tenant, separator, _ = name.partition(SEPARATOR)
    return tenant if separator else DEFAULT_TENANT


def session_id(http: Request) -> str | None:
    """Return the full name of the session that a request joins, None if it names none.

    The header X-Session-ID, the path /sessions/{session}/... or a key that was minted for a session
    names it. Raises BadRequest when header and path differ or the name is not a valid id, and
    NotFound when the key is for another session.
    """
    # Read once: a handler needs it for tracing, the session, and the affinity.
    state: dict[str, Any] = http.scope.setdefault("state", {})
    if SESSION not in state:
        state[SESSION] = _read_session_id(http)
    name: str | None = state[SESSION]
    return name


def _read_session_id(http: Request) -> str | None:
    header, path = http.headers.get("x-session-id"), http.path_params.get("session")
    if path is not None and header == http.headers.get("x-session-affinity"):
        header = None  # opencode's name for its own session, which it sends with any URL
    if header is not None and path is not None and header != path:
        raise BadRequest(
            f"X-Session-ID is {header!r}, but the path names session {path!r}: send one of them",
            param="x-session-id",
        )
    name = path if header is None else header
    if name is not None:
        check_session_id(name, "x-session-id")
    return caller_of(http).session_name(name)


def check_session_id(name: str, param: str) -> None:
    """Raise BadRequest for a name that a session cannot have."""
    if not SESSION_ID.fullmatch(name):
        raise BadRequest(
            f"session id {name!r} is not valid: 1 to 200 letters, digits or ._:@=+-", param=param
        )


def owner_of(http: Request) -> str:
    """Return the owner of what a request stores by an id: its session, else its tenant."""
    return session_id(http) or f"{caller_of(http).tenant} without a session"


def request_id(http: Request, from_body: str | None = None) -> str:
    """Return the id of a request: that of the header X-Request-Id, else the body's, else a new one.

    It is also put into the request's state, where error responses find it. Raises BadRequest for an
    id that is not valid.
    """
    state = http.scope.setdefault("state", {})
    header = http.headers.get("x-request-id")
    if header:
        check_request_id(header, "x-request-id")
    if from_body:
        check_request_id(from_body)
    current: str = header or from_body or state.get("request_id") or secrets.token_hex(12)
    state["request_id"] = current
    return current


def _hash(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
