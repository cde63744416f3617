"""Desired state, operations and workers of a fleet in PostgreSQL, shared by its gateways."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from lockstep.storage.desired_state import STORED_OPERATIONS, Desired, FleetSnapshot, WorkerRecord
from lockstep.storage.postgres.database import PostgresDatabase
from lockstep.storage.postgres.leadership import PostgresLeadership
from lockstep.tokens.errors import Superseded, Unavailable
from lockstep.tokens.operation import Operation

CHANNEL = "fleet"
RETRY_SECONDS = 0.1

# FOR SHARE locks the row until the transaction ends, so that no gateway can be elected between
# this check and the writes after it.
STILL_LEADS = """
SELECT 1 FROM leader WHERE id = 1 AND holder = $1 AND generation = $2 FOR SHARE
"""
SAVE = """
INSERT INTO fleet_state (id, body, revision) VALUES (1, $1, 1)
ON CONFLICT (id) DO UPDATE SET body = $1, revision = fleet_state.revision + 1
"""
CHANGED = "UPDATE fleet_state SET revision = revision + 1 WHERE id = 1"
SNAPSHOT = """
SELECT (SELECT body FROM fleet_state WHERE id = 1) AS body,
       coalesce((SELECT revision FROM fleet_state WHERE id = 1), 0) AS revision,
       (SELECT coalesce(array_agg(body ORDER BY url), '{}') FROM members) AS workers
"""
RECORD = """
INSERT INTO operations (id, key, body) VALUES ($1, $2, $3)
ON CONFLICT (id) DO UPDATE SET body = excluded.body
"""
DROP_OLDEST = """
DELETE FROM operations WHERE number <=
    (SELECT number FROM operations ORDER BY number DESC LIMIT 1 OFFSET $1)
"""


class PostgresControlStore:
    """A ControlStore that all gateways of a database share; only the leader writes."""

    def __init__(self, database: PostgresDatabase, leadership: PostgresLeadership) -> None:
        self._database = database
        self._leadership = leadership

    async def desired(self) -> Desired:
        return (await self.snapshot()).desired

    async def save(self, desired: Desired, workers: Sequence[WorkerRecord] | None = None) -> None:
        """Save, and retry while this gateway leads.

        After a lost connection it is unknown whether the write was committed. The leader must not
        go on with an older state than the one its followers may have read.
        """
        while True:
            try:
                return await self._save(desired, workers)
            except Unavailable:
                await asyncio.sleep(RETRY_SECONDS)
                if not self._leadership.leads:
                    raise

    async def _save(self, desired: Desired, workers: Sequence[WorkerRecord] | None) -> None:
        async with self._leading(desired.generation) as connection:
            await connection.execute(SAVE, msgspec.json.encode(desired).decode())
            if workers is not None:
                await _write_workers(connection, workers)
            await self._notify(connection)

    async def publish(self, workers: Sequence[WorkerRecord]) -> None:
        async with self._leading(self._leadership.generation) as connection:
            await connection.execute(CHANGED)
            await _write_workers(connection, workers)
            await self._notify(connection)

    async def record(self, operation: Operation) -> None:
        body = msgspec.json.encode(operation).decode()
        async with self._leading(self._leadership.generation) as connection:
            if operation.key is not None:
                # A lost operation is retried under its key, which then names the new one.
                await connection.execute(
                    "UPDATE operations SET key = NULL WHERE key = $1 AND id <> $2",
                    operation.key,
                    operation.id,
                )
            await connection.execute(RECORD, operation.id, operation.key, body)
            await connection.execute(DROP_OLDEST, STORED_OPERATIONS)

    async def cut_off(self) -> None:
        async with self._leading(self._leadership.generation) as connection:
            for row in await connection.fetch("SELECT body FROM operations"):
                operation = msgspec.json.decode(row["body"], type=Operation)
                if operation.status == "running":
                    operation.status, operation.error = "lost", "its leader ended before it did"
                    body = msgspec.json.encode(operation).decode()
                    await connection.execute(RECORD, operation.id, operation.key, body)

    async def operation(self, operation_id: str) -> Operation | None:
        return await self._find("SELECT body FROM operations WHERE id = $1", operation_id)

    async def by_key(self, key: str) -> Operation | None:
        sql = "SELECT body FROM operations WHERE key = $1 ORDER BY number DESC LIMIT 1"
        return await self._find(sql, key)

    async def latest(self, count: int) -> list[Operation]:
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                "SELECT body FROM operations ORDER BY number DESC LIMIT $1", count
            )
        return [msgspec.json.decode(row["body"], type=Operation) for row in rows]

    async def snapshot(self) -> FleetSnapshot:
        async with self._database.connection() as connection:
            row = await connection.fetchrow(SNAPSHOT)
        body = row["body"]
        return FleetSnapshot(
            Desired() if body is None else msgspec.json.decode(body, type=Desired),
            tuple(msgspec.json.decode(worker, type=WorkerRecord) for worker in row["workers"]),
            row["revision"],
        )

    async def watch(self, changed: Callable[[], None]) -> None:
        await self._database.listen(CHANNEL, lambda _: changed())

    async def close(self) -> None:
        """Do nothing: the backend closes the database."""

    @asynccontextmanager
    async def _leading(self, generation: int) -> AsyncIterator[Any]:
        """Open a transaction in which this gateway leads as `generation`. Raises Superseded."""
        async with self._database.connection() as connection, connection.transaction():
            holder = self._leadership.holder
            if await connection.fetchval(STILL_LEADS, holder, generation) is None:
                raise Superseded(
                    f"generation {generation} of this gateway no longer leads: another gateway "
                    "does, or the election is under way; send it again"
                )
            yield connection

    async def _notify(self, connection: Any) -> None:
        await connection.execute("SELECT pg_notify($1, '')", self._database.channel_name(CHANNEL))

    async def _find(self, sql: str, value: str) -> Operation | None:
        async with self._database.connection() as connection:
            body = await connection.fetchval(sql, value)
        return None if body is None else msgspec.json.decode(body, type=Operation)


async def _write_workers(connection: Any, workers: Sequence[WorkerRecord]) -> None:
    urls = [worker.url for worker in workers]
    bodies = [msgspec.json.encode(worker).decode() for worker in workers]
    await connection.execute("DELETE FROM members WHERE url <> ALL($1::text[])", urls)
    await connection.execute(
        "INSERT INTO members AS stored (url, body, updated) "
        "SELECT url, body, clock_timestamp() FROM unnest($1::text[], $2::text[]) AS new(url, body) "
        "ON CONFLICT (url) DO UPDATE SET body = excluded.body, updated = excluded.updated "
        "WHERE stored.body <> excluded.body",
        urls,
        bodies,
    )
