"""Opens the PostgreSQL store by its URL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lockstep.storage.postgres.control import PostgresControlStore
from lockstep.storage.postgres.database import PostgresDatabase
from lockstep.storage.postgres.keys import PostgresKeyStore
from lockstep.storage.postgres.leadership import PostgresLeadership
from lockstep.storage.postgres.sessions import PostgresSessionStore
from lockstep.storage.store import Store


@asynccontextmanager
async def open_backend(url: str, _model: str | None) -> AsyncIterator[Store]:
    """Connect and migrate the schema; see `open_store`. The schema is not bound to one model."""
    database = PostgresDatabase(url)
    await database.open()
    keys, leadership = PostgresKeyStore(database), PostgresLeadership(database)
    try:
        yield Store(
            PostgresSessionStore(database),
            PostgresControlStore(database, leadership),
            leadership,
            keys,
        )
    finally:
        await keys.close()
        await database.close()
