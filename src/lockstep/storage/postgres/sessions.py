"""Sessions in PostgreSQL, shared by any number of gateways.

Idle sessions take no memory in the gateway. Their number and size are counted every 10 s, by one
gateway for all.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any

import msgspec

from lockstep.http.off_loop import is_large_json, off_loop
from lockstep.storage.postgres import session_statements as statements
from lockstep.storage.postgres.database import PostgresDatabase
from lockstep.storage.protocols import LoadedSession, NewTurns, StoredSession, Totals
from lockstep.storage.session_entry import (
    CHECKSUM_BYTES,
    SessionEntry,
    SessionTerms,
    damaged_session,
    turn_checksum,
)
from lockstep.tokens.errors import NotFound

KEY_SECONDS = 10.0
"""Seconds for which the result of a key lookup is cached, also that there is no such key."""
CACHED_KEYS = 20_000
LATEST_NAMES = 10_000
"""How many of the last used sessions `latest` searches."""
COUNT_SECONDS = 10.0
"""Age in seconds from which a count is made again."""
COUNTING_SECONDS = 60
"""Timeout of a count. It is longer than that of other statements: there may be 100 million rows."""


class PostgresSessionStore:
    """A SessionStore of many gateways, on an open database."""

    shared = True

    def __init__(self, database: PostgresDatabase) -> None:
        self.secret = b""
        self._database = database
        self._totals, self._counted = Totals(0, 0), -1.0
        self._keys: OrderedDict[bytes, tuple[float, SessionEntry | None]] = OrderedDict()

    async def start(self) -> float:
        async with self._database.connection() as connection:
            await connection.execute(statements.FACTS, secrets.token_bytes(32))
            facts = await connection.fetchrow(statements.READ_FACTS)
        self.secret = facts["secret"]
        await self.refresh_totals()
        return float(facts["clock"])

    async def stop(self) -> None:
        """Do nothing: the backend closes the database."""

    def totals(self) -> Totals:
        return self._totals

    async def find(self, name: str) -> SessionEntry | None:
        return await self._find(statements.FIND, name)

    async def find_key(self, digest: bytes) -> SessionEntry | None:
        until, entry = self._keys.get(digest, (0.0, None))
        if until <= monotonic():
            entry = await self._find(statements.FIND_KEY, digest)
            self._keys[digest] = (monotonic() + KEY_SECONDS, entry)
            self._keys.move_to_end(digest)
            if len(self._keys) > CACHED_KEYS:
                self._keys.popitem(last=False)
        return entry

    async def load(
        self, name: str, base: SessionEntry | None = None, turns: int = 0
    ) -> LoadedSession | None:
        number, breaks = (None, 0) if base is None else (base.id, base.breaks)
        async with self._database.connection() as connection:
            row = await connection.fetchrow(statements.LOAD, name, number, turns, breaks)
        if row is None:
            return None
        entry, start = _entry(row), row["start"]
        data = row["data"]
        if len(data) != max(0, entry.turns - start):
            raise damaged_session(
                name, f"it has {start + len(data)} of its {entry.turns} turns", "store"
            )
        loaded = [_open(name, turn, sealed) for turn, sealed in enumerate(data, start)]
        new_breaks = list(zip(row["keys"], row["causes"], strict=True))
        return LoadedSession(entry, start, StoredSession(loaded, new_breaks))

    async def append(self, entry: SessionEntry, new: NewTurns) -> bool:
        name, begins = entry.name, entry.id is None
        large = is_large_json(new.nbytes - entry.bytes)

        def encode() -> list[bytes]:
            return [_seal(name, turn, data) for turn, data in enumerate(new.encode(), new.head)]

        data = await off_loop(large, encode)
        async with self._database.connection() as connection:
            row = await connection.fetchrow(
                statements.BEGIN if begins else statements.APPEND,
                new.head,
                data,
                [key for key, _ in new.breaks],
                [cause for _, cause in new.breaks],
                new.nbytes,
                new.tokens,
                entry.used,
                entry.active,
                entry.tokenizer,
                name if begins else entry.id,
            )
        if row is None:
            return False
        sessions, total = self._totals
        self._totals = Totals(sessions + begins, total + new.nbytes - entry.bytes)
        entry.update(_entry(row))
        return True

    async def add_breaks(self, entry: SessionEntry, breaks: Sequence[tuple[bytes, str]]) -> None:
        keys, causes = [key for key, _ in breaks], [cause for _, cause in breaks]
        await self._execute(statements.ADD_BREAKS, entry.id, keys, causes)

    async def create(self, entry: SessionEntry) -> bool:
        terms = entry.terms
        stored = await self._find(
            statements.CREATE,
            entry.name,
            entry.tokenizer,
            entry.created,
            entry.active,
            None if terms is None else terms.digest,
            None if terms is None else terms.encode(),
        )
        if stored is None:
            return False
        sessions, total = self._totals
        self._totals = Totals(sessions + 1, total)
        entry.update(stored)
        return True

    async def count_call(self, entry: SessionEntry, calls: int = 1) -> None:
        terms = entry.terms
        # Unlimited calls are not counted here, which saves a statement per call.
        if terms is None or terms.max_calls is None:
            return
        async with self._database.connection() as connection:
            count = await connection.fetchval(
                statements.COUNT_CALLS, entry.id, terms.max_calls, calls
            )
        if count is not None:
            entry.terms = msgspec.structs.replace(terms, calls=count)
            return
        if calls == 1:
            entry.terms = msgspec.structs.replace(terms, calls=terms.max_calls)
            entry.terms.check_budget(entry.name)
        # Other gateways may have counted calls that this entry has not seen.
        least = max(terms.calls, terms.max_calls - calls + 1)
        msgspec.structs.replace(terms, calls=least).add_calls(entry.name, calls)

    async def change_terms(
        self, entry: SessionEntry, change: Callable[[SessionTerms], SessionTerms]
    ) -> None:
        async with self._database.connection() as connection, connection.transaction():
            row = await connection.fetchrow(statements.LOCK, entry.id)
            if row is None:
                raise NotFound(f"session {entry.name!r} was deleted", param="session_id")
            stored = _entry(row)
            stored.terms = terms = change(stored.terms or SessionTerms())
            await connection.execute(statements.SET_TERMS, entry.id, terms.encode(), terms.finished)
        entry.update(stored)

    async def mark_read(self, entry: SessionEntry, turns: int) -> None:
        await self._execute(statements.MARK_READ, entry.id, turns)

    async def page(self, after: str, limit: int) -> list[SessionEntry]:
        async with self._database.connection() as connection:
            return [_entry(row) for row in await connection.fetch(statements.PAGE, after, limit)]

    async def latest(
        self, wanted: Callable[[str], bool], limit: int, offset: int
    ) -> tuple[list[str], int]:
        """See SessionStore.latest; only the last used LATEST_NAMES sessions are searched."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(statements.LATEST, LATEST_NAMES)
        names = [row["name"] for row in rows if wanted(row["name"])]
        return names[offset : offset + limit], len(names)

    async def remove(self, entries: Iterable[SessionEntry]) -> None:
        removed = list(entries)
        await self._execute(statements.REMOVE, [entry.id for entry in removed])
        for entry in removed:
            if entry.terms is not None and entry.terms.digest is not None:
                self._keys.pop(entry.terms.digest, None)

    async def expire(
        self, since: float, unread: bool, idle: Callable[[str], bool], limit: int
    ) -> list[str]:
        """See SessionStore.expire; does nothing while another gateway does it."""
        async with self._database.connection() as connection, connection.transaction():
            if not await lock_task(connection, self._database.schema, "sweep"):
                return []
            rows = await connection.fetch(statements.FIND_EXPIRED, since, unread, limit)
            ids = [row["id"] for row in rows if idle(row["name"])]
            expired = await connection.fetch(statements.EXPIRE, since, unread, ids) if ids else []
        return [row["name"] for row in expired]

    async def save_clock(self, seconds: float) -> float:
        async with self._database.connection() as connection:
            return float(await connection.fetchval(statements.SAVE_CLOCK, seconds))

    async def refresh_totals(self) -> None:
        async with self._database.connection() as connection:
            counted, totals = await last_count(connection, self._database.schema)
        # After the same count as before, the local totals are newer: they include own turns.
        if counted != self._counted:
            self._counted, self._totals = counted, totals

    async def _find(self, statement: str, *values: Any) -> SessionEntry | None:
        async with self._database.connection() as connection:
            row = await connection.fetchrow(statement, *values)
        return None if row is None else _entry(row)

    async def _execute(self, statement: str, *values: Any) -> None:
        async with self._database.connection() as connection:
            await connection.execute(statement, *values)


