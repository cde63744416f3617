"""The sessions of a gateway: each a ledger of turns, stored in a file and cached in memory."""

from __future__ import annotations

import asyncio
import functools
import heapq
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

from lockstep import tracing
from lockstep.gateway.sessions import tables
from lockstep.gateway.sessions.cache import CachedSession, SessionCache
from lockstep.gateway.sessions.expiry import TTL_SECONDS, SessionExpiry
from lockstep.gateway.sessions.index import SessionEntry, SessionIndex, SessionInfo
from lockstep.gateway.sessions.keys import SessionKeys
from lockstep.gateway.sessions.limits import SessionCounts, SessionLimits
from lockstep.gateway.sessions.samples import (
    SampleOptions,
    TokenizerFingerprints,
    reading_back,
)
from lockstep.gateway.sessions.service_clock import ServiceClock
from lockstep.gateway.sessions.store import SessionStore
from lockstep.ledger import Breaks, Ledger, Node, PromptPlan
from lockstep.ledger.branch_sample import branch_samples
from lockstep.ledger.breaks import GATEWAY_BREAKS
from lockstep.ledger.codec import load_turns
from lockstep.render import Renderer
from lockstep.render.messages import Plain, plain_messages
from lockstep.tokens import Completion, Sample
from lockstep.tokens.errors import Conflict, LockstepError, Unavailable

log = logging.getLogger(__name__)


class Session:
    """A session as one request uses it. Plan and commit with the same one."""

    def __init__(
        self, owner: Sessions, cached: CachedSession, renderer: Renderer, breaks: Breaks
    ) -> None:
        self._owner, self._cached, self._renderer, self._breaks = owner, cached, renderer, breaks

    @property
    def id(self) -> str:
        return self._cached.name

    @property
    def strict(self) -> bool:
        """Whether turns that cannot be in one sample with those before are refused."""
        return self._breaks == "strict"

    async def plan(self, messages: Iterable[Any], tools: Iterable[Any] | None = None) -> PromptPlan:
        """The prompt for these messages, its ids perhaps undecoded; see Ledger.plan.

        Raises what that raises, and TooLarge when the session is at its limit of turns or bytes.
        Limits are checked here and not in `commit`: what was sampled is stored.
        """
        self._owner.check_limits(self._cached)
        try:
            return await self._cached.ledger.plan_async(
                messages, tools, renderer=self._renderer, breaks=self._breaks, lazy=True
            )
        finally:
            self._owner.count_breaks(self._cached)

    def plan_ids(self, prompt_ids: Sequence[int]) -> PromptPlan:
        """Where a turn with a prompt of ids belongs; see Ledger.plan_ids. Raises as `plan` does."""
        self._owner.check_limits(self._cached)
        try:
            return self._cached.ledger.plan_ids(prompt_ids, breaks=self._breaks)
        finally:
            self._owner.count_breaks(self._cached)

    def history(self, request_id: str) -> list[Plain] | None:
        """The messages up to and with the turn of that request; None when it is not here."""
        for node in reversed(self._cached.ledger.nodes):
            if node.request_id == request_id:
                return plain_messages(node.messages())
        return None

    def continue_(self, node: Node) -> PromptPlan:
        """The prompt that goes on where an aborted turn stopped; see Ledger.continue_."""
        self._owner.check_limits(self._cached)
        return self._cached.ledger.continue_(node)

    async def commit(self, plan: PromptPlan, choices: Sequence[tuple[Completion, Any]]) -> None:
        """Stores every choice of a reply as a branch: all of them, or none.

        Returns when they are in the file. Raises what Ledger.commit raises; Conflict when the
        session was ended meanwhile; Unavailable when the file cannot be written, and then the
        session is as it was before. A caller that is cancelled while it waits stores them too.
        """
        if (tracer := tracing.active) is None:
            await self._owner.store(self._cached, plan, choices)
            return
        with tracer.span("store", {"lockstep.session": self.id}):
            await self._owner.store(self._cached, plan, choices)


