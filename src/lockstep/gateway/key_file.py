"""The key file: API keys by digest, each with its tenant, changed by `lockstep keys`."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import Literal

import msgspec

from lockstep.gateway.tenants import DEFAULT, check_tenant
from lockstep.http.auth import key_digest
from lockstep.tokens.errors import BadRequest, Conflict, NotFound

KeyPrefix = Literal["lk-", "tml-"]
OWN_PREFIX: KeyPrefix = "lk-"
TINKER_PREFIX: KeyPrefix = "tml-"
"""How the keys begin that clients of Tinker are willing to send."""


class StoredKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key in the file: its short id for logs, its tenant, and its SHA-256, never the key."""

    id: str
    sha256: str
    tenant: str = DEFAULT
    created: int = 0


def new_key(tenant: str, prefix: KeyPrefix = OWN_PREFIX) -> tuple[StoredKey, str]:
    """A key of that tenant: what is stored of it, and itself. Raises BadRequest."""
    check_tenant(tenant)
    key = prefix + secrets.token_urlsafe(32)
    stored = StoredKey(
        id=f"key-{secrets.token_hex(4)}",
        sha256=key_digest(key.encode()).hex(),
        tenant=tenant,
        created=int(time.time()),
    )
    return stored, key


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[StoredKey] = []


class KeyFile:
    """One file of keys. A gateway reads it again when it has changed."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def read(self) -> list[StoredKey]:
        """The keys. Raises BadRequest when the file cannot be read or is no key file."""
        try:
            keys = msgspec.json.decode(self.path.read_bytes(), type=_File).keys
            for key in keys:
                check_tenant(key.tenant)
                if len(bytes.fromhex(key.sha256)) != 32:
                    raise ValueError(f"sha256 of key {key.id!r} is not 64 hexadecimal digits")
        except OSError as error:
            raise BadRequest(
                f"the key file {self.path} cannot be read ({error.strerror}): make it with "
                "`lockstep keys add`",
                param="key_file",
            ) from None
        except (ValueError, BadRequest) as error:
            raise BadRequest(
                f"the key file {self.path} is not one: {error}", param="key_file"
            ) from None
        return keys

    def add(self, tenant: str, prefix: KeyPrefix = OWN_PREFIX) -> tuple[StoredKey, str]:
        """A new key of that tenant, which is written nowhere else: its entry and itself."""
        stored, key = new_key(tenant, prefix)
        keys = self.read() if self.path.exists() else []
        self._write([*keys, stored])
        return stored, key

    def revoke(self, key_id: str) -> StoredKey:
        """Removes a key. Raises NotFound."""
        keys = self.read()
        for key in keys:
            if key.id == key_id:
                self._write([each for each in keys if each is not key])
                return key
        known = ", ".join(key.id for key in keys) or "none"
        raise NotFound(f"there is no key {key_id!r} in {self.path}; it has {known}", param="key")

    def _write(self, keys: list[StoredKey]) -> None:
        """Replaces the file in one step: a gateway reads the old keys or the new ones."""
        new = self.path.with_name(self.path.name + ".new")
        try:
            handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise Conflict(
                f"{new} exists: another command changes the keys, or ended halfway; remove it if "
                "none runs",
                param="key_file",
            ) from None
        except OSError as error:
            raise BadRequest(
                f"the key file {self.path} cannot be written: {error.strerror}", param="key_file"
            ) from None
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(_File(keys))) + b"\n")
            file.flush()
            os.fsync(handle)
        new.replace(self.path)