async def last_count(connection: Any, schema: str) -> tuple[float, Totals]:
    """Return the time of the last count, on the server's clock, and the count.

    Counts first if the last one is older than COUNT_SECONDS and no other gateway is counting.
    """
    stored = await connection.fetchrow(statements.READ_TOTALS, COUNT_SECONDS)
    if stored["old"]:
        async with connection.transaction():
            if await lock_task(connection, schema, "count"):
                stored = await _count(connection)
    return stored["counted"], Totals(int(stored["sessions"]), int(stored["bytes"]))


async def lock_task(connection: Any, schema: str, task: str) -> bool:
    """Lock a task until the transaction ends; return False if another gateway has the lock."""
    lock = f"lockstep:{schema}:{task}"
    return bool(await connection.fetchval(statements.ONE_GATEWAY, lock))


async def _count(connection: Any) -> Any:
    # Another gateway may have counted between the first look and the lock.
    stored = await connection.fetchrow(statements.READ_TOTALS, COUNT_SECONDS)
    if not stored["old"]:
        return stored
    await connection.execute(f"SET LOCAL statement_timeout = '{COUNTING_SECONDS}s'")
    # Not fetchrow: its row limit of 1 keeps PostgreSQL from using a parallel plan.
    ((sessions, size),) = await connection.fetch(
        statements.COUNT_SESSIONS, timeout=COUNTING_SECONDS
    )
    await connection.execute(statements.SAVE_TOTALS, sessions, size)
    return await connection.fetchrow(statements.READ_TOTALS, COUNT_SECONDS)


