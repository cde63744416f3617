"""What is known of every session without reading its turns: size, times, what was read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lockstep.gateway.sessions.tables import SessionRow, damaged_row
from lockstep.gateway.sessions.terms import SessionEnd, SessionTerms
from lockstep.tokens.errors import NotFound, Unavailable


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session at a glance. Times are seconds since 1970.

    `unread_turns` counts those that came after its samples were last read. `finished` and `reward`
    are how it was finished, if it was; `ended` says that it takes no more turns, and why.
    """

    id: str
    turns: int
    bytes: int
    created: float
    used: float
    unread_turns: int
    finished: bool = False
    reward: float | None = None
    ended: SessionEnd | None = None

    @classmethod
    def of(cls, row: SessionRow, now: float, time: float) -> SessionInfo:
        """What a row says, when `now` on the service clock is the `time` of day."""
        unread = max(0, row.turns - row.read_turns)
        terms = SessionTerms.decode(row.terms) or SessionTerms()
        return cls(
            row.name, row.turns, row.bytes, row.created, row.used, unread, terms.finished,
            terms.reward, terms.end(now, time),
        )  # fmt: skip


class SessionEntry:
    """A session in the index; unlike its row in the file it changes with every turn."""

    __slots__ = (
        "active",
        "bytes",
        "created",
        "damaged",
        "id",
        "name",
        "read_turns",
        "terms",
        "tokenizer",
        "turns",
        "used",
    )  # fmt: skip

    def __init__(self, row: SessionRow, *, damaged: bool = False) -> None:
        self.id, self.name, self.tokenizer = row.id, row.name, row.tokenizer
        self.created, self.used, self.active = row.created, row.used, row.active
        self.turns, self.bytes, self.read_turns = row.turns, row.bytes, row.read_turns
        self.damaged = damaged
        self.terms = SessionTerms.decode(row.terms)

    @property
    def was_read(self) -> bool:
        """Whether the samples of all its turns were read."""
        return self.read_turns >= self.turns

    def row(self) -> SessionRow:
        return SessionRow(
            self.id, self.name, self.tokenizer, self.created, self.used, self.turns, self.bytes,
            self.read_turns, self.active, None if self.terms is None else self.terms.encode(),
        )  # fmt: skip

    def check_whole(self) -> None:
        """Raises Unavailable when its row in the file is damaged."""
        if self.damaged:
            raise Unavailable(
                f"the stored row of session {self.name!r} is damaged: delete the session"
            )


class SessionIndex:
    """The stored sessions by name, and the bytes they hold together.

    A session that is being deleted keeps its entry until the file has forgotten it, so that a
    failed deletion leaves it as it was; meanwhile `require` does not find it.
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
        """The sessions that are not being deleted."""
        return (one for one in self._entries.values() if one.name not in self._deleting)

    def restore(self, rows: Iterable[SessionRow], damaged: Iterable[tuple[int, str]] = ()) -> None:
        """Takes in the sessions that a file holds. Damaged ones keep their names, so that nobody
        begins another session where they can still be deleted or mended."""
        for row in rows:
            self.nbytes += row.bytes
            self._restored(SessionEntry(row))
        for number, name in damaged:
            self._restored(SessionEntry(damaged_row(number, name), damaged=True))

    def _restored(self, entry: SessionEntry) -> None:
        self._entries[entry.name] = entry
        self._next_id = max(self._next_id, entry.id + 1)
        self._add_key(entry)

    def _add_key(self, entry: SessionEntry) -> None:
        if entry.terms is not None and entry.terms.digest is not None:
            self._by_key[entry.terms.digest] = entry

    def get(self, name: str) -> SessionEntry | None:
        return self._entries.get(name)

    def of_key(self, digest: bytes) -> SessionEntry | None:
        """The session that the key with this digest was minted for."""
        entry = self._by_key.get(digest)
        return None if entry is None or entry.name in self._deleting else entry

    def require(self, name: str) -> SessionEntry:
        """The entry of that name. Raises NotFound."""
        entry = self._entries.get(name)
        if entry is None or name in self._deleting:
            raise NotFound(
                f"there is no session {name!r}: it was never begun, was deleted, or has expired",
                param="session_id",
            )
        return entry

    def is_deleting(self, name: str) -> bool:
        return name in self._deleting

    def new_entry(
        self,
        name: str,
        tokenizer: bytes,
        now: float,
        active: float,
        terms: SessionTerms | None = None,
    ) -> SessionEntry:
        """An entry for a session without turns; it is in the index after `grow`."""
        row = SessionRow(self._next_id, name, tokenizer, now, now, 0, 0, 0, active, None)
        entry = SessionEntry(row)
        entry.terms = terms
        self._next_id += 1
        return entry

    def grow(self, entry: SessionEntry, turns: int, nbytes: int) -> None:
        """Counts what is about to be written."""
        self._entries[entry.name] = entry
        self._add_key(entry)
        entry.turns += turns
        entry.bytes += nbytes
        self.nbytes += nbytes

    def shrink(self, entry: SessionEntry, turns: int, nbytes: int) -> None:
        """Takes back what could not be written."""
        if self._entries.get(entry.name) is not entry:
            return
        entry.turns -= turns
        entry.bytes -= nbytes
        self.nbytes -= nbytes
        if not entry.turns and entry.terms is None:
            del self._entries[entry.name]

    def begin_deleting(self, entries: Iterable[SessionEntry]) -> None:
        self._deleting.update(entry.name for entry in entries)

    def end_deleting(self, entries: Iterable[SessionEntry], *, deleted: bool) -> None:
        for entry in entries:
            self._deleting.discard(entry.name)
            if deleted:
                self.nbytes -= entry.bytes
                del self._entries[entry.name]
                if entry.terms is not None and entry.terms.digest is not None:
                    self._by_key.pop(entry.terms.digest, None)
