"""Keys that are minted for one session each, and the end of a session with a reward."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable

import msgspec

from lockstep.gateway.sessions.cache import SessionCache
from lockstep.gateway.sessions.entry import SessionEntry
from lockstep.gateway.sessions.service_clock import ServiceClock
from lockstep.gateway.sessions.store.interface import SessionStore, require_session
from lockstep.gateway.sessions.terms import SessionTerms
from lockstep.http.auth import key_digest
from lockstep.tokens.errors import Conflict

PREFIX = "ls-"
"""Begins every key of a session, so that one that has ended is never taken for no key at all."""
LOOK_SECONDS = 1.0
"""How often whoever waits for an end looks by themselves."""


class SessionKeys:
    """Mints keys for sessions, finds sessions by their keys, and ends sessions."""

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
        """The session whose key has this digest, by name, and its terms; None once it has ended."""
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
        """Begins a session; its key and the key's short id. Only the digest of the key is kept.

        Raises Conflict when there is such a session, Busy when there may not be one more.
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
        entry = self._store.new_entry(name, b"", self._clock(), now, terms)
        # A session that has requests but no turn yet is in the cache only.
        if self._cache.find(name) is not None or not await self._store.create(entry):
            raise Conflict(f"there is a session {name!r} already: choose another id", param="id")
        return key, key_id

    async def finish(self, name: str, reward: float | None) -> None:
        """Ends a session: it takes no more turns, and has that reward.

        To finish it again with the same reward changes nothing. Raises NotFound, and Conflict for
        another reward.
        """

        def finished(terms: SessionTerms) -> SessionTerms:
            if terms.finished and terms.reward != reward:
                raise Conflict(
                    f"session {name!r} is finished with reward {terms.reward}, not {reward}",
                    param="reward",
                )
            noted = terms if terms.end(*self._times()) else terms.ended("finish", self._clock())
            return msgspec.structs.replace(noted, finished=True, reward=reward)

        await self._change(await self._whole(name), finished)

    async def leave(self, name: str) -> None:
        """Ends a session on the word of its own key: it takes no more turns. A reward is not the
        harness's to give: the trainer may still finish it with one. Raises NotFound."""

        def left(terms: SessionTerms) -> SessionTerms:
            if terms.end(*self._times()) is not None:
                return terms
            return terms.ended("harness", self._clock())

        await self._change(await self._whole(name), left)

    async def wait(self, name: str, seconds: float) -> None:
        """Returns when the session has ended or is gone, or after so long."""
        loop = asyncio.get_running_loop()
        until, woken = loop.time() + seconds, asyncio.Event()
        self._waiting.setdefault(name, set()).add(woken)
        try:
            while (left := until - loop.time()) > 0:
                entry = await self._store.find(name)
                terms = None if entry is None else entry.terms
                if entry is None or (terms is not None and terms.end(*self._times()) is not None):
                    return
                # Looked at now and then: `seconds` run out without anybody doing anything, and
                # another gateway may end it.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), min(left, LOOK_SECONDS))
                woken.clear()
        finally:
            self._waiting[name].discard(woken)
            if not self._waiting[name]:
                del self._waiting[name]

    async def note_used_up(self, entry: SessionEntry) -> None:
        """Notes that the budget is used, if it is."""
        terms = entry.terms
        if terms is None or terms.ended_by is not None or (by := terms.used_up()) is None:
            return
        await self._change(entry, lambda terms: terms.ended(by, self._clock()))

    async def _whole(self, name: str) -> SessionEntry:
        entry = await require_session(self._store, name)
        entry.check_whole()
        return entry

    def _times(self) -> tuple[float, float]:
        return self._service_clock.now(), self._clock()

    async def _change(
        self, entry: SessionEntry, change: Callable[[SessionTerms], SessionTerms]
    ) -> None:
        await self._store.change_terms(entry, change)
        for woken in self._waiting.get(entry.name, ()):
            woken.set()
