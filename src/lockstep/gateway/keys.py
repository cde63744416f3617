"""Keys of the data plane: from the environment, a key file, the store, and of sessions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from time import monotonic

from lockstep.gateway.sessions.sessions import Sessions
from lockstep.gateway.tenants import Caller, Scopes
from lockstep.http.auth import key_digests
from lockstep.storage.api_keys import DEFAULT_TENANT, StoredKey
from lockstep.storage.key_file import KeyFile
from lockstep.storage.protocols import KeyStore
from lockstep.tokens.errors import LockstepError

log = logging.getLogger(__name__)
RELOAD_SECONDS = 1.0
"""Seconds between looks at the key file."""


class TenantKeys:
    """Callers of requests, by the digest of their key.

    Every key of `keys` is a tenant of its own, unless it is the only one; keys of the key file and
    of the store name their tenant. With `shared`, all of them are the default tenant. The key of a
    session is valid as long as the session. Raises BadRequest for an invalid key file.
    """

    def __init__(
        self,
        sessions: Sessions,
        keys: Iterable[str] = (),
        *,
        key_file: Path | None = None,
        store: KeyStore | None = None,
        shared: bool = False,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._sessions = sessions
        self._scopes = Scopes(sessions.secret)
        self._shared = shared
        self._clock = clock
        self._fixed = self._callers(tuple(dict.fromkeys(keys)), alone=key_file is None)
        self._file = None if key_file is None else KeyFile(key_file)
        self._from_file: dict[bytes, Caller] = {}
        self._store, self._stored = store, None if store is None else store.keys
        self._from_store = {} if store is None else self._by_digest(store.keys)
        self._seen: tuple[int, ...] | None = None
        self._looked = clock()
        if self._file is not None:
            self._seen = self._stamp(self._file.path)
            self._from_file = self._read(self._file)

    @property
    def required(self) -> bool:
        """Whether requests need a key."""
        stored = self._store is not None and self._store.required
        return bool(self._fixed) or self._file is not None or stored

    async def find(self, digest: bytes) -> Caller | None:
        """Return the caller whose key has this digest, or None."""
        if self._file is not None and self._clock() - self._looked >= RELOAD_SECONDS:
            self._reload(self._file)
        if self._store is not None and self._store.keys is not self._stored:
            self._stored = self._store.keys
            self._from_store = self._by_digest(self._stored)
        caller = (
            self._fixed.get(digest) or self._from_file.get(digest) or self._from_store.get(digest)
        )
        return caller or await self._of_session(digest)

    async def _of_session(self, digest: bytes) -> Caller | None:
        session = await self._sessions.keys.find(digest)
        if session is None:
            return None
        name, terms = session
        return self._scopes.of_session(name, terms.key_id or "", terms.cache_salt)

    def _callers(self, keys: tuple[str, ...], *, alone: bool) -> dict[bytes, Caller]:
        callers: dict[bytes, Caller] = {}
        for key in keys:
            key_id = self._scopes.named(key)
            one_tenant = self._shared or (alone and len(keys) == 1)
            caller = self._scopes.of_tenant(DEFAULT_TENANT if one_tenant else key_id, key_id)
            callers |= dict.fromkeys(key_digests(key), caller)
        return callers

    def _reload(self, file: KeyFile) -> None:
        """Read the key file again if it has changed.

        The keys stay valid if it cannot be read: a mistake in it must not lock out all callers.
        """
        self._looked = self._clock()
        stamp = self._stamp(file.path)
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            new = self._read(file)
        except LockstepError as error:
            log.error("API keys not read, the last ones stay valid: %s", error.message)
            return
        before = {str(caller) for caller in self._from_file.values()}
        after = {str(caller) for caller in new.values()}
        added, revoked = sorted(after - before), sorted(before - after)
        log.warning("API keys of %s changed: added %s, revoked %s", file.path, added, revoked)
        self._from_file = new

    def _read(self, file: KeyFile) -> dict[bytes, Caller]:
        return self._by_digest(file.read())

    def _by_digest(self, keys: Iterable[StoredKey]) -> dict[bytes, Caller]:
        return {
            bytes.fromhex(key.sha256): self._scopes.of_tenant(
                DEFAULT_TENANT if self._shared else key.tenant, key.id
            )
            for key in keys
        }

    @staticmethod
    def _stamp(path: Path) -> tuple[int, ...] | None:
        try:
            status = path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino
