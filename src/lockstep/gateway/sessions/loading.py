"""Sessions from the store into memory, and up to date where other gateways store turns too."""

from __future__ import annotations

import asyncio

from lockstep.gateway.sessions.cache import CachedSession, SessionCache
from lockstep.gateway.sessions.limits import SessionCounts
from lockstep.gateway.sessions.samples import reading_back
from lockstep.gateway.sessions.store.interface import SessionStore
from lockstep.gateway.sessions.writes import SessionWrites
from lockstep.ledger import Ledger
from lockstep.render import Renderer
from lockstep.tokens.errors import Conflict


class SessionLoader:
    """Puts stored sessions into the cache, each once however many requests wait for it."""

    def __init__(
        self, store: SessionStore, cache: SessionCache, writes: SessionWrites, counts: SessionCounts
    ) -> None:
        self._store, self._cache, self._writes, self._counts = store, cache, writes, counts
        self._loading: dict[str, asyncio.Task[CachedSession | None]] = {}

    async def load(self, name: str, renderer: Renderer) -> CachedSession | None:
        """The session from the store, now in the cache; None when it is not there."""
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
        # It was read before this request came, which may know of a later turn.
        return await self.refresh(cached, renderer)

    async def _read(self, name: str, renderer: Renderer) -> CachedSession | None:
        loaded = await self._store.load(name, None, 0)
        if loaded is None:
            return None
        with reading_back(name):
            ledger = await renderer.offload(
                Ledger.from_turns, loaded.stored.turns, loaded.stored.breaks, renderer
            )
        cached = CachedSession(loaded.entry, ledger)
        self._cache.add(cached)
        self._counts.loaded += 1
        return cached

    async def refresh(self, cached: CachedSession, renderer: Renderer) -> CachedSession | None:
        """The session with the turns that other gateways stored since; None when it is gone."""
        loaded = await self._store.load(cached.name, cached.entry, len(cached.ledger.nodes))
        if loaded is None and cached.entry.id is None:
            return cached
        try:
            self._writes.take_in(cached, loaded)
        except Conflict as error:
            self._cache.drop(cached, error)
            return await self.load(cached.name, renderer)
        self._cache.touch(cached)
        return cached
