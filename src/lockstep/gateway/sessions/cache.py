"""The sessions in memory: the most recently used ones, up to a limit of bytes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakSet, WeakValueDictionary

from lockstep.ledger import Ledger, PromptPlan
from lockstep.storage.session_entry import SessionEntry
from lockstep.tokens import Completion
from lockstep.tokens.errors import LockstepError

SESSION_BYTES = 2000
"""Memory of a session beside its turns, as measured; for accounting only."""
BREAK_BYTES = 100


class WaitingTurn(NamedTuple):
    """Choices of a reply that wait to be stored; `stored` gets their number when they are."""

    plan: PromptPlan
    choices: Sequence[tuple[Completion, Any]]
    stored: asyncio.Future[int]


class CachedSession:
    """A session in memory. Requests that use it hold a reference, which keeps it the only object
    of its name.

    `ended` is the error for requests that still use it after it was deleted. `waiting` are turns to
    be written after those that the task `writing` is writing.
    """

    __slots__ = (
        "__weakref__",
        "counted_bytes",
        "ended",
        "entry",
        "ledger",
        "unsaved_breaks",
        "waiting",
        "writing",
    )  # fmt: skip

    def __init__(self, entry: SessionEntry, ledger: Ledger) -> None:
        self.entry, self.ledger = entry, ledger
        self.counted_bytes = 0
        self.ended: LockstepError | None = None
        self.unsaved_breaks: list[tuple[bytes, str]] = []
        self.waiting: list[WaitingTurn] = []
        self.writing: asyncio.Task[None] | None = None
        # Not a bound method of this object, through which the ledger would keep it alive.
        ledger.on_break = self.unsaved_breaks.append

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def nbytes(self) -> int:
        """Size of the session, as its limits count it."""
        ledger = self.ledger
        return ledger.nbytes + SESSION_BYTES + BREAK_BYTES * ledger.break_counts.total()

    def check_alive(self) -> None:
        """Raise the error of a session that has ended."""
        if (error := self.ended) is not None:
            raise type(error)(error.message, param=error.param)

    def __del__(self) -> None:
        # Turns and their children refer to each other. Breaking the cycles frees an evicted session
        # at once, instead of at the next run of the garbage collector.
        for node in self.ledger.nodes:
            node.children.clear()


class SessionCache:
    """The most recently used sessions, up to `limit` bytes, and all sessions that requests hold."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self.evicted = 0
        self._recent: OrderedDict[str, CachedSession] = OrderedDict()
        self._held: WeakValueDictionary[str, CachedSession] = WeakValueDictionary()
        self._without_turns: WeakSet[CachedSession] = WeakSet()

    @property
    def without_turns(self) -> int:
        """Number of sessions with requests but no turn yet; they vanish with their requests."""
        return len(self._without_turns)

    def __len__(self) -> int:
        return len(self._recent)

    def find(self, name: str) -> CachedSession | None:
        """Return a session in memory, or None."""
        session = self._held.get(name)
        if session is not None:
            self.touch(session)
        return session

    def add(self, session: CachedSession) -> None:
        """Add a session that was loaded or begun."""
        self._held[session.name] = session
        if not session.entry.turns:
            self._without_turns.add(session)
        self.touch(session)

    def touch(self, session: CachedSession) -> None:
        """Make a session the most recent, count its growth, and evict others past the limit."""
        if self._held.get(session.name) is not session or not session.entry.turns:
            return
        self._without_turns.discard(session)
        if session.name in self._recent:
            self.nbytes -= session.counted_bytes
        ledger = session.ledger
        caches = ledger.id_json.nbytes + ledger.read_history.nbytes
        session.counted_bytes = session.nbytes + caches
        self.nbytes += session.counted_bytes
        self._recent[session.name] = session
        self._recent.move_to_end(session.name)
        while self.nbytes > self.limit and len(self._recent) > 1:
            _, oldest = self._recent.popitem(last=False)
            self.nbytes -= oldest.counted_bytes
            self.evicted += 1

    def drop(self, session: CachedSession, error: LockstepError) -> None:
        """End a session with an error for the requests that hold it, and free its name."""
        session.ended = error
        self._without_turns.discard(session)
        if self._held.get(session.name) is session:
            del self._held[session.name]
        if self._recent.get(session.name) is session:
            del self._recent[session.name]
            self.nbytes -= session.counted_bytes

    def release(self, name: str) -> bool:
        """Remove an idle session from memory; return False while a request holds it."""
        session = self._recent.pop(name, None)
        if session is not None:
            self.nbytes -= session.counted_bytes
            del session
        if (held := self._held.get(name)) is None:
            return True
        self.touch(held)
        return False
