"""The sessions of a gateway: ledgers that survive it, of which only the busy ones are in memory."""

from __future__ import annotations

import asyncio
import functools
import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Any

from lockstep.gateway.sessions import store as table
from lockstep.gateway.sessions.cache import CachedSession, CacheEntry, SessionCache
from lockstep.gateway.sessions.limits import SessionCounts, SessionLimits
from lockstep.gateway.sessions.samples import Tokenizers, ends_of, samples_of, whole
from lockstep.gateway.sessions.store import SessionStore, TurnRow
from lockstep.ledger import Breaks, Ledger, Node, PromptPlan
from lockstep.ledger.breaks import GATEWAY_BREAKS
from lockstep.ledger.codec import load_turns
from lockstep.ledger.tree import leaves
from lockstep.render import Renderer
from lockstep.tokens import Completion, Sample
from lockstep.tokens.errors import Conflict, LockstepError, NotFound, Unavailable

log = logging.getLogger(__name__)
TTL_SECONDS = 86400.0
SWEEP_SECONDS = 60.0
SWEPT_AT_ONCE = 200
"""Sessions deleted in one transaction at most: turns that are committed wait for it."""


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A session at a glance. Times are seconds since 1970.

    `unread_turns` counts those that came after its samples were last read.
    """

    id: str
    turns: int
    bytes: int
    created: float
    used: float
    unread_turns: int


class Session:
    """One request's hold on a session. Plan and commit with the same one."""

    def __init__(
        self, owner: Sessions, hot: CachedSession, renderer: Renderer, breaks: Breaks
    ) -> None:
        self._owner, self._hot, self._renderer, self._breaks = owner, hot, renderer, breaks

    @property
    def id(self) -> str:
        return self._hot.name

    async def plan(self, messages: Iterable[Any], tools: Iterable[Any] | None = None) -> PromptPlan:
        """The prompt for these messages, its ids perhaps undecoded; see Ledger.plan.

        Raises what that raises, and TooLarge when the session is at its limit of turns or bytes.
        Limits count here and not in `commit`: what was sampled is kept.
        """
        self._owner.check_room(self._hot)
        try:
            return await self._hot.ledger.plan_async(
                messages, tools, renderer=self._renderer, breaks=self._breaks, raw=True
            )
        finally:
            self._owner.count_breaks(self._hot)

    def continue_(self, node: Node) -> PromptPlan:
        """The prompt that goes on where an aborted turn stopped; see Ledger.continue_."""
        self._owner.check_room(self._hot)
        return self._hot.ledger.continue_(node)

    async def commit(self, plan: PromptPlan, answers: Sequence[tuple[Completion, Any]]) -> None:
        """Stores every choice of an answer as a branch: all of them, or none.

        Returns when they are in the file. Raises what Ledger.commit raises; Conflict when the
        session was ended meanwhile; Unavailable when the file cannot be written, and then the
        session is as it was before. A caller that is cancelled while it waits stores them too.
        """
        await self._owner.store(self._hot, plan, answers)


