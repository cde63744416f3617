"""Keys that are minted for one session each, and the end of a session with a reward."""

from __future__ import annotations

import asyncio
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
        entry.terms = msgspec.structs.replace(terms, finished=True, reward=reward)
        try:
            await self._save(entry)
        except LockstepError:
            entry.terms = terms
            raise

    async def _save(self, entry: SessionEntry) -> None:
        write = functools.partial(tables.write_turns, row=entry.row(), turns=(), breaks=())
        # Shielded: a client that goes away must not leave it half done.
        await asyncio.shield(self._store.write(write))
