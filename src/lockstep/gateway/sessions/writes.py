"""Writes turns of cached sessions to the store, behind the turns that other gateways wrote.

A turn enters the ledger when it is stored. Turns of one session are written one batch after the
other; turns that wait together form a batch. If another gateway was faster, its turns are merged
first and ours are appended behind them: a ledger is a tree, so both become branches.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from lockstep.gateway.sessions.cache import CachedSession, SessionCache, WaitingTurn
from lockstep.gateway.sessions.keys import SessionKeys
from lockstep.gateway.sessions.limits import SessionCounts
from lockstep.gateway.sessions.loading import merge_stored
from lockstep.ledger import PromptPlan
from lockstep.ledger.codec import dump_turn
from lockstep.ledger.ledger import MadeTurn
from lockstep.ledger.tree import cost
from lockstep.storage.protocols import NewTurns, SessionStore
from lockstep.tokens import Completion
from lockstep.tokens.errors import Conflict, LockstepError, Unavailable

log = logging.getLogger(__name__)
ATTEMPTS = 200
"""Most attempts to append a batch; each one fails because another gateway's turn was stored."""
RETRY_SECONDS = 0.2
"""Seconds after a lost connection until the one retry, which finds out if the turn was stored."""


class SessionWrites:
    """The writes of one gateway."""

    def __init__(
        self, store: SessionStore, cache: SessionCache, keys: SessionKeys, counts: SessionCounts
    ) -> None:
        self._store, self._cache, self._keys, self._counts = store, cache, keys, counts
        self._running: set[asyncio.Task[None]] = set()

    async def commit(
        self, cached: CachedSession, plan: PromptPlan, choices: Sequence[tuple[Completion, Any]]
    ) -> None:
        """Store the choices of a reply; see Session.commit."""
        stored = self._enqueue(cached, plan, choices)
        count = await stored  # not in one line with +=, which reads before it waits
        self._counts.turns += count
        if cached.entry.terms is not None:
            with suppress(Unavailable):  # the turn is stored; the next call stores the end
                await self._keys.end_if_exhausted(cached.entry)

    def start_cut(
        self, cached: CachedSession, plan: PromptPlan, choices: Sequence[tuple[Completion, Any]]
    ) -> None:
        """Start to store a turn that was cut; see Session.commit_cut."""
        stored = self._enqueue(cached, plan, choices)
        cached.cut.add(stored)
        name, cut, counts = cached.name, cached.cut, self._counts

        def ended(written: asyncio.Future[int]) -> None:
            cut.discard(written)
            if written.cancelled() or (error := written.exception()) is None:
                counts.turns += 0 if written.cancelled() else written.result()
            else:
                log.warning("session %r: a cut turn is not stored: %s", name, error)

        stored.add_done_callback(ended)

    def _enqueue(
        self, cached: CachedSession, plan: PromptPlan, choices: Sequence[tuple[Completion, Any]]
    ) -> asyncio.Future[int]:
        cached.check_alive()
        stored: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        cached.waiting.append(WaitingTurn(plan, choices, stored))
        if cached.writing is None:
            # A task of its own: a client that disconnects does not cancel a write under way.
            cached.writing = self._start(self._write_waiting(cached))
        return stored

    async def wait(self, cached: CachedSession) -> None:
        """Wait for the turns of a session that are being written."""
        while (writing := cached.writing) is not None:
            await asyncio.shield(writing)

    def save_breaks(self, cached: CachedSession) -> None:
        """Start to store new prefix breaks; a session without turns stores them with its first."""
        if cached.entry.turns and cached.ended is None and cached.unsaved_breaks:
            self._start(self._write_breaks(cached))

    async def stop(self) -> None:
        """Wait for all writes under way."""
        while self._running:
            await asyncio.wait(self._running)

    def _start(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _write_waiting(self, cached: CachedSession) -> None:
        try:
            while cached.waiting:
                batch, cached.waiting = cached.waiting, []
                try:
                    await self._write_batch(cached, batch)
                except Exception as error:
                    # Raised where the turns were committed: no caller may wait for ever.
                    _fail(batch, error)
        finally:
            cached.writing = None

    async def _write_batch(self, cached: CachedSession, batch: list[WaitingTurn]) -> None:
        failures = 0
        for attempt in range(ATTEMPTS):
            # Made again in every attempt: the number of a turn is its position behind those that
            # were merged, and `append` succeeds only if the store has exactly the turns before it.
            made = self._make_turns(cached, batch)
            if not made:
                return
            breaks, cached.unsaved_breaks[:] = cached.unsaved_breaks[:], []
            try:
                appended = await self._append(cached, made, batch, breaks)
            except LockstepError as error:
                cached.unsaved_breaks.extend(breaks)
                if not self._store.shared or not isinstance(error, Unavailable) or failures:
                    self._counts.unwritten += len(made)
                    _fail(batch, error)
                    return
                # The connection may have broken after the commit. `_merge` then finds these turns
                # in the store, so that they are not appended twice.
                failures += 1
                await asyncio.sleep(RETRY_SECONDS)
                appended = False
            if appended or await self._merge(cached, made, batch, attempt):
                # Only now: a turn in the ledger that the store lost would be in the next prompt.
                cached.ledger.add_turns(made)
                self._cache.touch(cached)
                for turn in batch:
                    if not turn.stored.done():
                        turn.stored.set_result(len(turn.choices))
                return
        _fail(batch, Unavailable(f"session {cached.name!r} changes too fast: try again"))

    def _make_turns(self, cached: CachedSession, batch: list[WaitingTurn]) -> list[MadeTurn]:
        """Make the turns of a batch behind the ledger's turns.

        A turn that cannot be stored fails alone and is removed from the batch.
        """
        made: list[MadeTurn] = []
        for turn in batch[:]:
            try:
                self._check_open(cached)
                made += cached.ledger.make_turns(turn.plan, turn.choices, before=made)
            except Exception as error:
                # Raised where the turn was committed; the other turns are still stored.
                batch.remove(turn)
                _fail([turn], error)
        return made

    async def _append(
        self,
        cached: CachedSession,
        made: list[MadeTurn],
        batch: list[WaitingTurn],
        breaks: Sequence[tuple[bytes, str]],
    ) -> bool:
        def encode() -> list[bytes]:
            cached.check_alive()
            return [dump_turn(node, twin) for node, twin in made]

        tokens = sum(len(choice.token_ids) for turn in batch for choice, _ in turn.choices)
        new = NewTurns(
            len(cached.ledger.nodes), len(made), encode,
            cached.nbytes + sum(cost(node, twin) for node, twin in made), tokens, breaks,
        )  # fmt: skip
        return await self._store.append(cached.entry, new)

    async def _merge(
        self, cached: CachedSession, made: list[MadeTurn], batch: list[WaitingTurn], attempt: int
    ) -> bool:
        """Merge the turns that the store has; return whether they begin with the turns in `made`.

        They do when the connection broke after the commit and before its result. If the session
        was deleted, the batch fails and is emptied.
        """
        if attempt > 2:  # random, so that two gateways that race do not stay in step
            await asyncio.sleep(random.uniform(0, 0.002 * min(attempt, 20)))
        head = len(cached.ledger.nodes)
        try:
            loaded = await self._store.load(cached.name, cached.entry, head)
            merge_stored(cached, loaded)
            stored = [] if loaded is None else list(loaded.stored.turns[: len(made)])
        except LockstepError as error:
            if isinstance(error, Conflict):
                self._cache.drop(cached, error)
            _fail(batch, error)
            batch.clear()
            return False
        return stored == [dump_turn(node, twin) for node, twin in made]

    async def _write_breaks(self, cached: CachedSession) -> None:
        breaks, cached.unsaved_breaks[:] = cached.unsaved_breaks[:], []
        try:
            await self._store.add_breaks(cached.entry, breaks)
        except LockstepError as error:
            cached.unsaved_breaks.extend(breaks)  # stored with the next turn
            log.warning(
                "session %r: %d prefix breaks not stored until its next turn: %s",
                cached.name, len(breaks), error.message,
            )  # fmt: skip

    def _check_open(self, cached: CachedSession) -> None:
        cached.check_alive()
        terms = cached.entry.terms
        if terms is not None and terms.finished:
            raise Conflict(
                f"session {cached.name!r} was finished meanwhile: the turn is not stored",
                param="x-session-id",
            )


def _fail(batch: Sequence[WaitingTurn], error: Exception) -> None:
    for turn in batch:
        if not turn.stored.done():
            turn.stored.set_exception(_copy(error))


def _copy(error: Exception) -> Exception:
    """Return a copy for each caller: a traceback grows wherever its error is raised."""
    if isinstance(error, LockstepError):
        return error.with_message(error.message)
    return error