def _entry(row: Any) -> SessionEntry:
    """Return the session of a row that begins with statements.COLUMNS."""
    (number, name, tokenizer, created, used, active, turns, size, breaks, read_turns, raw, calls,
     tokens) = tuple(row)[:13]  # fmt: skip
    terms = None
    if raw is not None:
        try:
            terms = SessionTerms.decode(raw)
        except msgspec.DecodeError:
            return SessionEntry(number, name, b"", 0.0, 0.0, 0.0, damaged=True)
    if terms is not None:
        terms = msgspec.structs.replace(terms, calls=calls, tokens=tokens)
    return SessionEntry(
        number, name, tokenizer, created, used, active, turns, size, read_turns, terms, breaks
    )


def _seal(name: str, turn: int, data: bytes) -> bytes:
    """Return a turn as it is stored: its checksum, then its bytes."""
    return turn_checksum(name, turn, data) + data


def _open(name: str, turn: int, sealed: bytes) -> bytes:
    """Return the bytes of a stored turn. Raises Unavailable for a wrong checksum."""
    data = sealed[CHECKSUM_BYTES:]
    if sealed[:CHECKSUM_BYTES] != turn_checksum(name, turn, data):
        raise damaged_session(name, f"it has a turn {turn} that is not as it was written", "store")
    return data
