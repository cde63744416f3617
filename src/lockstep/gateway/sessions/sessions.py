"""The sessions of a gateway: each a ledger of turns, in a store and cached in memory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lockstep.gateway.sessions.cache import (
    CachedSession,
    Reservation,
    ServiceClock,
    Session,
    SessionCache,
)
from lockstep.gateway.sessions.expiry import SessionExpiry
from lockstep.gateway.sessions.info import SessionInfo
from lockstep.gateway.sessions.keys import SessionKeys
from lockstep.gateway.sessions.limits import (
    SESSION_LIMITS,
    TTL_SECONDS,
    SessionCounts,
    SessionLimits,
)
from lockstep.gateway.sessions.loading import SessionLoader, find_session, reading_back
from lockstep.gateway.sessions.writes import SessionWrites
from lockstep.http.off_loop import off_loop
from lockstep.ledger import Breaks, Ledger, Node, PromptPlan
from lockstep.ledger.branch_sample import branch_samples, left_out
from lockstep.ledger.breaks import GATEWAY_BREAKS
from lockstep.ledger.codec import load_turns
from lockstep.render import Renderer
from lockstep.storage.protocols import SessionStore, StoredSession
from lockstep.storage.session_entry import SessionEntry
from lockstep.storage.sqlite.sessions import SqliteSessionStore
from lockstep.tokens import Completion, Sample, Sampling
from lockstep.tokens.errors import (
    Busy,
    Conflict,
    Forbidden,
    LockstepError,
    NotFound,
    Unavailable,
)

log = logging.getLogger(__name__)


class Sessions:
    """All sessions of a store, by id; the store is in memory by default.

    Sessions are deleted on request or when they expire (see SessionExpiry), and never to make
    room: past a limit, new sessions and turns are rejected.
    """

    def __init__(
        self,
        store: SessionStore | None = None,
        *,
        ttl_seconds: float = TTL_SECONDS,
        expire_unread: bool = False,
        limits: SessionLimits = SESSION_LIMITS,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = SessionCounts()
        self.cache = SessionCache(limits.session_cache_bytes)
        self._limits = limits
        self._clock = clock
        self._service_clock = ServiceClock(monotonic)
        self._store = store or SqliteSessionStore()
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
        self._loader = SessionLoader(self._store, self.cache, self.counts)
        self._sweeping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Sessions:
        self._service_clock.restore(await self._store.start())
        self._sweeping = asyncio.create_task(self._expiry.sweep_for_ever())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            with suppress(asyncio.CancelledError):
                await self._sweeping
        await self._writes.stop()
        with suppress(LockstepError):  # the clock then continues from the last sweep
            await self._expiry.save_clock()
        await self._store.stop()

    def __len__(self) -> int:
        return self._store.totals().sessions

    @property
    def secret(self) -> bytes:
        """A secret that all gateways on the store share."""
        return self._store.secret

    def stats(self) -> dict[str, int]:
        """Return current sizes and counts since the start, by the names of their metrics."""
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
        """Return a session from memory or from the store, or a new one.

        With `begun` it must exist: Conflict otherwise. Raises Busy at the limit of sessions, and
        Conflict when its turns are of another tokenizer, in which their ids mean something else.
        """
        tokenizer = await renderer.tokenizer_digest()
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

    async def left_out(self, session_id: str, kinds: Sequence[str] | None) -> dict[str, int]:
        """Return the trainable tokens that a selection of kinds leaves out, by kind. Raises
        NotFound."""
        entry = await find_session(self._store, session_id)
        entry.check_readable()
        nodes, _ = await self._turns(entry)
        return await off_loop(True, left_out, nodes, kinds)

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
        """Return the samples of every branch; see Ledger.samples. Raises NotFound and what that
        raises.

        With `by_trainer`, the turns count as read, so that the session may expire.
        """
        entry = await find_session(self._store, session_id)
        entry.check_readable()
        nodes, _ = await self._turns(entry)
        samples = await off_loop(
            True,
            branch_samples,
            nodes,
            train_aborted=train_aborted,
            dedupe=dedupe,
            kinds=kinds,
            weights=weights,
        )
        if by_trainer:
            await self._mark_read(entry, len(nodes))
        if entry.terms is not None and (reward := entry.terms.reward) is not None:
            return await off_loop(
                True, lambda: [replace(sample, reward=reward) for sample in samples]
            )
        return samples

    async def turns(self, session_id: str) -> tuple[list[Node], Counter[str]]:
        """Return every turn of a session and its prefix breaks by cause, without marking it read.

        Raises NotFound, and Unavailable when the turns cannot be decoded.
        """
        entry = await find_session(self._store, session_id)
        entry.check_readable()
        return await self._turns(entry)

    async def _turns(self, entry: SessionEntry) -> tuple[list[Node], Counter[str]]:
        cached = self.cache.find(entry.name)
        if cached is not None:
            await self._writes.wait(cached)
        if cached is not None and not self._store.shared:
            cached.check_alive()
            return cached.ledger.nodes[:], cached.ledger.break_counts.copy()
        stored = await self._stored(entry)
        with reading_back(entry.name):
            turns = await off_loop(True, load_turns, stored.turns)
        return [node for node, _ in turns], Counter(cause for _, cause in stored.breaks)

    async def _stored(self, entry: SessionEntry) -> StoredSession:
        loaded = await self._store.load(entry.name)
        if loaded is None or loaded.entry.id != entry.id:
            raise NotFound(f"session {entry.name!r} was deleted meanwhile", param="session_id")
        return loaded.stored

    async def _mark_read(self, entry: SessionEntry, turns: int) -> None:
        if entry.read_turns >= turns:
            return
        try:
            await self._store.mark_read(entry, turns)
        except Unavailable as error:  # the samples are right; the session only expires later
            log.warning(
                "session %r could not be marked as read, and will not expire until its samples "
                "are read again: %s", entry.name, error.message,
            )  # fmt: skip

    async def info(self, session_id: str) -> SessionInfo:
        """Return a session without its turns. Raises NotFound."""
        entry = await find_session(self._store, session_id)
        return SessionInfo.of(entry, self._service_clock.now(), self._clock())

    async def page(self, *, after: str = "", limit: int = 100) -> list[SessionInfo]:
        """Return sessions with ids greater than `after`, ordered by id."""
        entries = await self._store.page(after, limit)
        now, time_of_day = self._service_clock.now(), self._clock()
        return [SessionInfo.of(entry, now, time_of_day) for entry in entries]

    async def latest(
        self, wanted: Callable[[str], bool], *, limit: int, offset: int = 0
    ) -> tuple[list[str], int]:
        """Return a page of the names that `wanted` accepts, last used first, and their number."""
        return await self._store.latest(wanted, limit, offset)

    async def delete(self, session_id: str) -> None:
        """Delete a session and its turns; requests that use it get a Conflict. Raises NotFound."""
        entry = await find_session(self._store, session_id)
        await self._expiry.delete(entry)

    async def sweep(self) -> int:
        """Delete the sessions that have expired; return their number."""
        return await self._expiry.sweep()

    async def begin_call(self, cached: CachedSession) -> None:
        """Count a call. Raises TooLarge or Busy at a limit, Forbidden when the session's budget is
        used up, Conflict when the session was deleted."""
        if cached.cut:
            await asyncio.wait(set(cached.cut))
        cached.check_alive()
        entry = cached.entry
        if entry.terms is not None:
            # The last call of a budget may have failed before it stored the end.
            await self.keys.end_if_exhausted(entry)
            entry.terms.check_budget(entry.name)
        self._limits.check_session(entry.name, entry.turns, entry.bytes, self.counts)
        self._limits.check_all(0, self._store.totals().bytes, self.counts)
        if entry.terms is not None:
            await self._store.count_call(entry)

    async def reserve(
        self, cached: CachedSession, sampling: Sampling, room: int | None
    ) -> tuple[Sampling, Reservation | None]:
        """Reserve the budget of a session for the choices of one request.

        Returns `sampling` with a token limit that the budget covers, whatever the choices and the
        calls that run at the same time use. `room` is how many tokens the context leaves. Raises
        Forbidden when the budget is too small for one token of each choice, Busy when only running
        calls have reserved it, and TooLarge when the choices would exceed the session's turns.
        """
        entry, choices = cached.entry, sampling.n
        self._limits.check_session(entry.name, entry.turns + choices - 1, entry.bytes, self.counts)
        if entry.terms is None:
            return sampling, None
        if choices > 1:
            await self._store.count_call(entry, choices - 1)  # `begin_call` counted the first
        budget = entry.terms.max_tokens
        if budget is None:
            return sampling, None
        left = budget - entry.terms.tokens - cached.reserved
        if left < choices:
            used = f"session {entry.name!r} has used {entry.terms.tokens} of {budget} tokens"
            if cached.reserved and budget - entry.terms.tokens >= choices:
                raise Busy(
                    f"{used}, and running calls have reserved {cached.reserved}: send this one "
                    "after them",
                    retry_after=1.0,
                )
            raise Forbidden(
                f"{used}, which leaves none for {choices} choices: finish it", param="x-session-id"
            )
        # No await from here on: calls that run in parallel must see what is reserved.
        needed = [most for most in (sampling.max_tokens, room) if most is not None]
        limit = min([left // choices, *needed])
        reservation = Reservation(cached, limit * choices)
        if needed and limit == min(needed):
            return sampling, reservation
        return replace(sampling, max_tokens=limit), reservation

    def _check_room(self) -> None:
        """Raise Busy at the limit of sessions."""
        totals = self._store.totals()
        count = totals.sessions + self.cache.without_turns
        self._limits.check_all(count, totals.bytes, self.counts)

    def count_breaks(self, cached: CachedSession) -> None:
        """Count new breaks, and store those of a stored session."""
        if cached.unsaved_breaks:
            self.counts.breaks.update(cause for _, cause in cached.unsaved_breaks)
            self._writes.save_breaks(cached)

    async def store(
        self, cached: CachedSession, plan: PromptPlan, choices: Sequence[tuple[Completion, Any]]
    ) -> None:
        """Store a turn; see Session.commit."""
        self._touch(cached.entry)
        await self._writes.commit(cached, plan, choices)

    def store_cut(
        self, cached: CachedSession, plan: PromptPlan, choices: Sequence[tuple[Completion, Any]]
    ) -> None:
        """Start to store a turn that was cut; see Session.commit_cut."""
        self._touch(cached.entry)
        self._writes.start_cut(cached, plan, choices)

    def _touch(self, entry: SessionEntry) -> None:
        entry.used, entry.active = self._clock(), self._service_clock.now()

    def _begin(self, name: str, renderer: Renderer, tokenizer: bytes) -> CachedSession:
        self._check_room()
        self.counts.opened += 1
        now, active = self._clock(), self._service_clock.now()
        entry = SessionEntry(None, name, tokenizer, now, now, active)
        cached = CachedSession(entry, Ledger(renderer, breaks=GATEWAY_BREAKS))
        self.cache.add(cached)
        return cached
