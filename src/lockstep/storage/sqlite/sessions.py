"""Sessions in an SQLite file of one gateway, or in memory.

The rows of all sessions are in memory, so that only turns are read from the file. An entry counts
turns before they are written, and is corrected when the write fails.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from lockstep.storage.protocols import LoadedSession, NewTurns, Totals
from lockstep.storage.session_entry import SessionEntry, SessionTerms
from lockstep.storage.sqlite import MEMORY
from lockstep.storage.sqlite import session_tables as tables
from lockstep.storage.sqlite.thread import SqliteThread
from lockstep.tokens.errors import Conflict, LockstepError

log = logging.getLogger(__name__)


class SqliteSessionStore:
    """A SessionStore of one process, which locks the file at `path`."""

    shared = False

    def __init__(self, path: str = MEMORY) -> None:
        self.secret = b""
        self._thread = SqliteThread(path)
        self._index = SessionIndex()

    async def start(self) -> float:
        stored = await self._thread.start()
        self.secret = stored.secret
        self._index.restore(stored.entries)
        for entry in stored.entries:
            if entry.damaged:
                log.error("the stored row of session %r is damaged: delete the session", entry.name)
        return stored.clock

    async def stop(self) -> None:
        await self._thread.stop()

    def totals(self) -> Totals:
        return Totals(len(self._index), self._index.nbytes)

    async def find(self, name: str) -> SessionEntry | None:
        return self._index.get(name)

    async def find_key(self, digest: bytes) -> SessionEntry | None:
        return self._index.find_key(digest)

    async def load(
        self, name: str, base: SessionEntry | None = None, turns: int = 0
    ) -> LoadedSession | None:
        if self._index.is_deleting(name):
            raise Conflict(f"session {name!r} is being deleted: try again", param="x-session-id")
        entry = self._index.get(name)
        if entry is None:
            return None
        entry.check_readable()
        number = entry.id or 0
        stored = await self._thread.read(lambda db: tables.read_session(db, number, name))
        if self._index.get(name) is not entry:
            raise Conflict(
                f"session {name!r} was deleted while it was read: try again, which begins a new "
                "one",
                param="x-session-id",
            )
        return LoadedSession(entry, 0, stored)

    async def append(self, entry: SessionEntry, new: NewTurns) -> bool:
        terms, grown = entry.terms, new.nbytes - entry.bytes
        # Counted before the write: requests that arrive meanwhile are checked against limits and
        # budget with this turn included.
        if terms is not None:
            entry.terms = terms.add_tokens(new.tokens)
        self._index.grow(entry, new.count, grown)
        row = tables.row_of(entry)

        def work(db: sqlite3.Connection) -> None:
            turns = enumerate(new.encode(), new.head)
            tables.write_turns(db, row, turns, new.breaks)

        write = self._thread.write(work)

        def undo_failed(future: asyncio.Future[None]) -> None:
            if future.exception() is not None:
                self._index.shrink(entry, new.count, grown)

        # In a callback: it runs also when the caller is cancelled while the write goes on.
        write.add_done_callback(undo_failed)
        await write
        return True

    async def add_breaks(self, entry: SessionEntry, breaks: Sequence[tuple[bytes, str]]) -> None:
        row = tables.row_of(entry)
        await self._thread.write(lambda db: tables.write_turns(db, row, (), breaks))

    async def create(self, entry: SessionEntry) -> bool:
        if self._index.get(entry.name) is not None or self._index.is_deleting(entry.name):
            return False
        self._index.grow(entry, 0, 0)
        try:
            await self._save(entry)
        except LockstepError:
            self._index.end_deleting([entry], deleted=True)
            raise
        return True

    async def count_call(self, entry: SessionEntry, calls: int = 1) -> None:
        if entry.terms is not None:
            entry.terms = entry.terms.add_calls(entry.name, calls)

    async def change_terms(
        self, entry: SessionEntry, change: Callable[[SessionTerms], SessionTerms]
    ) -> None:
        before = entry.terms
        entry.terms = change(before or SessionTerms())
        try:
            await self._save(entry)
        except LockstepError:
            entry.terms = before
            raise

    async def mark_read(self, entry: SessionEntry, turns: int) -> None:
        entry.read_turns = turns
        await asyncio.shield(self._execute(tables.MARK_READ, turns, entry.id))

    async def page(self, after: str, limit: int) -> list[SessionEntry]:
        return await self._thread.read(lambda db: tables.read_page(db, after, limit))

    async def latest(
        self, wanted: Callable[[str], bool], limit: int, offset: int
    ) -> tuple[list[str], int]:
        entries = [entry for entry in self._index if wanted(entry.name)]
        first = heapq.nlargest(offset + limit, entries, key=lambda entry: entry.used)
        return [entry.name for entry in first[offset:]], len(entries)

    async def remove(self, entries: Iterable[SessionEntry]) -> None:
        deleting = list(entries)
        self._index.begin_deleting(deleting)
        ids = [entry.id or 0 for entry in deleting]
        removed = self._thread.write(lambda db: tables.remove(db, ids))
        removed.add_done_callback(
            lambda future: self._index.end_deleting(deleting, deleted=future.exception() is None)
        )
        # Shielded: cancelling the caller must not cancel the deletion halfway.
        await asyncio.shield(removed)

    async def expire(
        self, since: float, unread: bool, idle: Callable[[str], bool], limit: int
    ) -> list[str]:
        expired = (
            entry
            for entry in self._index
            if not entry.damaged
            and entry.active < since
            and (entry.was_read or unread)
            and idle(entry.name)
        )
        entries = list(islice(expired, limit))
        if entries:
            await self.remove(entries)
        return [entry.name for entry in entries]

    async def save_clock(self, seconds: float) -> float:
        await self._execute(tables.SAVE_CLOCK, seconds)
        return seconds

    async def refresh_totals(self) -> None:
        """Do nothing: no other process changes the file."""

    def _execute(self, statement: str, *values: Any) -> asyncio.Future[Any]:
        return self._thread.write(lambda db: db.execute(statement, values).rowcount)

    async def _save(self, entry: SessionEntry) -> None:
        row = tables.row_of(entry)
        write = self._thread.write(lambda db: tables.write_turns(db, row, (), ()))
        # Shielded: cancelling the caller must not leave the index ahead of the file.
        await asyncio.shield(write)


class SessionIndex:
    """Rows of all stored sessions by name and by key digest, and the bytes they hold together.

    A session that is being deleted keeps its entry until the file has dropped it, so that a failed
    deletion changes nothing; meanwhile `get` does not return it.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._entries: dict[str, SessionEntry] = {}
        self._by_key: dict[bytes, SessionEntry] = {}
        self._deleting: set[str] = set()
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[SessionEntry]:
        """Iterate over the sessions that are not being deleted."""
        return (entry for entry in self._entries.values() if entry.name not in self._deleting)

    def restore(self, entries: Iterable[SessionEntry]) -> None:
        """Add the sessions that a file holds, including damaged ones: their names stay taken until
        they are deleted."""
        for entry in entries:
            self.nbytes += entry.bytes
            self._entries[entry.name] = entry
            self._next_id = max(self._next_id, (entry.id or 0) + 1)
            self._add_key(entry)

    def _add_key(self, entry: SessionEntry) -> None:
        if entry.terms is not None and entry.terms.digest is not None:
            self._by_key[entry.terms.digest] = entry

    def get(self, name: str) -> SessionEntry | None:
        """Return the session of that name, unless it is being deleted."""
        return None if name in self._deleting else self._entries.get(name)

    def find_key(self, digest: bytes) -> SessionEntry | None:
        """Return the session that the key with this digest was minted for."""
        entry = self._by_key.get(digest)
        return None if entry is None or entry.name in self._deleting else entry

    def is_deleting(self, name: str) -> bool:
        """Return whether the session of that name is being deleted."""
        return name in self._deleting

    def grow(self, entry: SessionEntry, turns: int, nbytes: int) -> None:
        """Count what is about to be written. A new session gets its id."""
        if entry.id is None:
            entry.id = self._next_id
            self._next_id += 1
        self._entries[entry.name] = entry
        self._add_key(entry)
        entry.turns += turns
        entry.bytes += nbytes
        self.nbytes += nbytes

    def shrink(self, entry: SessionEntry, turns: int, nbytes: int) -> None:
        """Undo `grow` after a failed write."""
        if self._entries.get(entry.name) is not entry:
            return
        entry.turns -= turns
        entry.bytes -= nbytes
        self.nbytes -= nbytes
        if not entry.turns and entry.terms is None:
            del self._entries[entry.name]

    def begin_deleting(self, entries: Iterable[SessionEntry]) -> None:
        """Hide sessions while they are being deleted."""
        self._deleting.update(entry.name for entry in entries)

    def end_deleting(self, entries: Iterable[SessionEntry], *, deleted: bool) -> None:
        """Drop deleted sessions, or show them again when the deletion failed."""
        for entry in entries:
            self._deleting.discard(entry.name)
            if deleted:
                self.nbytes -= entry.bytes
                del self._entries[entry.name]
                if entry.terms is not None and entry.terms.digest is not None:
                    self._by_key.pop(entry.terms.digest, None)
