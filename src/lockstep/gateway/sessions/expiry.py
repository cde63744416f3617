"""The end of sessions: deleted on request, or expired after a time without requests."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Iterator, Sequence
from itertools import islice

from lockstep.gateway.sessions import tables
from lockstep.gateway.sessions.cache import SessionCache
from lockstep.gateway.sessions.index import SessionEntry, SessionIndex
from lockstep.gateway.sessions.limits import SessionCounts
from lockstep.gateway.sessions.service_clock import ServiceClock
from lockstep.gateway.sessions.store import SessionStore
from lockstep.tokens.errors import Conflict, LockstepError

log = logging.getLogger(__name__)
TTL_SECONDS = 86400.0
SWEEP_SECONDS = 60.0
SWEPT_AT_ONCE = 200
"""Sessions deleted in one transaction at most: turns that are committed wait for it."""


class SessionExpiry:
    """Deletes sessions from the file, the index and the cache.

    A session expires when it was not used for `ttl_seconds` of the service clock and its samples
    were read since its last turn, or when `expire_unread` is set.
    """

    def __init__(
        self,
        store: SessionStore,
        index: SessionIndex,
        cache: SessionCache,
        counts: SessionCounts,
        *,
        ttl_seconds: float,
        expire_unread: bool,
        clock: ServiceClock,
    ) -> None:
        self._store, self._index, self._cache, self._counts = store, index, cache, counts
        self._ttl, self._expire_unread, self._clock = ttl_seconds, expire_unread, clock

    async def delete(self, name: str) -> None:
        """Deletes one session; a request in flight gets a Conflict. Raises NotFound."""
        await self._remove([self._index.require(name)], f"session {name!r} was deleted")
        self._counts.deleted += 1

    async def sweep(self) -> int:
        """Deletes the sessions that have expired; how many."""
        count = 0
        while expired := list(islice(self._expired(), SWEPT_AT_ONCE)):
            await self._remove(expired, "the session expired")
            self._counts.expired += len(expired)
            count += len(expired)
        return count

    async def sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(min(SWEEP_SECONDS, self._ttl))
            try:
                await self.sweep()
                await self.save_clock()
            except LockstepError as error:
                log.warning(
                    "expired sessions could not be deleted, the next try is in %g s: %s",
                    SWEEP_SECONDS, error.message,
                )  # fmt: skip

    async def save_clock(self) -> None:
        """Stores the service clock. Raises Unavailable when the file cannot be written."""
        await self._store.write(functools.partial(tables.save_clock, seconds=self._clock.now()))

    def _expired(self) -> Iterator[SessionEntry]:
        since = self._clock.now() - self._ttl
        for entry in self._index:
            if (
                entry.damaged
                or entry.active >= since
                or not (entry.was_read or self._expire_unread)
            ):
                continue
            if self._cache.release(entry.name):
                yield entry

    async def _remove(self, entries: Sequence[SessionEntry], reason: str) -> None:
        """The index forgets the sessions once the file has."""
        for entry in entries:
            if (session := self._cache.find(entry.name)) is not None:
                self._cache.drop(session, Conflict(reason, param="x-session-id"))
        self._index.begin_deleting(entries)
        ids = [entry.id for entry in entries]
        removed = self._store.write(functools.partial(tables.remove, ids=ids))
        removed.add_done_callback(
            lambda future: self._index.end_deleting(entries, deleted=future.exception() is None)
        )
        # Shielded: a caller that goes away must not leave the sessions half deleted.
        await asyncio.shield(removed)
