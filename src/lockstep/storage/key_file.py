"""The key file: API keys in a JSON file, changed by `lockstep keys`."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from lockstep.storage.api_keys import OWN_PREFIX, KeyPrefix, StoredKey, check_tenant, new_key
from lockstep.tokens.errors import BadRequest, Conflict, NotFound


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[StoredKey] = []


class KeyFile:
    """A file of keys. Gateways read it again when it has changed."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def read(self) -> list[StoredKey]:
        """Return the keys. Raises BadRequest when the file is missing or is not a key file."""
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
        """Mint a key for a tenant; return its stored form and the key, which is stored nowhere."""
        stored, key = new_key(tenant, prefix)
        keys = self.read() if self.path.exists() else []
        self._write([*keys, stored])
        return stored, key

    def revoke(self, key_id: str) -> StoredKey:
        """Remove a key. Raises NotFound."""
        keys = self.read()
        for key in keys:
            if key.id == key_id:
                self._write([other for other in keys if other is not key])
                return key
        ids = ", ".join(key.id for key in keys) or "none"
        raise NotFound(f"there is no key {key_id!r} in {self.path}; it has {ids}", param="key")

    def _write(self, keys: list[StoredKey]) -> None:
        """Replace the file atomically: a gateway reads either the old keys or the new ones."""
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
