"""The sessions in memory: the most recently used ones up to a limit of bytes, each only once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakSet, WeakValueDictionary

from lockstep.gateway.sessions.entry import SessionEntry
from lockstep.ledger import Ledger, PromptPlan
from lockstep.tokens import Completion
from lockstep.tokens.errors import LockstepError

PER_SESSION = 2000
"""What a session costs in memory beside its turns, measured; for the accounting only."""
PER_BREAK = 100


class WaitingTurn(NamedTuple):
    """The choices of a reply that are to be stored; `stored` is done when they are."""

    plan: PromptPlan
    choices: Sequence[tuple[Completion, Any]]
    stored: asyncio.Future[int]


class CachedSession:
    """A session in memory. A request that uses it holds a reference, which keeps it the only one
    of its name.

    `ended` is why it takes no more turns: it was deleted. `waiting` are turns that nobody writes
    yet, `writing` writes those before them.
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
        # Not a method of this object: the ledger must not keep it alive.
        ledger.on_break = self.unsaved_breaks.append

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def nbytes(self) -> int:
        ledger = self.ledger
        return ledger.nbytes + PER_SESSION + PER_BREAK * ledger.break_counts.total()

    def check_alive(self) -> None:
        """Raises why the session ended, if it did."""
        if (error := self.ended) is not None:
            raise type(error)(error.message, param=error.param)

    def __del__(self) -> None:
        # Turns refer to their parent and their children; without this they would stay in memory
        # until the garbage collector runs.
        for node in self.ledger.nodes:
            node.children.clear()


class SessionCache:
    """The most recently used sessions, up to `limit` bytes, and those that requests hold."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self.evicted = 0
        self._recent: OrderedDict[str, CachedSession] = OrderedDict()
        self._held: WeakValueDictionary[str, CachedSession] = WeakValueDictionary()
        self._without_turns: WeakSet[CachedSession] = WeakSet()

    @property
    def without_turns(self) -> int:
        """How many sessions have requests but no turn yet; they go when the requests go."""
        return len(self._without_turns)

    def __len__(self) -> int:
        return len(self._recent)

    def find(self, name: str) -> CachedSession | None:
        session = self._held.get(name)
        if session is not None:
            self.touch(session)
        return session

    def add(self, session: CachedSession) -> None:
        self._held[session.name] = session
        if not session.entry.turns:
            self._without_turns.add(session)
        self.touch(session)

    def touch(self, session: CachedSession) -> None:
        """Makes it the most recent, counts how it has grown, and evicts others past the limit."""
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
        """Ends it with that error for the requests that hold it, and frees its name."""
        session.ended = error
        self._without_turns.discard(session)
        if self._held.get(session.name) is session:
            del self._held[session.name]
        if self._recent.get(session.name) is session:
            del self._recent[session.name]
            self.nbytes -= session.counted_bytes

    def release(self, name: str) -> bool:
        """Removes an idle session from memory; False when a request holds it."""
        session = self._recent.pop(name, None)
        if session is not None:
            self.nbytes -= session.counted_bytes
            del session
        if (held := self._held.get(name)) is None:
            return True
        self.touch(held)
        return False