class Sessions:
    """Every session by its id, stored in the SQLite file at `path`, or in "memory".

    Sessions are deleted on request or when they expire (see SessionExpiry), and for no other
    reason: at a limit, what is new is refused. `max_sessions` and `max_bytes_total` refuse with
    Busy, `max_turns` and `max_bytes_per_session` with TooLarge. `cache_bytes` is how much of the
    stored sessions is in memory.
    """

    def __init__(
        self,
        path: str = tables.MEMORY,
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
        self.secret = b""
        self._clock = clock
        self._service_clock = ServiceClock(monotonic)
        self._store = SessionStore(path)
        self._index = SessionIndex()
        self._expiry = SessionExpiry(
            self._store,
            self._index,
            self.cache,
            self.counts,
            ttl_seconds=ttl_seconds,
            expire_unread=expire_unread,
            clock=self._service_clock,
        )
        self.keys = SessionKeys(
            self._store,
            self._index,
            self.cache,
            clock=clock,
            service_clock=self._service_clock,
            check_room=self._check_room,
        )
        self._loading: dict[str, asyncio.Task[CachedSession]] = {}
        self._fingerprints = TokenizerFingerprints()
        self._sweeping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Sessions:
        stored = await self._store.start()
        self.secret = stored.secret
        self._service_clock.restore(stored.clock)
        self._index.restore(stored.rows, stored.damaged)
        for _, name in stored.damaged:
            log.error("the stored row of session %r is damaged: delete the session", name)
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
        with suppress(LockstepError):  # the clock then goes on from the last sweep
            await self._expiry.save_clock()
        await self._store.stop()

    def __len__(self) -> int:
        return len(self._index)

    def stats(self) -> dict[str, int]:
        """Sizes now and counts since the start, by the name of their metric."""
        return {
            "live": len(self._index),
            "bytes": self._index.nbytes,
            "hot": len(self.cache),
            "hot_bytes": self.cache.nbytes,
            "evicted": self.cache.evicted,
            **self.counts.numbers(),
        }

    async def open(
        self, session_id: str, renderer: Renderer, *, breaks: Breaks = GATEWAY_BREAKS
    ) -> Session:
        """The session of that id, from memory, from the file, or new.

        Raises Busy when there may not be one more, and Conflict when its turns are of another
        tokenizer: their ids would mean something else.
        """
        tokenizer = await self._fingerprints.of(renderer)
        cached = self.cache.find(session_id) or await self._load(session_id, renderer, tokenizer)
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
        entry = self._index.require(session_id)
        entry.check_whole()
        turns = entry.turns
        options = SampleOptions(
            train_aborted=train_aborted, dedupe=dedupe, kinds=kinds, weights=weights
        )
        samples = await self._samples(entry, options)
        if by_trainer:
            await self._mark_read(entry, turns)
        if entry.terms is not None and (reward := entry.terms.reward) is not None:
            return await asyncio.to_thread(
                lambda: [replace(sample, reward=reward) for sample in samples]
            )
        return samples

    async def _samples(self, entry: SessionEntry, options: SampleOptions) -> list[Sample]:
        nodes, _ = await self._turns(entry)
        return await asyncio.to_thread(branch_samples, nodes, **options)

    async def turns(self, session_id: str) -> tuple[list[Node], Counter[str]]:
        """Every turn of a session and its prefix breaks by cause; it does not count as read.

        Raises NotFound, and Unavailable when it cannot be read back.
        """
        entry = self._index.require(session_id)
        entry.check_whole()
        return await self._turns(entry)

    async def _turns(self, entry: SessionEntry) -> tuple[list[Node], Counter[str]]:
        cached = self.cache.find(entry.name)
        if cached is None:
            stored = await self._store.read(
                lambda db: tables.read_session(db, entry.id, entry.name)
            )
            with reading_back(entry.name):
                turns = await asyncio.to_thread(load_turns, stored.turns)
            return [node for node, _ in turns], Counter(cause for _, cause in stored.breaks)
        # Waits for the writes before it: a turn whose write may still fail is not to train on.
        await self._store.read(lambda db: None)
        cached.check_alive()
        return cached.ledger.nodes[:], cached.ledger.break_counts.copy()

    async def _mark_read(self, entry: SessionEntry, turns: int) -> None:
        if entry.read_turns >= turns:
            return
        entry.read_turns = turns
        mark = functools.partial(tables.mark_read, session=entry.id, turns=turns)
        try:
            await asyncio.shield(self._store.write(mark))
        except Unavailable as error:  # the samples are right; only the session is kept for longer
            log.warning(
                "session %r is not marked as read, so it will not expire until its samples are "
                "read again: %s", entry.name, error.message,
            )  # fmt: skip

    async def info(self, session_id: str) -> SessionInfo:
        """The session at a glance. Raises NotFound."""
        row = self._index.require(session_id).row()
        return SessionInfo.of(row, self._service_clock.now(), self._clock())

    async def page(self, *, after: str = "", limit: int = 100) -> list[SessionInfo]:
        """Sessions in the order of their ids, those after one id."""
        rows = await self._store.read(lambda db: tables.read_page(db, after, limit))
        now, time_of_day = self._service_clock.now(), self._clock()
        return [SessionInfo.of(row, now, time_of_day) for row in rows]

    def latest(
        self, wanted: Callable[[str], bool], *, limit: int, offset: int = 0
    ) -> tuple[list[str], int]:
        """Names of sessions that are `wanted`, the last used first, and how many there are."""
        entries = [entry for entry in self._index if wanted(entry.name)]
        first = heapq.nlargest(offset + limit, entries, key=lambda entry: entry.used)
        return [entry.name for entry in first[offset:]], len(entries)

    async def delete(self, session_id: str) -> None:
        """Deletes a session and its turns; a request in flight gets a Conflict. Raises NotFound."""
        await self._expiry.delete(session_id)

    async def sweep(self) -> int:
        """Deletes the sessions that have expired; how many."""
        return await self._expiry.sweep()

    def check_limits(self, cached: CachedSession) -> None:
        """Counts a call. Raises TooLarge or Busy when one more turn is past a limit, Forbidden when
        it is past the session's budget, Conflict when the session ended."""
        cached.check_alive()
        entry = cached.entry
        if entry.terms is not None:
            # The last call of a budget may have failed: then it is the next that shows the end.
            if self.keys.note_used_up(entry):
                self._write(cached, [])
            entry.terms.check_budget(entry.name)
        self._limits.check_session(entry.name, entry.turns, entry.bytes, self.counts)
        self._limits.check_all(0, self._index.nbytes, self.counts)
        if entry.terms is not None:
            entry.terms = entry.terms.called()

    def _check_room(self) -> None:
        """Raises Busy when there may not be one more session."""
        count = len(self._index) + self.cache.without_turns
        self._limits.check_all(count, self._index.nbytes, self.counts)

    def count_breaks(self, cached: CachedSession) -> None:
        """Counts new breaks, and stores those of a session that is stored."""
        if not cached.unsaved_breaks:
            return
        self.counts.breaks.update(cause for _, cause in cached.unsaved_breaks)
        if cached.entry.turns and cached.ended is None:
            self._write(cached, [])

    async def store(
        self, cached: CachedSession, plan: PromptPlan, choices: Sequence[tuple[Completion, Any]]
    ) -> None:
        """See Session.commit."""
        cached.check_alive()
        nodes = cached.ledger.commit_all(plan, choices)
        self._touch(cached.entry)
        if (terms := cached.entry.terms) is not None:
            tokens = sum(len(completion.token_ids) for completion, _ in choices)
            cached.entry.terms = terms.sampled(tokens)
            self.keys.note_used_up(cached.entry)
        written = self._write(cached, nodes)
        self.cache.touch(cached)
        # Shielded: a client that goes away does not undo a turn that is being written.
        await asyncio.shield(written)
        self.counts.turns += len(nodes)

    def _touch(self, entry: SessionEntry) -> None:
        entry.used, entry.active = self._clock(), self._service_clock.now()

    def _write(self, cached: CachedSession, nodes: list[Node]) -> asyncio.Future[None]:
        """Gives turns and new breaks to the store; a failure ends the session in memory."""
        entry, ledger = cached.entry, cached.ledger
        grown = cached.nbytes - entry.bytes
        self._index.grow(entry, len(nodes), grown)
        row = entry.row()
        breaks, cached.unsaved_breaks[:] = cached.unsaved_breaks[:], []

        def work(db: sqlite3.Connection) -> None:
            cached.check_alive()
            turns = [(node.index, ledger.turn_bytes(node)) for node in nodes]
            tables.write_turns(db, row, turns, breaks)

        def undone(error: LockstepError) -> None:
            # On the store's thread, before any later write: what was planned on these turns must
            # not be stored without them.
            cached.ended = error

        def settled(future: asyncio.Future[None]) -> None:
            error = future.exception()
            if isinstance(error, LockstepError):
                self.counts.unwritten += len(nodes)
                self.cache.drop(cached, error)
                self._index.shrink(entry, len(nodes), grown)

        written = self._store.write(work, undone)
        written.add_done_callback(settled)
        return written

    async def _load(self, name: str, renderer: Renderer, tokenizer: bytes) -> CachedSession:
        if self._index.is_deleting(name):
            raise Conflict(f"session {name!r} is being deleted: try again", param="x-session-id")
        entry = self._index.get(name)
        if entry is not None:
            entry.check_whole()
            # One task for all requests that wait: a session must not be in memory twice.
            task = self._loading.get(name)
            if task is None:
                task = asyncio.create_task(self._read(entry, renderer))
                self._loading[name] = task
                task.add_done_callback(lambda _: self._loading.pop(name))
            return await asyncio.shield(task)
        self._check_room()
        self.counts.opened += 1
        now, active = self._clock(), self._service_clock.now()
        new = self._index.new_entry(name, tokenizer, now, active)
        cached = CachedSession(new, Ledger(renderer, breaks=GATEWAY_BREAKS))
        self.cache.add(cached)
        return cached

    async def _read(self, entry: SessionEntry, renderer: Renderer) -> CachedSession:
        stored = await self._store.read(lambda db: tables.read_session(db, entry.id, entry.name))
        with reading_back(entry.name):
            ledger = await renderer.offload(
                Ledger.from_turns, stored.turns, stored.breaks, renderer
            )
        if self._index.get(entry.name) is not entry or self._index.is_deleting(entry.name):
            raise Conflict(
                f"session {entry.name!r} was deleted while it was read: try again, which begins "
                "a new one",
                param="x-session-id",
            )
        cached = CachedSession(entry, ledger)
        self.cache.add(cached)
        self.counts.loaded += 1
        return cached
