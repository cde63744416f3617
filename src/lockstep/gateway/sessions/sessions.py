"""The sessions of a gateway: each a ledger of turns, kept in a store and cached in memory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

from lockstep.gateway.sessions.cache import CachedSession, SessionCache
from lockstep.gateway.sessions.entry import SessionEntry, SessionInfo
from lockstep.gateway.sessions.expiry import TTL_SECONDS, SessionExpiry
from lockstep.gateway.sessions.keys import SessionKeys
from lockstep.gateway.sessions.limits import SessionCounts, SessionLimits
from lockstep.gateway.sessions.loading import SessionLoader
from lockstep.gateway.sessions.samples import (
    SampleOptions,
    TokenizerFingerprints,
    reading_back,
)
from lockstep.gateway.sessions.service_clock import ServiceClock
from lockstep.gateway.sessions.session import Session
from lockstep.gateway.sessions.store.interface import (
    SessionStore,
    StoredSession,
    require_session,
)
from lockstep.gateway.sessions.store.sqlite import SqliteSessionStore
from lockstep.gateway.sessions.writes import SessionWrites
from lockstep.ledger import Breaks, Ledger, Node, PromptPlan
from lockstep.ledger.branch_sample import branch_samples
from lockstep.ledger.breaks import GATEWAY_BREAKS
from lockstep.ledger.codec import load_turns
from lockstep.render import Renderer
from lockstep.tokens import Completion, Sample
from lockstep.tokens.errors import Conflict, LockstepError, NotFound, Unavailable

log = logging.getLogger(__name__)


class Sessions:
    """Every session by its id, kept in `store`: an SQLite file by its path, "memory", or a
    SessionStore that several gateways may share.

    Sessions are deleted on request or when they expire (see SessionExpiry), and for no other
    reason: at a limit, what is new is refused. `max_sessions` and `max_bytes_total` refuse with
    Busy, `max_turns` and `max_bytes_per_session` with TooLarge. `cache_bytes` is how much of the
    stored sessions is in memory.
    """

    def __init__(
        self,
        store: str | SessionStore = "memory",
        *,
        ttl_seconds: float = TTL_SECONDS,
        expire_unread: bool = False,
        max_sessions: int = 100_000,
        max_turns: int = 1000,
        max_bytes_per_session: int = 256 << 20,
        max_bytes_total: int = 32 << 30,
        cache_bytes: int = 256 << 20,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = SessionCounts()
        self.cache = SessionCache(cache_bytes)
        self._limits = SessionLimits(
            sessions=max_sessions,
            turns=max_turns,
            bytes_per_session=max_bytes_per_session,
            bytes_total=max_bytes_total,
        )
        self._clock = clock
        self._service_clock = ServiceClock(monotonic)
        self._store = SqliteSessionStore(store) if isinstance(store, str) else store
        self._expiry = SessionExpiry(
            self._store,
            self.cache,
            self.counts,
            ttl_seconds=ttl_seconds,
            expire_unread=expire_unread,
            clock=self._service_clock,
        )
        self.keys = SessionKeys(
            self._store,
            self.cache,
            clock=clock,
            service_clock=self._service_clock,
            check_room=self._check_room,
        )
        self._writes = SessionWrites(self._store, self.cache, self.keys, self.counts)
        self._loader = SessionLoader(self._store, self.cache, self._writes, self.counts)
        self._fingerprints = TokenizerFingerprints()
        self._sweeping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Sessions:
        self._service_clock.restore(await self._store.start())
        self._sweeping = asyncio.create_task(self._expiry.sweep_for_ever())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            with suppress(asyncio.CancelledError):
                await self._sweeping
        await self._writes.stop()
        with suppress(LockstepError):  # the clock then goes on from the last sweep
            await self._expiry.save_clock()
        await self._store.stop()

    def __len__(self) -> int:
        return self._store.totals().sessions

    @property
    def secret(self) -> bytes:
        """A secret that every gateway of the store shares."""
        return self._store.secret

    def stats(self) -> dict[str, int]:
        """Sizes now and counts since the start, by the name of their metric."""
        totals = self._store.totals()
        return {
            "live": totals.sessions,
            "bytes": totals.bytes,
            "hot": len(self.cache),
            "hot_bytes": self.cache.nbytes,
            "evicted": self.cache.evicted,
            **self.counts.numbers(),
        }

    async def open(
        self,
        session_id: str,
        renderer: Renderer,
        *,
        breaks: Breaks = GATEWAY_BREAKS,
        begun: bool = False,
    ) -> Session:
        """The session of that id, from memory, from the store, or new unless it must have `begun`.

        Raises Busy when there may not be one more, and Conflict when its turns are of another
        tokenizer: their ids would mean something else.
        """
        tokenizer = await self._fingerprints.of(renderer)
        cached = self.cache.find(session_id)
        if cached is None:
            cached = await self._loader.load(session_id, renderer)
        elif self._store.shared:
            cached = await self._loader.refresh(cached, renderer)
        if cached is None:
            if begun:
                raise Conflict(f"session {session_id!r} was deleted", param="x-session-id")
            cached = self.cache.find(session_id) or self._begin(session_id, renderer, tokenizer)
        entry = cached.entry
        if not entry.turns:
            entry.tokenizer = tokenizer
        if entry.tokenizer != tokenizer:
            raise Conflict(
                f"session {session_id!r} was recorded with another tokenizer: delete it, or use "
                "another id",
                param="x-session-id",
            )
        self._touch(entry)
        return Session(self, cached, renderer, breaks)

    async def samples(
        self,
        session_id: str,
        *,
        train_aborted: bool = False,
        dedupe: bool = True,
        kinds: Sequence[str] | None = None,
        weights: str | None = None,
        by_trainer: bool = True,
    ) -> list[Sample]:
        """The samples of every branch; see Ledger.samples. Raises NotFound and what that raises.

        Read by the trainer, the turns so far then count as read: the session may expire until
        there are more.
        """
        entry = await require_session(self._store, session_id)
        entry.check_whole()
        options = SampleOptions(
            train_aborted=train_aborted, dedupe=dedupe, kinds=kinds, weights=weights
        )
        nodes, _ = await self._turns(entry)
        samples = await asyncio.to_thread(branch_samples, nodes, **options)
        if by_trainer:
            await self._mark_read(entry, len(nodes))
        if entry.terms is not None and (reward := entry.terms.reward) is not None:
            return await asyncio.to_thread(
                lambda: [replace(sample, reward=reward) for sample in samples]
            )
        return samples

    async def turns(self, session_id: str) -> tuple[list[Node], Counter[str]]:
        """Every turn of a session and its prefix breaks by cause; it does not count as read.

        Raises NotFound, and Unavailable when it cannot be read back.
        """
        entry = await require_session(self._store, session_id)
        entry.check_whole()
        return await self._turns(entry)

    async def _turns(self, entry: SessionEntry) -> tuple[list[Node], Counter[str]]:
        cached = self.cache.find(entry.name)
        if cached is not None:
            await self._writes.settled(cached)
        if cached is not None and not self._store.shared:
            cached.check_alive()
            return cached.ledger.nodes[:], cached.ledger.break_counts.copy()
        stored = await self._stored(entry)
        with reading_back(entry.name):
            turns = await asyncio.to_thread(load_turns, stored.turns)
        return [node for node, _ in turns], Counter(cause for _, cause in stored.breaks)

    async def _stored(self, entry: SessionEntry) -> StoredSession:
        loaded = await self._store.load(entry.name, None, 0)
        if loaded is None or loaded.entry.id != entry.id:
            raise NotFound(f"session {entry.name!r} was deleted meanwhile", param="session_id")
        return loaded.stored

    async def _mark_read(self, entry: SessionEntry, turns: int) -> None:
        if entry.read_turns >= turns:
            return
        try:
            await self._store.mark_read(entry, turns)
        except Unavailable as error:  # the samples are right; only the session is kept for longer
            log.warning(
                "session %r is not marked as read, so it will not expire until its samples are "
                "read again: %s", entry.name, error.message,
            )  # fmt: skip

    async def info(self, session_id: str) -> SessionInfo:
        """The session at a glance. Raises NotFound."""
        entry = await require_session(self._store, session_id)
        return SessionInfo.of(entry, self._service_clock.now(), self._clock())

    async def page(self, *, after: str = "", limit: int = 100) -> list[SessionInfo]:
        """Sessions in the order of their ids, those after one id."""
        entries = await self._store.page(after, limit)
        now, time_of_day = self._service_clock.now(), self._clock()
        return [SessionInfo.of(entry, now, time_of_day) for entry in entries]

    async def latest(
        self, wanted: Callable[[str], bool], *, limit: int, offset: int = 0
    ) -> tuple[list[str], int]:
        """Names of sessions that are `wanted`, the last used first, and how many there are."""
        return await self._store.latest(wanted, limit, offset)

    async def delete(self, session_id: str) -> None:
        """Deletes a session and its turns; a request in flight gets a Conflict. Raises NotFound."""
        entry = await require_session(self._store, session_id)
        await self._expiry.delete(entry)

    async def sweep(self) -> int:
        """Deletes the sessions that have expired; how many."""
        return await self._expiry.sweep()

    async def begin_call(self, cached: CachedSession) -> None:
        """Counts a call. Raises TooLarge or Busy when one more turn is past a limit, Forbidden when
        it is past the session's budget, Conflict when the session ended."""
        cached.check_alive()
        entry = cached.entry
        if entry.terms is not None:
            # The last call of a budget may have failed: then it is the next that shows the end.
            await self.keys.note_used_up(entry)
            entry.terms.check_budget(entry.name)
        self._limits.check_session(entry.name, entry.turns, entry.bytes, self.counts)
        self._limits.check_all(0, self._store.totals().bytes, self.counts)
        if entry.terms is not None:
            await self._store.count_call(entry)

    def _check_room(self) -> None:
        """Raises Busy when there may not be one more session."""
        totals = self._store.totals()
        count = totals.sessions + self.cache.without_turns
        self._limits.check_all(count, totals.bytes, self.counts)

    def count_breaks(self, cached: CachedSession) -> None:
        """Counts new breaks, and stores those of a session that is stored."""
        if cached.unsaved_breaks:
            self.counts.breaks.update(cause for _, cause in cached.unsaved_breaks)
            self._writes.save_breaks(cached)

    async def store(
        self, cached: CachedSession, plan: PromptPlan, choices: Sequence[tuple[Completion, Any]]
    ) -> None:
        """See Session.commit."""
        self._touch(cached.entry)
        await self._writes.commit(cached, plan, choices)

    def _touch(self, entry: SessionEntry) -> None:
        entry.used, entry.active = self._clock(), self._service_clock.now()

    def _begin(self, name: str, renderer: Renderer, tokenizer: bytes) -> CachedSession:
        self._check_room()
        self.counts.opened += 1
        now, active = self._clock(), self._service_clock.now()
        new = self._store.new_entry(name, tokenizer, now, active)
        cached = CachedSession(new, Ledger(renderer, breaks=GATEWAY_BREAKS))
        self.cache.add(cached)
        return cached