class Sessions:
    """Every session by its id, kept in the SQLite file at `path`, or in "memory" for tests.

    A session that was not used for `ttl_seconds` and whose samples were read since its last turn
    is deleted and counted; `expire_unread` deletes those too that nobody has read. Nothing else is
    ever thrown away: at a limit, what is new is refused. `max_sessions` and `max_bytes_total`
    refuse with Busy, `max_turns` and `max_bytes_per_session` with TooLarge.
    """

    def __init__(
        self,
        path: str = table.MEMORY,
        *,
        ttl_seconds: float = TTL_SECONDS,
        expire_unread: bool = False,
        max_sessions: int = 100_000,
        max_turns: int = 1000,
        max_bytes_per_session: int = 256 << 20,
        max_bytes_total: int = 32 << 30,
        hot_bytes: int = 256 << 20,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.counts = SessionCounts()
        self.hot = SessionCache(hot_bytes)
        self.nbytes = 0
        self._limits = SessionLimits(
            sessions=max_sessions,
            turns=max_turns,
            bytes_per_session=max_bytes_per_session,
            bytes_total=max_bytes_total,
        )
        self._ttl, self._clock = ttl_seconds, clock
        self._expire_unread = expire_unread
        self._store = SessionStore(path)
        self._index: dict[str, CacheEntry] = {}
        self._next_id = 1
        self._ending: set[str] = set()
        self._loading: dict[str, asyncio.Task[CachedSession]] = {}
        self._tokenizers = Tokenizers()
        self._sweeping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Sessions:
        for row in await self._store.start():
            self._index[row.name] = CacheEntry(row)
            self.nbytes += row.bytes
            self._next_id = max(self._next_id, row.id + 1)
        self._sweeping = asyncio.create_task(self._sweep_for_ever())
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
        await self._store.stop()

    def __len__(self) -> int:
        return len(self._index)

    def stats(self) -> dict[str, int]:
        """What is there, and what happened since the start, by name; for the metrics."""
        return {
            "live": len(self._index),
            "bytes": self.nbytes,
            "hot": len(self.hot),
            "hot_bytes": self.hot.nbytes,
            "evicted": self.hot.evicted,
            **self.counts.numbers(),
        }

    async def open(
        self, session_id: str, renderer: Renderer, *, breaks: Breaks = GATEWAY_BREAKS
    ) -> Session:
        """The session of that id, read back or begun.

        Raises Busy when there is no room for one more, and Conflict when its turns are of another
        tokenizer: their ids would mean something else.
        """
        tokenizer = await self._tokenizers.of(renderer)
        hot = self.hot.find(session_id) or await self._load(session_id, renderer, tokenizer)
        if hot.entry.tokenizer != tokenizer:
            raise Conflict(
                f"session {session_id!r} was recorded with another tokenizer: delete it, or use "
                "another id",
                param="x-session-id",
            )
        hot.entry.used = self._clock()
        return Session(self, hot, renderer, breaks)

    async def samples(self, session_id: str, *, train_aborted: bool = False) -> list[Sample]:
        """A sample of every branch. Raises NotFound, and Conflict like Ledger.samples.

        The session then counts as read, as far as it goes now: it may expire.
        """
        entry, hot = self._entry(session_id), self.hot.find(session_id)
        turns = entry.turns
        found = await self._samples(session_id, entry, hot, train_aborted)
        await self._note_read(entry, turns)
        return found

    async def _samples(
        self, session_id: str, entry: CacheEntry, hot: CachedSession | None, train_aborted: bool
    ) -> list[Sample]:
        if hot is None:
            stored = await self._store.read(lambda db: table.read_session(db, entry.id))
            with whole(session_id):
                turns = await asyncio.to_thread(load_turns, stored.turns)
            return await asyncio.to_thread(samples_of, ends_of(turns), train_aborted)
        # A turn whose write may still fail is not one to train on.
        await self._store.read(lambda db: None)
        hot.check_alive()
        return await asyncio.to_thread(samples_of, leaves(hot.ledger.nodes), train_aborted)

    async def _note_read(self, entry: CacheEntry, turns: int) -> None:
        if entry.read_turns >= turns:
            return
        entry.read_turns = turns
        note = functools.partial(table.mark_read, session=entry.id, turns=turns)
        try:
            await asyncio.shield(self._store.write(note))
        except Unavailable as error:  # the samples are right; the session is only kept for longer
            log.warning("a session whose samples were read is not marked so: %s", error.message)

    async def info(self, session_id: str) -> SessionInfo:
        """Raises NotFound."""
        return _info(self._entry(session_id).row(session_id))

    async def page(self, *, after: str = "", limit: int = 100) -> list[SessionInfo]:
        """Sessions in the order of their ids, those after one id."""
        found = await self._store.read(lambda db: table.read_page(db, after, limit))
        return [_info(row) for row in found]

    async def delete(self, session_id: str) -> None:
        """Ends a session and forgets its turns; a request in flight gets a Conflict.

        Raises NotFound.
        """
        self._entry(session_id)
        await self._end([session_id], f"session {session_id!r} was deleted")
        self.counts.deleted += 1

    async def sweep(self) -> int:
        """Deletes what nobody used for the time to live and somebody has read; how many."""
        count = 0
        while expired := list(islice(self._expired(), SWEPT_AT_ONCE)):
            await self._end(expired, "the session expired")
            self.counts.expired += len(expired)
            count += len(expired)
        return count

    def _expired(self) -> Iterator[str]:
        since = self._clock() - self._ttl
        for name, entry in self._index.items():
            if entry.used >= since or not (entry.was_read or self._expire_unread):
                continue
            if name not in self._ending and self.hot.release(name):
                yield name

    def check_room(self, hot: CachedSession) -> None:
        """Raises TooLarge or Busy when one more turn is past a limit, Conflict when it ended."""
        hot.check_alive()
        self._limits.check_session(hot.name, hot.entry.turns, hot.entry.bytes, self.counts)
        self._limits.check_all(0, self.nbytes, self.counts)

    def count_breaks(self, hot: CachedSession) -> None:
        """Counts new breaks, and stores those of a session that is stored."""
        if not hot.unsaved:
            return
        self.counts.breaks.update(cause for _, cause in hot.unsaved)
        if hot.entry.turns and hot.ended is None:
            self._write(hot, [])

    async def store(
        self, hot: CachedSession, plan: PromptPlan, answers: Sequence[tuple[Completion, Any]]
    ) -> None:
        """See Session.commit."""
        hot.check_alive()
        nodes = hot.ledger.commit_all(plan, answers)
        entry = hot.entry
        entry.used = self._clock()
        entry.turns += len(nodes)
        self._index[hot.name] = entry
        written = self._write(hot, nodes)
        self.hot.touch(hot)
        await asyncio.shield(written)
        self.counts.turns += len(nodes)

    def _write(self, hot: CachedSession, nodes: list[Node]) -> asyncio.Future[None]:
        """Gives turns and new breaks to the store; a failure ends the session in memory."""
        entry, ledger = hot.entry, hot.ledger
        grown = hot.nbytes - entry.bytes
        entry.bytes += grown
        self.nbytes += grown
        row = entry.row(hot.name)
        breaks, hot.unsaved[:] = hot.unsaved[:], []

        def work(db: sqlite3.Connection) -> None:
            hot.check_alive()
            turns = [(node.index, ledger.turn_bytes(node)) for node in nodes]
            table.write_turns(db, row, turns, breaks)

        def undone(why: LockstepError) -> None:
            # At once: what was planned on these turns must not be stored without them.
            hot.ended = why

        def settled(future: asyncio.Future[None]) -> None:
            error = future.exception()
            if isinstance(error, LockstepError):
                self.counts.unwritten += len(nodes)
                self.hot.drop(hot, error)
                self._take_back(hot, len(nodes), grown)

        written = self._store.write(work, undone)
        written.add_done_callback(settled)
        return written

    def _take_back(self, hot: CachedSession, turns: int, nbytes: int) -> None:
        entry = hot.entry
        if self._index.get(hot.name) is not entry:
            return
        entry.turns -= turns
        entry.bytes -= nbytes
        self.nbytes -= nbytes
        if not entry.turns:
            del self._index[hot.name]

    async def _load(self, name: str, renderer: Renderer, tokenizer: bytes) -> CachedSession:
        if name in self._ending:
            raise Conflict(f"session {name!r} is being deleted: try again", param="x-session-id")
        entry = self._index.get(name)
        if entry is not None:
            task = self._loading.get(name)
            if task is None:
                task = asyncio.create_task(self._read(name, entry, renderer))
                self._loading[name] = task
                task.add_done_callback(lambda _: self._loading.pop(name))
            return await asyncio.shield(task)
        count = len(self._index) + self.hot.begun
        self._limits.check_all(count, self.nbytes, self.counts)
        now = self._clock()
        begun = CacheEntry(TurnRow(self._next_id, name, tokenizer, now, now, 0, 0, 0))
        self._next_id += 1
        self.counts.opened += 1
        hot = CachedSession(name, begun, Ledger(renderer, breaks=GATEWAY_BREAKS))
        self.hot.add(hot)
        return hot

    async def _read(self, name: str, entry: CacheEntry, renderer: Renderer) -> CachedSession:
        stored = await self._store.read(lambda db: table.read_session(db, entry.id))
        with whole(name):
            ledger = await renderer.offload(
                Ledger.from_turns, stored.turns, stored.breaks, renderer
            )
        if self._index.get(name) is not entry or name in self._ending:
            raise Conflict(f"session {name!r} was deleted meanwhile", param="x-session-id")
        hot = CachedSession(name, entry, ledger)
        self.hot.add(hot)
        self.counts.loaded += 1
        return hot

    async def _end(self, names: Iterable[str], why: str) -> None:
        """Forgets sessions: in memory once the file has forgotten them."""
        ending = {name: self._index[name] for name in names}
        for name in ending:
            if (hot := self.hot.find(name)) is not None:
                self.hot.drop(hot, Conflict(why, param="x-session-id"))
        self._ending.update(ending)
        ids = [entry.id for entry in ending.values()]
        removed = self._store.write(functools.partial(table.remove, ids=ids))
        removed.add_done_callback(functools.partial(self._forget, ending))
        await asyncio.shield(removed)

    def _forget(self, ending: dict[str, CacheEntry], removed: asyncio.Future[None]) -> None:
        self._ending.difference_update(ending)
        if removed.exception() is None:
            for name, entry in ending.items():
                self.nbytes -= entry.bytes
                del self._index[name]

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(min(SWEEP_SECONDS, self._ttl))
            try:
                await self.sweep()
            except LockstepError as error:
                log.warning("expired sessions stay for now: %s", error)

    def _entry(self, session_id: str) -> CacheEntry:
        entry = self._index.get(session_id)
        if entry is None or session_id in self._ending:
            raise NotFound(f"there is no session {session_id!r}", param="session_id")
        return entry


def _info(row: TurnRow) -> SessionInfo:
    unread = max(0, row.turns - row.read_turns)
    return SessionInfo(row.name, row.turns, row.bytes, row.created, row.used, unread)
