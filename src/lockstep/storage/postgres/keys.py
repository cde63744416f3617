"""API keys in PostgreSQL: a change applies to every gateway on the store."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

from lockstep.storage.api_keys import OWN_PREFIX, KeyPrefix, StoredKey, new_key
from lockstep.storage.postgres.database import PostgresDatabase
from lockstep.tokens.errors import LockstepError, NotFound

log = logging.getLogger(__name__)
CHANNEL = "api_keys"
POLL_SECONDS = 10.0
"""Seconds between reads without a notification, in case one was lost."""
READ = "SELECT id, sha256, tenant, created, revoked FROM api_keys ORDER BY created, id"
ADD = "INSERT INTO api_keys (id, sha256, tenant, created) VALUES ($1, $2, $3, $4)"
REVOKE = """
UPDATE api_keys SET revoked = true WHERE id = $1 AND NOT revoked
RETURNING id, sha256, tenant, created
"""


class PostgresKeyStore:
    """A KeyStore on an open database."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self.keys: tuple[StoredKey, ...] = ()
        self.required = False

    async def follow(self) -> None:
        await self._database.listen(CHANNEL, lambda _: self._changed.set())
        await self.read()
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Stop following."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def read(self) -> tuple[StoredKey, ...]:
        async with self._database.connection() as connection:
            rows = await connection.fetch(READ)
        self.required = bool(rows)
        # Revoked rows stay, so that `required` stays true after the last key is revoked.
        keys = tuple(
            StoredKey(row["id"], row["sha256"], row["tenant"], row["created"])
            for row in rows
            if not row["revoked"]
        )
        if keys != self.keys:  # the same tuple while nothing changed: readers compare with `is`
            self.keys = keys
        return self.keys

    async def add(self, tenant: str, prefix: KeyPrefix = OWN_PREFIX) -> tuple[StoredKey, str]:
        stored, key = new_key(tenant, prefix)
        async with self._database.connection() as connection:
            await connection.execute(ADD, stored.id, stored.sha256, stored.tenant, stored.created)
            await self._notify(connection)
        return stored, key

    async def revoke(self, key_id: str) -> StoredKey:
        async with self._database.connection() as connection:
            row = await connection.fetchrow(REVOKE, key_id)
            if row is not None:
                await self._notify(connection)
        if row is None:
            ids = ", ".join(key.id for key in await self.read()) or "none"
            raise NotFound(f"there is no key {key_id!r} in the store; it has {ids}", param="key")
        return StoredKey(row["id"], row["sha256"], row["tenant"], row["created"])

    async def _notify(self, connection: Any) -> None:
        await connection.execute("SELECT pg_notify($1, '')", self._database.channel_name(CHANNEL))

    async def _follow(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), POLL_SECONDS)
            self._changed.clear()
            try:
                await self.read()
            except LockstepError as error:
                log.warning(
                    "API keys could not be read, the last ones stay in use: %s", error.message
                )
