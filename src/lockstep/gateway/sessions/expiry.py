"""The end of sessions: deleted on request, or expired after a time without requests."""

from __future__ import annotations

import asyncio
import logging

from lockstep.gateway.sessions.cache import SessionCache
from lockstep.gateway.sessions.entry import SessionEntry
from lockstep.gateway.sessions.limits import SessionCounts
from lockstep.gateway.sessions.service_clock import ServiceClock
from lockstep.gateway.sessions.store.interface import SessionStore
from lockstep.tokens.errors import Conflict, LockstepError

log = logging.getLogger(__name__)
TTL_SECONDS = 86400.0
SWEEP_SECONDS = 60.0
CLOCK_SECONDS = 10.0
"""How often gateways of one store agree on the service clock and read the totals."""
SWEPT_AT_ONCE = 200
"""Sessions deleted in one transaction at most: turns that are committed wait for it."""


class SessionExpiry:
    """Deletes sessions from the store and the cache.

    A session expires when it was not used for `ttl_seconds` of the service clock and its samples
    were read since its last turn, or when `expire_unread` is set.
    """

    def __init__(
        self,
        store: SessionStore,
        cache: SessionCache,
        counts: SessionCounts,
        *,
        ttl_seconds: float,
        expire_unread: bool,
        clock: ServiceClock,
    ) -> None:
        self._store, self._cache, self._counts = store, cache, counts
        self._ttl, self._expire_unread, self._clock = ttl_seconds, expire_unread, clock

    async def delete(self, entry: SessionEntry) -> None:
        """Deletes one session; a request in flight gets a Conflict."""
        if (session := self._cache.find(entry.name)) is not None:
            reason = f"session {entry.name!r} was deleted"
            self._cache.drop(session, Conflict(reason, param="x-session-id"))
        await self._store.remove([entry])
        self._counts.deleted += 1

    async def sweep(self) -> int:
        """Deletes the sessions that have expired; how many."""
        count = 0
        since = self._clock.now() - self._ttl
        while expired := await self._store.expire(
            since, self._expire_unread, self._cache.release, SWEPT_AT_ONCE
        ):
            self._counts.expired += len(expired)
            count += len(expired)
        return count

    async def sweep_for_ever(self) -> None:
        swept = self._clock.now()
        while True:
            await asyncio.sleep(min(CLOCK_SECONDS, self._ttl))
            try:
                await self.save_clock()
                if self._clock.now() - swept >= min(SWEEP_SECONDS, self._ttl):
                    swept = self._clock.now()
                    await self.sweep()
                # Last, so that a count that takes too long keeps no session from its end.
                await self._store.refresh_totals()
            except LockstepError as error:
                log.warning(
                    "expired sessions could not be deleted, the next try is in %g s: %s",
                    CLOCK_SECONDS, error.message,
                )  # fmt: skip

    async def save_clock(self) -> None:
        """Stores the service clock, and goes on from a later one that it had there."""
        now = self._clock.now()
        stored = await self._store.save_clock(now)
        if stored > now:
            self._clock.restore(stored)
