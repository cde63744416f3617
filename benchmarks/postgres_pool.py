"""Our PostgreSQL connection pool beside asyncpg.Pool: CPU of the two statements of a session turn.

    python -m benchmarks.postgres_pool

The reason to have a pool of our own: a turn takes a gateway about 1,650 µs of CPU on a store, of
which the difference is more than 5 %. asyncpg.Pool runs with the same limit on the wait for a
connection, and without its reset query, which would undo session settings and is a round trip.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import uvloop
from tests.scale.postgres_server import postgres_server

from benchmarks import table
from benchmarks.table import Row
from lockstep.storage.postgres.database import DatabaseUrl, PostgresDatabase
from lockstep.storage.postgres.sessions import PostgresSessionStore
from lockstep.storage.protocols import NewTurns
from lockstep.storage.session_entry import SessionEntry

SESSIONS, TURNS = 40, 20
ROUNDS = 7
TURN = bytes(2000)


class StockPoolDatabase(PostgresDatabase):
    """A database whose statements run on asyncpg.Pool."""

    stock: Any = None

    def connection(self) -> Any:
        return self.stock.acquire(timeout=5.0)


def rows() -> list[Row]:
    with postgres_server() as server:
        ours, theirs = uvloop.run(compare(server.schema_url(), server.schema_url()))
    return [
        Row(
            what="the two statements of a session turn on PostgreSQL",
            against=f"asyncpg.Pool {asyncpg.__version__}, without its reset query",
            ours=ours,
            theirs=theirs,
            unit="µs of CPU",
            note="of about 1,650 µs that a turn takes a gateway",
        )
    ]


async def compare(our_url: str, their_url: str) -> tuple[float, float]:
    """Return the medians of both pools, measured in alternation."""
    seen: tuple[list[float], list[float]] = ([], [])
    async with opened(PostgresDatabase(our_url)) as ours, opened(stock(their_url)) as theirs:
        for at in range(ROUNDS + 1):
            for store, times in zip((ours, theirs), seen, strict=True):
                spent = await turn_cpu(store, f"{at}")
                if at:  # the first round prepares statements
                    times.append(spent)
    return statistics.median(seen[0]), statistics.median(seen[1])


def stock(url: str) -> StockPoolDatabase:
    database = StockPoolDatabase(url)
    parsed = DatabaseUrl.parse(url)
    database.stock = asyncpg.create_pool(
        parsed.dsn,
        min_size=1,
        command_timeout=10.0,
        server_settings={"search_path": parsed.schema},
        max_inactive_connection_lifetime=0,
        reset=leave_as_it_is,
    )
    return database


async def leave_as_it_is(_: object) -> None:
    """Replace the reset query of asyncpg.Pool."""


@asynccontextmanager
async def opened(database: PostgresDatabase) -> AsyncIterator[PostgresSessionStore]:
    # The schema is migrated by our own pool in both cases.
    await PostgresDatabase.open(database)
    if isinstance(database, StockPoolDatabase):
        await database.stock
    try:
        store = PostgresSessionStore(database)
        await store.start()
        yield store
    finally:
        if isinstance(database, StockPoolDatabase):
            await database.stock.close()
        await database.close()


async def turn_cpu(store: PostgresSessionStore, label: str) -> float:
    """Return the microseconds of CPU of this process for a turn."""
    gc.collect()
    begun = time.process_time()
    for number in range(SESSIONS):
        name = f"{label}.{number}"
        entry = SessionEntry(None, name, b"tokenizer", 1.0, 1.0, 1.0)
        for turn in range(TURNS):
            await store.load(name, entry if turn else None, turn)
            new = NewTurns(turn, 1, lambda: [TURN], len(TURN) * (turn + 1), 10, ())
            if not await store.append(entry, new):
                raise RuntimeError(f"turn {turn} of session {name} was not stored")
    return (time.process_time() - begun) / SESSIONS / TURNS * 1e6


if __name__ == "__main__":
    table.main(rows, __doc__)
