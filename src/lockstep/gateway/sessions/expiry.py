"""Deletion of sessions: on request, or after a time without requests."""

from __future__ import annotations

import asyncio
import logging

from lockstep.gateway.sessions.cache import ServiceClock, SessionCache
from lockstep.gateway.sessions.limits import SessionCounts
from lockstep.storage.protocols import SessionStore
from lockstep.storage.session_entry import SessionEntry
from lockstep.tokens.errors import Conflict, LockstepError

log = logging.getLogger(__name__)
SWEEP_SECONDS = 60.0
CLOCK_SECONDS = 10.0
"""How often gateways of one store agree on the service clock and read the totals."""
SWEEP_BATCH = 200
"""Most sessions deleted in one transaction: commits of turns wait for it."""


class SessionExpiry:
    """Deletes sessions from the store and the cache.

    A session expires after `ttl_seconds` of the service clock without a request, if its samples
    were read since its last turn or `expire_unread` is set.
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
        """Delete one session; requests that are using it get a Conflict."""
        if (session := self._cache.find(entry.name)) is not None:
            reason = f"session {entry.name!r} was deleted"
            self._cache.drop(session, Conflict(reason, param="x-session-id"))
        await self._store.remove([entry])
        self._counts.deleted += 1

    async def sweep(self) -> int:
        """Delete the sessions that have expired; return their number."""
        count = 0
        since = self._clock.now() - self._ttl
        while expired := await self._store.expire(
            since, self._expire_unread, self._cache.release, SWEEP_BATCH
        ):
            self._counts.expired += len(expired)
            count += len(expired)
        return count

    async def sweep_for_ever(self) -> None:
        """Sweep every minute, and save the clock and read the totals every 10 s."""
        swept = self._clock.now()
        while True:
            await asyncio.sleep(min(CLOCK_SECONDS, self._ttl))
            try:
                await self.save_clock()
                if self._clock.now() - swept >= min(SWEEP_SECONDS, self._ttl):
                    swept = self._clock.now()
                    await self.sweep()
                # Last: a count that times out must not keep sessions from expiring.
                await self._store.refresh_totals()
            except LockstepError as error:
                log.warning(
                    "expired sessions could not be deleted, the next try is in %g s: %s",
                    CLOCK_SECONDS, error.message,
                )  # fmt: skip

    async def save_clock(self) -> None:
        """Store the service clock; continue from the stored one if another gateway's is later."""
        now = self._clock.now()
        stored = await self._store.save_clock(now)
        if stored > now:
            self._clock.restore(stored)
