"""Keys that are minted for one session each, and the end of sessions with a reward."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable

import msgspec

from lockstep.gateway.sessions.cache import ServiceClock, SessionCache
from lockstep.gateway.sessions.loading import find_session
from lockstep.http.auth import key_digest
from lockstep.storage.protocols import SessionStore
from lockstep.storage.session_entry import SessionEntry, SessionTerms
from lockstep.tokens.errors import Conflict

PREFIX = "ls-"
"""Prefix of session keys, so that an expired one is recognised and rejected."""
POLL_SECONDS = 1.0
"""Seconds between looks at a session whose end is awaited."""


class SessionKeys:
    """Mints keys for sessions, finds sessions by key, and ends sessions."""

    def __init__(
        self,
        store: SessionStore,
        cache: SessionCache,
        *,
        clock: Callable[[], float],
        service_clock: ServiceClock,
        check_room: Callable[[], None],
    ) -> None:
        self._store, self._cache = store, cache
        self._clock, self._service_clock, self._check_room = clock, service_clock, check_room
        self._waiting: dict[str, set[asyncio.Event]] = {}

    async def find(self, digest: bytes) -> tuple[str, SessionTerms] | None:
        """Return name and terms of the session whose key has this digest; None once it expired."""
        entry = await self._store.find_key(digest)
        if entry is None or entry.terms is None:
            return None
        ends = entry.terms.ends
        if ends is not None and self._service_clock.now() >= ends:
            return None
        return entry.name, entry.terms

    async def mint(
        self,
        name: str,
        *,
        seconds: float | None = None,
        max_calls: int | None = None,
        max_tokens: int | None = None,
        cache_salt: str | None = None,
    ) -> tuple[str, str]:
        """Create a session with a key; return the key and its short id.

        Only the digest of the key is stored. Raises Conflict when the name is taken, Busy at the
        limit of sessions.
        """
        self._check_room()
        key, key_id = PREFIX + secrets.token_urlsafe(32), f"session-{secrets.token_hex(4)}"
        now = self._service_clock.now()
        terms = SessionTerms(
            key_id,
            key_digest(key.encode()),
            cache_salt,
            ends=None if seconds is None else now + seconds,
            max_calls=max_calls,
            max_tokens=max_tokens,
        )
        time = self._clock()
        entry = SessionEntry(None, name, b"", time, time, now, terms=terms)
        # A session that has requests but no turn yet is only in the cache.
        if self._cache.find(name) is not None or not await self._store.create(entry):
            raise Conflict(f"there is a session {name!r} already: choose another id", param="id")
        return key, key_id

    async def finish(self, name: str, reward: float | None) -> None:
        """End a session with a reward: it takes no more turns.

        Finishing it again with the same reward changes nothing. Raises NotFound, and Conflict for
        another reward.
        """

        def finish(terms: SessionTerms) -> SessionTerms:
            if terms.finished and terms.reward != reward:
                raise Conflict(
                    f"session {name!r} is finished with reward {terms.reward}, not {reward}",
                    param="reward",
                )
            if terms.end(*self._times()) is None:
                terms = terms.with_end("finish", self._clock())
            return msgspec.structs.replace(terms, finished=True, reward=reward)

        await self._change(await self._find_readable(name), finish)

    async def leave(self, name: str) -> None:
        """End a session on request of its own key: it takes no more turns.

        The harness gives no reward; the trainer may still finish the session with one. Raises
        NotFound.
        """

        def leave(terms: SessionTerms) -> SessionTerms:
            if terms.end(*self._times()) is not None:
                return terms
            return terms.with_end("harness", self._clock())

        await self._change(await self._find_readable(name), leave)

    async def wait(self, name: str, seconds: float) -> None:
        """Wait up to `seconds` for the end or the deletion of a session."""
        loop = asyncio.get_running_loop()
        until, woken = loop.time() + seconds, asyncio.Event()
        self._waiting.setdefault(name, set()).add(woken)
        try:
            while (left := until - loop.time()) > 0:
                entry = await self._store.find(name)
                terms = None if entry is None else entry.terms
                if entry is None or (terms is not None and terms.end(*self._times()) is not None):
                    return
                # Polled as well: a key expires without an event, and another gateway may end it.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), min(left, POLL_SECONDS))
                woken.clear()
        finally:
            self._waiting[name].discard(woken)
            if not self._waiting[name]:
                del self._waiting[name]

    async def end_if_exhausted(self, entry: SessionEntry) -> None:
        """Store the end of a session whose budget is used up."""
        terms = entry.terms
        if terms is None or terms.ended_by is not None or (by := terms.exhausted()) is None:
            return
        await self._change(entry, lambda terms: terms.with_end(by, self._clock()))

    async def _find_readable(self, name: str) -> SessionEntry:
        entry = await find_session(self._store, name)
        entry.check_readable()
        return entry

    def _times(self) -> tuple[float, float]:
        return self._service_clock.now(), self._clock()

    async def _change(
        self, entry: SessionEntry, change: Callable[[SessionTerms], SessionTerms]
    ) -> None:
        await self._store.change_terms(entry, change)
        for woken in self._waiting.get(entry.name, ()):
            woken.set()
