"""The rows of all sessions of an SQLite file, in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lockstep.storage.session_entry import SessionEntry


class SessionIndex:
    """Stored sessions by name and by key digest, and the bytes they hold together.

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
