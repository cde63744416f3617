"""Tenants: whose key a request carries, and what of the gateway belongs to them alone."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from starlette.requests import Request

from lockstep.http.handlers import CALLER
from lockstep.protocol.common.request_id import is_request_id
from lockstep.storage.api_keys import DEFAULT_TENANT
from lockstep.tokens.errors import NotFound

SEPARATOR = "~"
"""Stands between a tenant and a session in the name of a session; ids of clients cannot hold it."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. Its sessions, request ids and cached prompts are out of reach for
    callers of another tenant.

    `session` is the full name of the only session that a minted key may use. `scope` and
    `cache_scope` are secret: whoever knew another's could name their requests or prompts. Both are
    empty for the default tenant, whose ids and salts reach the workers as they are.
    """

    tenant: str = DEFAULT_TENANT
    key_id: str | None = None
    session: str | None = None
    scope: str = ""
    cache_scope: str = ""

    def __str__(self) -> str:
        return self.key_id or "none"

    def session_name(self, name: str | None) -> str | None:
        """The full name of the session that this caller means. Raises NotFound for a session that
        is not the one its key was minted for."""
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
        """The id by which workers know a request that this caller calls `name`."""
        if not self.scope:
            return name
        scoped = f"{name}{SEPARATOR}{self.scope}"
        return scoped if is_request_id(scoped) else f"{_hash(name)}{SEPARATOR}{self.scope}"

    def cache_salt(self, salt: str | None) -> str | None:
        """The salt that separates cached prompts of this caller from everybody else's."""
        if not self.cache_scope:
            return salt
        return self.cache_scope if salt is None else _hash(f"{self.cache_scope}\0{salt}")


ANYBODY = Caller()


class Scopes:
    """Makes callers. `secret` stays the same for as long as sessions are kept."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def of_tenant(self, tenant: str, key_id: str | None) -> Caller:
        """A caller of that tenant."""
        if tenant == DEFAULT_TENANT:
            return Caller(tenant, key_id)
        return Caller(
            tenant, key_id, None, self._scope("requests", tenant), self._scope("cache", tenant)
        )

    def of_session(self, name: str, key_id: str, cache_salt: str | None) -> Caller:
        """A caller with the key of one session. Sessions of one tenant that were minted with the
        same salt share cached prompts, all others have their own."""
        tenant = tenant_of(name)
        shared = ("session", name) if cache_salt is None else ("group", tenant, cache_salt)
        return Caller(
            tenant, key_id, name, self._scope("session", name), self._scope("cache", *shared)
        )

    def named(self, key: str) -> str:
        """A short name for a key that has none. It is keyed: a hash of a weak key, seen in a log,
        must not help to guess it."""
        return "key-" + self._scope("key", key)[:8]

    def _scope(self, *parts: str) -> str:
        return blake2b("\0".join(parts).encode(), key=self._secret, digest_size=8).hexdigest()


def caller_of(http: Request) -> Caller:
    """Who sent a request; ANYBODY where no key was sent."""
    caller: Caller = http.scope.get("state", {}).get(CALLER, ANYBODY)
    return caller


def full_name(tenant: str, name: str) -> str:
    """The name of a tenant's session among those of all tenants."""
    return name if tenant == DEFAULT_TENANT else f"{tenant}{SEPARATOR}{name}"


def tenant_of(name: str) -> str:
    """The tenant of a session, by its full name."""
    tenant, separator, _ = name.partition(SEPARATOR)
    return tenant if separator else DEFAULT_TENANT


def _hash(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
