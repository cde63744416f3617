"""Keys that are minted for one session each, and the end of a session with a reward."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
from collections.abc import Callable

import msgspec

from lockstep.gateway.sessions import tables
from lockstep.gateway.sessions.cache import SessionCache
from lockstep.gateway.sessions.index import SessionEntry, SessionIndex
from lockstep.gateway.sessions.service_clock import ServiceClock
from lockstep.gateway.sessions.store import SessionStore
from lockstep.gateway.sessions.terms import SessionTerms
from lockstep.http.auth import key_digest
from lockstep.tokens.errors import Conflict, LockstepError

PREFIX = "ls-"
"""Begins every key of a session, so that one that has ended is never taken for no key at all."""
LOOK_SECONDS = 1.0
"""How often whoever waits for an end looks by themselves."""


class SessionKeys:
    """Mints keys for sessions, finds sessions by their keys, and finishes sessions."""

    def __init__(
        self,
        store: SessionStore,
        index: SessionIndex,
        cache: SessionCache,
        *,
        clock: Callable[[], float],
        service_clock: ServiceClock,
        check_room: Callable[[], None],
    ) -> None:
        self._store, self._index, self._cache = store, index, cache
        self._clock, self._service_clock, self._check_room = clock, service_clock, check_room
        self._waiting: dict[str, set[asyncio.Event]] = {}

    def find(self, digest: bytes) -> tuple[str, SessionTerms] | None:
        """The session whose key has this digest, by name, and its terms; None once it has ended."""
        entry = self._index.of_key(digest)
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
        if self._index.get(name) is not None or self._cache.find(name) is not None:
            raise Conflict(f"there is a session {name!r} already: choose another id", param="id")
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
        entry = self._index.new_entry(name, b"", self._clock(), now, terms)
        self._index.grow(entry, 0, 0)
        try:
            await self._save(entry)
        except LockstepError:
            self._index.end_deleting([entry], deleted=True)
            raise
        return key, key_id

    async def finish(self, name: str, reward: float | None) -> None:
        """Ends a session: it takes no more turns, and has that reward.

        To finish it again with the same reward changes nothing. Raises NotFound, and Conflict for
        another reward.
        """
        entry = self._index.require(name)
        entry.check_whole()
        terms = entry.terms or SessionTerms()
        if terms.finished:
            if terms.reward != reward:
                raise Conflict(
                    f"session {name!r} is finished with reward {terms.reward}, not {reward}",
                    param="reward",
                )
            return
        noted = terms if terms.end(*self._times()) else terms.ended("finish", self._clock())
        await self._end(entry, msgspec.structs.replace(noted, finished=True, reward=reward))

    async def leave(self, name: str) -> None:
        """Ends a session on the word of its own key: it takes no more turns. A reward is not the
        harness's to give: the trainer may still finish it with one. Raises NotFound."""
        entry = self._index.require(name)
        entry.check_whole()
        terms = entry.terms or SessionTerms()
        if terms.end(*self._times()) is None:
            await self._end(entry, terms.ended("harness", self._clock()))

    async def wait(self, name: str, seconds: float) -> None:
        """Returns when the session has ended, or after so long. Raises NotFound."""
        loop = asyncio.get_running_loop()
        until, woken = loop.time() + seconds, asyncio.Event()
        self._waiting.setdefault(name, set()).add(woken)
        try:
            while (left := until - loop.time()) > 0:
                terms = self._index.require(name).terms
                if terms is not None and terms.end(*self._times()) is not None:
                    return
                # Looked at now and then: `seconds` run out without anybody doing anything.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), min(left, LOOK_SECONDS))
                woken.clear()
            self._index.require(name)
        finally:
            self._waiting[name].discard(woken)
            if not self._waiting[name]:
                del self._waiting[name]

    def note_used_up(self, entry: SessionEntry) -> bool:
        """Notes that the budget is used, if it is; whether that is news."""
        terms = entry.terms
        if terms is None or terms.ended_by is not None or (by := terms.used_up()) is None:
            return False
        entry.terms = terms.ended(by, self._clock())
        self._wake(entry.name)
        return True

    def _times(self) -> tuple[float, float]:
        return self._service_clock.now(), self._clock()

    def _wake(self, name: str) -> None:
        for woken in self._waiting.get(name, ()):
            woken.set()

    async def _end(self, entry: SessionEntry, terms: SessionTerms) -> None:
        before, entry.terms = entry.terms, terms
        try:
            await self._save(entry)
        except LockstepError:
            entry.terms = before
            raise
        self._wake(entry.name)

    async def _save(self, entry: SessionEntry) -> None:
        write = functools.partial(tables.write_turns, row=entry.row(), turns=(), breaks=())
        # Shielded: a client that goes away must not leave it half done.
        await asyncio.shield(self._store.write(write))
