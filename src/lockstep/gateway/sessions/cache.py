"""The sessions in memory: the busy ones, bounded by bytes, and never two of one name."""

from __future__ import annotations

from collections import OrderedDict
from weakref import WeakSet, WeakValueDictionary

from lockstep.gateway.sessions.store import TurnRow
from lockstep.ledger import Ledger
from lockstep.tokens.errors import LockstepError

PER_SESSION = 2000
"""What a session costs in memory beside its turns, measured; for the accounting only."""
PER_BREAK = 100


class CacheEntry:
    """What is known of a session, in memory or not."""

    __slots__ = ("bytes", "created", "id", "read_turns", "tokenizer", "turns", "used")

    def __init__(self, row: TurnRow) -> None:
        self.id, self.tokenizer = row.id, row.tokenizer
        self.created, self.used = row.created, row.used
        self.turns, self.bytes, self.read_turns = row.turns, row.bytes, row.read_turns

    @property
    def was_read(self) -> bool:
        """Whether somebody has the samples of all its turns."""
        return self.read_turns >= self.turns

    def row(self, name: str) -> TurnRow:
        return TurnRow(
            self.id, name, self.tokenizer, self.created, self.used, self.turns, self.bytes,
            self.read_turns,
        )  # fmt: skip


class CachedSession:
    """A session in memory. Whoever uses it holds it, and so keeps it the only one of its name.

    `ended` says why it takes no more turns: it was deleted, or a write of it failed.
    """

    __slots__ = ("__weakref__", "counted", "ended", "entry", "ledger", "name", "unsaved")

    def __init__(self, name: str, entry: CacheEntry, ledger: Ledger) -> None:
        self.name, self.entry, self.ledger = name, entry, ledger
        self.counted = 0
        self.ended: LockstepError | None = None
        self.unsaved: list[tuple[bytes, str]] = []
        # Not a method of this object: the ledger must not keep it alive.
        ledger.on_break = self.unsaved.append

    @property
    def nbytes(self) -> int:
        ledger = self.ledger
        return ledger.nbytes + PER_SESSION + PER_BREAK * ledger.break_counts.total()

    def check_alive(self) -> None:
        """Raises why the session ended, if it did."""
        if (why := self.ended) is not None:
            raise type(why)(why.message, param=why.param)

    def __del__(self) -> None:
        # Turns know their parent and their children; without this they would stay in memory
        # until the collector comes round.
        for node in self.ledger.nodes:
            node.children.clear()


class SessionCache:
    """The most recently used sessions, up to `limit` bytes, and those somebody holds."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self.evicted = 0
        self._recent: OrderedDict[str, CachedSession] = OrderedDict()
        self._held: WeakValueDictionary[str, CachedSession] = WeakValueDictionary()
        self._begun: WeakSet[CachedSession] = WeakSet()

    @property
    def begun(self) -> int:
        """How many sessions have requests but no turn yet; they go when the requests go."""
        return len(self._begun)

    def __len__(self) -> int:
        return len(self._recent)

    def find(self, name: str) -> CachedSession | None:
        hot = self._held.get(name)
        if hot is not None:
            self.touch(hot)
        return hot

    def add(self, hot: CachedSession) -> None:
        self._held[hot.name] = hot
        if not hot.entry.turns:
            self._begun.add(hot)
        self.touch(hot)

    def touch(self, hot: CachedSession) -> None:
        """Makes it the most recent, counts what it has grown, and lets others go for it."""
        if self._held.get(hot.name) is not hot or not hot.entry.turns:
            return
        self._begun.discard(hot)
        if hot.name in self._recent:
            self.nbytes -= hot.counted
        hot.counted = hot.nbytes + hot.ledger.written.nbytes
        self.nbytes += hot.counted
        self._recent[hot.name] = hot
        self._recent.move_to_end(hot.name)
        while self.nbytes > self.limit and len(self._recent) > 1:
            _, oldest = self._recent.popitem(last=False)
            self.nbytes -= oldest.counted
            self.evicted += 1

    def drop(self, hot: CachedSession, why: LockstepError) -> None:
        """Ends it for whoever still holds it, and frees its name."""
        hot.ended = why
        self._begun.discard(hot)
        if self._held.get(hot.name) is hot:
            del self._held[hot.name]
        if self._recent.get(hot.name) is hot:
            del self._recent[hot.name]
            self.nbytes -= hot.counted

    def release(self, name: str) -> bool:
        """Lets an idle session go; False when somebody holds it."""
        hot = self._recent.pop(name, None)
        if hot is not None:
            self.nbytes -= hot.counted
            del hot
        if (held := self._held.get(name)) is None:
            return True
        self.touch(held)
        return False
