"""Sessions in PostgreSQL, shared by any number of gateways.

Nothing is kept of sessions that no request uses, so that their number costs no memory here. How
many there are and what they hold together is counted every few seconds, by one gateway for all.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from lockstep.gateway.sessions.entry import SessionEntry
from lockstep.gateway.sessions.store import statements
from lockstep.gateway.sessions.store.count import is_the_one, last_count
from lockstep.gateway.sessions.store.interface import (
    LoadedSession,
    NewTurns,
    StoredSession,
    Totals,
)
from lockstep.gateway.sessions.terms import SessionTerms
from lockstep.http.off_loop import off_loop
from lockstep.tokens.errors import NotFound, Unavailable

if TYPE_CHECKING:
    from lockstep.storage.postgres import PostgresDatabase

CHECKSUM_BYTES = 8
LARGE_BYTES = 1 << 18
"""Turns from this size on are encoded off the event loop."""
KEY_SECONDS = 10.0
"""How long a key, or that there is none, is believed without asking again."""
KNOWN_KEYS = 20_000
NAMES = 10_000
"""How many of the latest sessions are searched for wanted ones."""


class PostgresSessionStore:
    """A SessionStore of many gateways, on a database that is open."""

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
        """Does nothing: the database is closed by who opened it."""

    def totals(self) -> Totals:
        return self._totals

    def new_entry(
        self,
        name: str,
        tokenizer: bytes,
        now: float,
        active: float,
        terms: SessionTerms | None = None,
    ) -> SessionEntry:
        return SessionEntry(None, name, tokenizer, now, now, active, terms=terms)

    async def find(self, name: str) -> SessionEntry | None:
        return await self._one(statements.FIND, name)

    async def find_key(self, digest: bytes) -> SessionEntry | None:
        until, entry = self._keys.get(digest, (0.0, None))
        if until <= monotonic():
            entry = await self._one(statements.FIND_KEY, digest)
            self._keys[digest] = (monotonic() + KEY_SECONDS, entry)
            self._keys.move_to_end(digest)
            if len(self._keys) > KNOWN_KEYS:
                self._keys.popitem(last=False)
        return entry

    async def load(self, name: str, known: SessionEntry | None, turns: int) -> LoadedSession | None:
        number, breaks = (None, 0) if known is None else (known.id, known.breaks)
        async with self._database.connection() as connection:
            row = await connection.fetchrow(statements.LOAD, name, number, turns, breaks)
        if row is None:
            return None
        entry, start = _entry(row), row["start"]
        data = row["data"]
        if len(data) != max(0, entry.turns - start):
            raise _damaged(name, f"it has {start + len(data)} of its {entry.turns} turns")
        read = [_checked(name, at, each) for at, each in enumerate(data, start)]
        breaks_since = list(zip(row["keys"], row["causes"], strict=True))
        return LoadedSession(entry, start, StoredSession(read, breaks_since))

    async def append(self, entry: SessionEntry, new: NewTurns) -> bool:
        name, begins = entry.name, entry.id is None
        large = new.nbytes - entry.bytes > LARGE_BYTES

        def encode() -> list[bytes]:
            return [_sealed(name, at, each) for at, each in enumerate(new.encode(), new.head)]

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
        kept = await self._one(
            statements.CREATE,
            entry.name,
            entry.tokenizer,
            entry.created,
            entry.active,
            None if terms is None else terms.digest,
            None if terms is None else terms.encode(),
        )
        if kept is None:
            return False
        sessions, total = self._totals
        self._totals = Totals(sessions + 1, total)
        entry.update(kept)
        return True

    async def count_call(self, entry: SessionEntry) -> None:
        """Only where calls are limited: then across all gateways, before the call begins."""
        terms = entry.terms
        if terms is None or terms.max_calls is None:
            return
        async with self._database.connection() as connection:
            calls = await connection.fetchval(statements.COUNT_CALL, entry.id, terms.max_calls)
        used = terms.max_calls if calls is None else calls
        entry.terms = msgspec.structs.replace(terms, calls=used)
        if calls is None:
            entry.terms.check_budget(entry.name)

    async def change_terms(
        self, entry: SessionEntry, change: Callable[[SessionTerms], SessionTerms]
    ) -> None:
        async with self._database.connection() as connection, connection.transaction():
            row = await connection.fetchrow(statements.LOCK, entry.id)
            if row is None:
                raise NotFound(f"session {entry.name!r} was deleted", param="session_id")
            now = _entry(row)
            now.terms = change(now.terms or SessionTerms())
            await connection.execute(
                statements.SET_TERMS, entry.id, now.terms.encode(), now.terms.finished
            )
        entry.update(now)

    async def mark_read(self, entry: SessionEntry, turns: int) -> None:
        await self._execute(statements.MARK_READ, entry.id, turns)

    async def page(self, after: str, limit: int) -> list[SessionEntry]:
        async with self._database.connection() as connection:
            return [_entry(row) for row in await connection.fetch(statements.PAGE, after, limit)]

    async def latest(
        self, wanted: Callable[[str], bool], limit: int, offset: int
    ) -> tuple[list[str], int]:
        """Among the latest NAMES sessions."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(statements.LATEST, NAMES)
        names = [row["name"] for row in rows if wanted(row["name"])]
        return names[offset : offset + limit], len(names)

    async def remove(self, entries: Iterable[SessionEntry]) -> None:
        gone = list(entries)
        await self._execute(statements.REMOVE, [entry.id for entry in gone])
        for entry in gone:
            if entry.terms is not None and entry.terms.digest is not None:
                self._keys.pop(entry.terms.digest, None)

    async def expire(
        self, since: float, unread: bool, idle: Callable[[str], bool], limit: int
    ) -> list[str]:
        """Nothing, while another gateway does it."""
        async with self._database.connection() as connection, connection.transaction():
            if not await is_the_one(connection, self._database.schema, "sweep"):
                return []
            rows = await connection.fetch(statements.FIND_EXPIRED, since, unread, limit)
            ids = [row["id"] for row in rows if idle(row["name"])]
            gone = await connection.fetch(statements.EXPIRE, since, unread, ids) if ids else []
        return [row["name"] for row in gone]

    async def save_clock(self, seconds: float) -> float:
        async with self._database.connection() as connection:
            return float(await connection.fetchval(statements.SAVE_CLOCK, seconds))

    async def refresh_totals(self) -> None:
        """From the count that one gateway makes for all."""
        async with self._database.connection() as connection:
            counted, totals = await last_count(connection, self._database.schema)
        # What this gateway added since it read this same count is in its own totals alone.
        if counted != self._counted:
            self._counted, self._totals = counted, totals

    async def _one(self, statement: str, *values: Any) -> SessionEntry | None:
        async with self._database.connection() as connection:
            row = await connection.fetchrow(statement, *values)
        return None if row is None else _entry(row)

    async def _execute(self, statement: str, *values: Any) -> None:
        async with self._database.connection() as connection:
            await connection.execute(statement, *values)


def _entry(row: Any) -> SessionEntry:
    """The session of a row that begins with statements.COLUMNS."""
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


def _checksum(name: str, turn: int, data: bytes | memoryview) -> bytes:
    """Of a turn and of where it stands: two turns that change places are damage as well."""
    digest = blake2b(f"{name}:{turn}:".encode(), digest_size=CHECKSUM_BYTES)
    digest.update(data)
    return digest.digest()


def _sealed(name: str, turn: int, data: bytes) -> bytes:
    return _checksum(name, turn, data) + data


def _checked(name: str, turn: int, sealed: bytes) -> bytes:
    """The bytes of a turn. Raises Unavailable when they are not as they were written."""
    data = sealed[CHECKSUM_BYTES:]
    if sealed[:CHECKSUM_BYTES] != _checksum(name, turn, data):
        raise _damaged(name, f"it has a turn {turn} that is not as it was written")
    return data


def _damaged(name: str, what: str) -> Unavailable:
    return Unavailable(
        f"session {name!r} cannot be read back: {what}; the store is damaged, delete the session"
    )
