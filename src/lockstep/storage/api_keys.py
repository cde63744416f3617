"""API keys as they are stored: an id, a digest and a tenant, never the key itself."""

from __future__ import annotations

import re
import secrets
import time
from typing import Literal

import msgspec

from lockstep.http.auth import key_digest
from lockstep.tokens.errors import BadRequest

KeyPrefix = Literal["lk-", "tml-"]
OWN_PREFIX: KeyPrefix = "lk-"
TINKER_PREFIX: KeyPrefix = "tml-"
"""Prefix that clients of Tinker require of a key."""
TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
DEFAULT_TENANT = "default"
"""The tenant of a gateway without keys, with one key, or with shared sessions."""


class StoredKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key as it is stored: its short id for logs, its SHA-256, its tenant and its time."""

    id: str
    sha256: str
    tenant: str = DEFAULT_TENANT
    created: int = 0


def new_key(tenant: str, prefix: KeyPrefix = OWN_PREFIX) -> tuple[StoredKey, str]:
    """Mint a key; return its stored form and the key. Raises BadRequest for an invalid tenant."""
    check_tenant(tenant)
    key = prefix + secrets.token_urlsafe(32)
    stored = StoredKey(
        id=f"key-{secrets.token_hex(4)}",
        sha256=key_digest(key.encode()).hex(),
        tenant=tenant,
        created=int(time.time()),
    )
    return stored, key


def check_tenant(name: str) -> None:
    """Raise BadRequest for an invalid tenant name."""
    if not TENANT.fullmatch(name):
        raise BadRequest(
            f"tenant is {name!r}: expected 1 to 64 letters, digits or ._-", param="tenant"
        )
