"""API keys in the PostgreSQL store: added and revoked once, for every gateway on it."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from lockstep.gateway.key_file import OWN_PREFIX, KeyPrefix, StoredKey, new_key
from lockstep.tokens.errors import LockstepError, NotFound

if TYPE_CHECKING:
    from lockstep.storage.postgres import PostgresDatabase

log = logging.getLogger(__name__)
CHANNEL = "api_keys"
POLL_SECONDS = 10.0
"""How often the keys are read although nobody said that they changed."""
READ = "SELECT id, sha256, tenant, created, revoked FROM api_keys ORDER BY created, id"
ADD = "INSERT INTO api_keys (id, sha256, tenant, created) VALUES ($1, $2, $3, $4)"
REVOKE = """
UPDATE api_keys SET revoked = true WHERE id = $1 AND NOT revoked
RETURNING id, sha256, tenant, created
"""


class KeyStore:
    """The keys of a database that is open. A gateway `follow`s them."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self.keys: tuple[StoredKey, ...] = ()
        self.required = False
        """Whether there ever was a key: a store whose last key was revoked lets nobody in."""

    async def follow(self) -> None:
        """Reads the keys, and again whenever they change. Raises Unavailable."""
        await self._database.listen(CHANNEL, lambda _: self._changed.set())
        await self.read()
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Stops to follow."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def read(self) -> tuple[StoredKey, ...]:
        """The keys that are not revoked."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(READ)
        self.required = bool(rows)
        keys = tuple(
            StoredKey(row["id"], row["sha256"], row["tenant"], row["created"])
            for row in rows
            if not row["revoked"]
        )
        if keys != self.keys:
            self.keys = keys
        return self.keys

    async def add(self, tenant: str, prefix: KeyPrefix = OWN_PREFIX) -> tuple[StoredKey, str]:
        """A new key of that tenant, which is written nowhere else: its entry and itself."""
        stored, key = new_key(tenant, prefix)
        async with self._database.connection() as connection:
            await connection.execute(
                ADD, stored.id, stored.sha256, stored.tenant, stored.created
            )  # fmt: skip
            await self._notify(connection)
        return stored, key

    async def revoke(self, key_id: str) -> StoredKey:
        """Revokes a key for good. Raises NotFound."""
        async with self._database.connection() as connection:
            row = await connection.fetchrow(REVOKE, key_id)
            if row is not None:
                await self._notify(connection)
        if row is None:
            known = ", ".join(key.id for key in await self.read()) or "none"
            raise NotFound(f"there is no key {key_id!r} in the store; it has {known}", param="key")
        return StoredKey(row["id"], row["sha256"], row["tenant"], row["created"])

    async def _notify(self, connection: object) -> None:
        name = self._database.channel_name(CHANNEL)
        await connection.execute("SELECT pg_notify($1, '')", name)  # type: ignore[attr-defined]

    async def _follow(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), POLL_SECONDS)
            self._changed.clear()
            try:
                await self.read()
            except LockstepError as error:
                log.warning("the keys stay as they were: %s", error.message)
