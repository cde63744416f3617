"""Loads sessions from the store into the cache, and adds turns that other gateways stored."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.gateway.sessions.cache import CachedSession, SessionCache
from lockstep.gateway.sessions.limits import SessionCounts
from lockstep.http.off_loop import off_loop
from lockstep.ledger import Ledger
from lockstep.render import Renderer
from lockstep.storage.protocols import LoadedSession, SessionStore
from lockstep.storage.session_entry import SessionEntry
from lockstep.tokens.errors import Conflict, LockstepError, NotFound, Unavailable


class SessionLoader:
    """Puts stored sessions into the cache, each once however many requests wait for it."""

    def __init__(self, store: SessionStore, cache: SessionCache, counts: SessionCounts) -> None:
        self._store, self._cache, self._counts = store, cache, counts
        self._loading: dict[str, asyncio.Task[CachedSession | None]] = {}

    async def load(self, name: str, renderer: Renderer) -> CachedSession | None:
        """Load a session into the cache and return it; None if it is not stored."""
        task = self._loading.get(name)
        if task is None:
            # One task for all requests that wait: a session must not be in memory twice.
            task = asyncio.create_task(self._read(name, renderer))
            self._loading[name] = task
            task.add_done_callback(lambda _: self._loading.pop(name))
            return await asyncio.shield(task)
        cached = await asyncio.shield(task)
        if cached is None or not self._store.shared:
            return cached
        # The read may have begun before a turn that this request's client has already seen.
        return await self.refresh(cached, renderer)

    async def _read(self, name: str, renderer: Renderer) -> CachedSession | None:
        loaded = await self._store.load(name)
        if loaded is None:
            return None
        with reading_back(name):
            ledger = await off_loop(
                True, Ledger.from_turns, loaded.stored.turns, loaded.stored.breaks, renderer
            )
        cached = CachedSession(loaded.entry, ledger)
        self._cache.add(cached)
        self._counts.loaded += 1
        return cached

    async def refresh(self, cached: CachedSession, renderer: Renderer) -> CachedSession | None:
        """Add the turns that other gateways stored; return the session, None if it is deleted."""
        loaded = await self._store.load(cached.name, cached.entry, len(cached.ledger.nodes))
        if loaded is None and cached.entry.id is None:
            return cached
        try:
            merge_stored(cached, loaded)
        except Conflict as error:
            self._cache.drop(cached, error)
            return await self.load(cached.name, renderer)
        self._cache.touch(cached)
        return cached


def merge_stored(cached: CachedSession, loaded: LoadedSession | None) -> None:
    """Add turns of other gateways to a cached session.

    Raises Conflict when the session was deleted, or replaced by another one of its name, and
    Unavailable for turns that cannot be decoded.
    """
    entry = cached.entry
    if loaded is None:
        raise Conflict(f"session {entry.name!r} was deleted", param="x-session-id")
    _check_same(entry, loaded.entry)
    with reading_back(entry.name):
        cached.ledger.extend(loaded.stored.turns, loaded.start, loaded.stored.breaks)
    entry.update(loaded.entry)


def _check_same(entry: SessionEntry, stored: SessionEntry) -> None:
    """Raise Conflict when a name belongs to another session than before."""
    name = entry.name
    if entry.id is not None and stored.id != entry.id:
        problem = f"session {name!r} was deleted"
    elif entry.id is None and stored.terms is not None:
        problem = f"session {name!r} was begun with a key of its own meanwhile: use another id"
    elif stored.turns and entry.tokenizer != stored.tokenizer:
        problem = (
            f"session {name!r} was recorded with another tokenizer: delete it, or use another id"
        )
    else:
        return
    raise Conflict(problem, param="x-session-id")


async def find_session(store: SessionStore, name: str) -> SessionEntry:
    """Return the row of a session. Raises NotFound."""
    entry = await store.find(name)
    if entry is None:
        raise NotFound(
            f"there is no session {name!r}: it was never begun, was deleted, or has expired",
            param="session_id",
        )
    return entry


@contextmanager
def reading_back(name: str) -> Iterator[None]:
    """Raise Unavailable instead of errors in stored turns, which are not the caller's fault."""
    try:
        yield
    except LockstepError as error:
        raise Unavailable(f"session {name!r} cannot be read back: {error.message}") from error
