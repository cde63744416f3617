"""The count of all sessions in PostgreSQL: one gateway makes it, and the others read it."""

from __future__ import annotations

from typing import Any

from lockstep.gateway.sessions.store import statements
from lockstep.gateway.sessions.store.interface import Totals

COUNT_SECONDS = 10.0
"""A count that is younger than this is not made again by any gateway."""
COUNTING_SECONDS = 60
"""How long one count may take: more than other statements, as there may be 100 million rows."""


async def last_count(connection: Any, schema: str) -> tuple[float, Totals]:
    """The last count, and when it was made by the clock of the server.

    Counts first when nobody did for COUNT_SECONDS, unless another gateway does at this moment.
    """
    stored = await connection.fetchrow(statements.READ_TOTALS, COUNT_SECONDS)
    if stored["old"]:
        async with connection.transaction():
            if await is_the_one(connection, schema, "count"):
                stored = await _count(connection)
    return stored["counted"], Totals(int(stored["sessions"]), int(stored["bytes"]))


async def is_the_one(connection: Any, schema: str, task: str) -> bool:
    """Whether no other gateway does this task; then none does it until the transaction ends."""
    lock = f"lockstep:{schema}:{task}"
    return bool(await connection.fetchval(statements.ONE_GATEWAY, lock))


async def _count(connection: Any) -> Any:
    # Another gateway may have counted just before this one got the lock.
    stored = await connection.fetchrow(statements.READ_TOTALS, COUNT_SECONDS)
    if not stored["old"]:
        return stored
    await connection.execute(f"SET LOCAL statement_timeout = '{COUNTING_SECONDS}s'")
    # Not fetchrow, whose limit of one row would keep PostgreSQL from counting in parallel.
    ((sessions, size),) = await connection.fetch(
        statements.COUNT_SESSIONS, timeout=COUNTING_SECONDS
    )
    await connection.execute(statements.SAVE_TOTALS, sessions, size)
    return await connection.fetchrow(statements.READ_TOTALS, COUNT_SECONDS)
