"""What sessions ask of the place where they are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lockstep.gateway.sessions.entry import SessionEntry
from lockstep.gateway.sessions.terms import SessionTerms
from lockstep.tokens.errors import NotFound


class Totals(NamedTuple):
    """How many sessions are kept, and the bytes that they hold together."""

    sessions: int
    bytes: int


class StoredSession(NamedTuple):
    """The turns of a session in order, and its prefix breaks as (key, cause)."""

    turns: Sequence[bytes]
    breaks: Sequence[tuple[bytes, str]]


class LoadedSession(NamedTuple):
    """A session as it is kept now, with the turns from `start` on, and breaks that may be new."""

    entry: SessionEntry
    start: int
    stored: StoredSession


@dataclass(frozen=True, slots=True)
class NewTurns:
    """What is to be appended to a session that has `head` turns.

    `encode` gives the bytes of each of the `count` turns, and raises when the session has ended
    meanwhile. `nbytes` is what the session holds with them, `tokens` what was sampled in them.
    """

    head: int
    count: int
    encode: Callable[[], list[bytes]]
    nbytes: int
    tokens: int
    breaks: Sequence[tuple[bytes, str]]


class SessionStore(Protocol):
    """Keeps sessions. Every method that waits raises Unavailable when the store cannot do it."""

    shared: bool
    """Whether other gateways may change the same sessions at any time."""
    secret: bytes
    """A secret that all gateways of this store share; there after `start`."""

    async def start(self) -> float:
        """Opens the store; the service clock. Raises BadRequest when it cannot be used."""
        ...

    async def stop(self) -> None:
        """Closes it, after what is being written."""
        ...

    def totals(self) -> Totals:
        """Of all sessions; a shared store may count a few seconds late."""
        ...

    def new_entry(
        self,
        name: str,
        tokenizer: bytes,
        now: float,
        active: float,
        terms: SessionTerms | None = None,
    ) -> SessionEntry:
        """The entry of a session that is not kept yet: `create` or `append` keep it."""
        ...

    async def find(self, name: str) -> SessionEntry | None:
        """What is known of a session without its turns."""
        ...

    async def find_key(self, digest: bytes) -> SessionEntry | None:
        """The session that the key with this digest was minted for. A session that was deleted
        elsewhere may be found for a few seconds more."""
        ...

    async def load(self, name: str, known: SessionEntry | None, turns: int) -> LoadedSession | None:
        """The session with all its turns; only those behind the first `turns` if it is still the
        `known` one. Raises Conflict while it is being deleted, Unavailable when it is damaged."""
        ...

    async def append(self, entry: SessionEntry, new: NewTurns) -> bool:
        """Keeps turns, all or none, and brings the entry up to date. False, and nothing kept, when
        the session has other turns than `head` by now, or cannot take these: `load` tells."""
        ...

    async def add_breaks(self, entry: SessionEntry, breaks: Sequence[tuple[bytes, str]]) -> None:
        """Keeps prefix breaks of a session that has turns."""
        ...

    async def create(self, entry: SessionEntry) -> bool:
        """Keeps a session without turns; False when there is one of that name."""
        ...

    async def count_call(self, entry: SessionEntry) -> None:
        """Counts a call against the session's budget. Raises Forbidden when that is used up."""
        ...

    async def change_terms(
        self, entry: SessionEntry, change: Callable[[SessionTerms], SessionTerms]
    ) -> None:
        """Changes the terms of a session, in the store and in the entry; nobody else does at the
        same time. Raises NotFound, and what `change` raises."""
        ...

    async def mark_read(self, entry: SessionEntry, turns: int) -> None:
        """Keeps that the samples of that many turns were read."""
        ...

    async def page(self, after: str, limit: int) -> list[SessionEntry]:
        """The first sessions whose names come after `after`."""
        ...

    async def latest(
        self, wanted: Callable[[str], bool], limit: int, offset: int
    ) -> tuple[list[str], int]:
        """Names of sessions that are wanted, the last used first, and how many there are."""
        ...

    async def remove(self, entries: Iterable[SessionEntry]) -> None:
        """Deletes sessions with their turns."""
        ...

    async def expire(
        self, since: float, unread: bool, idle: Callable[[str], bool], limit: int
    ) -> list[str]:
        """Deletes at most `limit` sessions that were not active since then and, but for `unread`,
        were read; only those of whom `idle` says that no request here uses them. Their names."""
        ...

    async def save_clock(self, seconds: float) -> float:
        """Keeps the service clock; what it is now, which may be later."""
        ...

    async def refresh_totals(self) -> None:
        """Learns what other gateways of a shared store added to `totals`, and what is gone."""
        ...


async def require_session(store: SessionStore, name: str) -> SessionEntry:
    """The session of that name. Raises NotFound."""
    entry = await store.find(name)
    if entry is None:
        raise NotFound(
            f"there is no session {name!r}: it was never begun, was deleted, or has expired",
            param="session_id",
        )
    return entry
