"""The sessions of an SQLite file, all in memory without their turns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lockstep.gateway.sessions.entry import SessionEntry
from lockstep.gateway.sessions.terms import SessionTerms


class SessionIndex:
    """The stored sessions by name, and the bytes they hold together.

    A session that is being deleted keeps its entry until the file has forgotten it, so that a
    failed deletion leaves it as it was; meanwhile it is not found.
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

    def restore(self, entries: Iterable[SessionEntry]) -> None:
        """Takes in the sessions that a file holds. Damaged ones keep their names, so that nobody
        begins another session where they can still be deleted or mended."""
        for entry in entries:
            self.nbytes += entry.bytes
            self._entries[entry.name] = entry
            self._next_id = max(self._next_id, (entry.id or 0) + 1)
            self._add_key(entry)

    def _add_key(self, entry: SessionEntry) -> None:
        if entry.terms is not None and entry.terms.digest is not None:
            self._by_key[entry.terms.digest] = entry

    def get(self, name: str) -> SessionEntry | None:
        """The session of that name, unless it is being deleted."""
        return None if name in self._deleting else self._entries.get(name)

    def of_key(self, digest: bytes) -> SessionEntry | None:
        """The session that the key with this digest was minted for."""
        entry = self._by_key.get(digest)
        return None if entry is None or entry.name in self._deleting else entry

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
        entry = SessionEntry(self._next_id, name, tokenizer, now, now, active, terms=terms)
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
