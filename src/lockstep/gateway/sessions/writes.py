"""Writes turns of cached sessions to the store, and takes in what other gateways wrote.

A turn enters the ledger when the store has it. Turns of one session are written one after the
other, those that wait together. Where another gateway was faster, its turns are taken in first, and
ours come behind them: a ledger is a tree, so that turns of the same moment are branches.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from lockstep.gateway.sessions.cache import CachedSession, SessionCache, WaitingTurn
from lockstep.gateway.sessions.entry import SessionEntry
from lockstep.gateway.sessions.keys import SessionKeys
from lockstep.gateway.sessions.limits import SessionCounts
from lockstep.gateway.sessions.samples import reading_back
from lockstep.gateway.sessions.store.interface import LoadedSession, NewTurns, SessionStore
from lockstep.ledger import PromptPlan
from lockstep.ledger.codec import dump_turn
from lockstep.ledger.ledger import MadeTurn
from lockstep.ledger.tree import cost
from lockstep.tokens import Completion
from lockstep.tokens.errors import Conflict, LockstepError, Unavailable

log = logging.getLogger(__name__)
ATTEMPTS = 200
"""How often a turn is tried behind newer ones: each time, somebody else's turn was stored."""
AGAIN_SECONDS = 0.2
"""How long after a lost connection it is tried whether the turn was stored, once."""


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
        """See Session.commit."""
        cached.check_alive()
        stored: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        cached.waiting.append(WaitingTurn(plan, choices, stored))
        if cached.writing is None:
            # A task of its own: a client that goes away does not undo a turn that is being written.
            cached.writing = self._start(self._write_all(cached))
        count = await stored  # not in one line with +=, which reads before it waits
        self._counts.turns += count
        if cached.entry.terms is not None:
            with suppress(Unavailable):  # the turn is stored; the next call notes it
                await self._keys.note_used_up(cached.entry)

    async def settled(self, cached: CachedSession) -> None:
        """Waits for the turns that are being written."""
        while (writing := cached.writing) is not None:
            await asyncio.shield(writing)

    def save_breaks(self, cached: CachedSession) -> None:
        """Stores new prefix breaks soon; those of a session without turns go with its first."""
        if cached.entry.turns and cached.ended is None and cached.unsaved_breaks:
            self._start(self._write_breaks(cached))

    async def stop(self) -> None:
        """Waits for what is being written."""
        while self._running:
            await asyncio.wait(self._running)

    def take_in(self, cached: CachedSession, loaded: LoadedSession | None) -> None:
        """Adds what others have stored. Raises Conflict when the session is gone or another one by
        now, and Unavailable for turns that cannot be read."""
        entry = cached.entry
        if loaded is None:
            raise Conflict(f"session {entry.name!r} was deleted", param="x-session-id")
        _check_same(entry, loaded.entry)
        with reading_back(entry.name):
            cached.ledger.extend(loaded.stored.turns, loaded.start, loaded.stored.breaks)
        entry.update(loaded.entry)

    def _start(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _write_all(self, cached: CachedSession) -> None:
        try:
            while cached.waiting:
                batch, cached.waiting = cached.waiting, []
                try:
                    await self._write_batch(cached, batch)
                except Exception as error:
                    # Raised again where the turns were committed: nobody may wait for ever.
                    _fail(batch, error)
        finally:
            cached.writing = None

    async def _write_batch(self, cached: CachedSession, batch: list[WaitingTurn]) -> None:
        failed = 0
        for attempt in range(ATTEMPTS):
            made = self._make(cached, batch)
            if not made:
                return
            breaks, cached.unsaved_breaks[:] = cached.unsaved_breaks[:], []
            try:
                appended = await self._append(cached, made, batch, breaks)
            except LockstepError as error:
                cached.unsaved_breaks.extend(breaks)
                if not self._store.shared or not isinstance(error, Unavailable) or failed:
                    self._counts.unwritten += len(made)
                    _fail(batch, error)
                    return
                failed += 1
                await asyncio.sleep(AGAIN_SECONDS)
                appended = False
            if appended or await self._moved(cached, made, batch, attempt):
                cached.ledger.add_turns(made)
                self._cache.touch(cached)
                for each in batch:
                    if not each.stored.done():
                        each.stored.set_result(len(each.choices))
                return
        _fail(batch, Unavailable(f"session {cached.name!r} changes too fast: try again"))

    def _make(self, cached: CachedSession, batch: list[WaitingTurn]) -> list[MadeTurn]:
        """The turns of the batch behind those of the ledger; who has a turn that cannot be is told
        so, and leaves the batch."""
        made: list[MadeTurn] = []
        for each in batch[:]:
            try:
                self._check_open(cached)
                made += cached.ledger.make_turns(each.plan, each.choices, after=len(made))
            except Exception as error:
                # Raised again where the turn was committed; the others of the batch go on.
                batch.remove(each)
                _fail([each], error)
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

        tokens = sum(len(one.token_ids) for each in batch for one, _ in each.choices)
        new = NewTurns(
            len(cached.ledger.nodes), len(made), encode,
            cached.nbytes + sum(cost(node, twin) for node, twin in made), tokens, breaks,
        )  # fmt: skip
        return await self._store.append(cached.entry, new)

    async def _moved(
        self, cached: CachedSession, made: list[MadeTurn], batch: list[WaitingTurn], attempt: int
    ) -> bool:
        """Takes in the turns that others stored; whether ours are among them, which a connection
        that broke had not told. Whoever waits for a session that is gone is told so."""
        if attempt > 2:
            await asyncio.sleep(random.uniform(0, 0.002 * min(attempt, 20)))
        head = len(cached.ledger.nodes)
        try:
            loaded = await self._store.load(cached.name, cached.entry, head)
            self.take_in(cached, loaded)
            theirs = [] if loaded is None else list(loaded.stored.turns[: len(made)])
        except LockstepError as error:
            if isinstance(error, Conflict):
                self._cache.drop(cached, error)
            _fail(batch, error)
            batch.clear()
            return False
        return theirs == [dump_turn(node, twin) for node, twin in made]

    async def _write_breaks(self, cached: CachedSession) -> None:
        breaks, cached.unsaved_breaks[:] = cached.unsaved_breaks[:], []
        try:
            await self._store.add_breaks(cached.entry, breaks)
        except LockstepError as error:
            cached.unsaved_breaks.extend(breaks)  # they go with the next turn
            log.warning("prefix breaks of session %r wait: %s", cached.name, error.message)

    def _check_open(self, cached: CachedSession) -> None:
        cached.check_alive()
        terms = cached.entry.terms
        if terms is not None and terms.finished:
            raise Conflict(
                f"session {cached.name!r} was finished meanwhile: the turn is not stored",
                param="x-session-id",
            )


def _check_same(entry: SessionEntry, now: SessionEntry) -> None:
    """Raises Conflict when the name of a session stands for another one by now."""
    name = entry.name
    if entry.id is not None and now.id != entry.id:
        problem = f"session {name!r} was deleted"
    elif entry.id is None and now.terms is not None:
        problem = f"session {name!r} was begun with a key of its own meanwhile: use another id"
    elif now.turns and entry.tokenizer != now.tokenizer:
        problem = (
            f"session {name!r} was recorded with another tokenizer: delete it, or use another id"
        )
    else:
        return
    raise Conflict(problem, param="x-session-id")


def _fail(batch: Sequence[WaitingTurn], error: Exception) -> None:
    for each in batch:
        if not each.stored.done():
            each.stored.set_exception(_copy(error))


def _copy(error: Exception) -> Exception:
    """An error of its own for everybody who raises it: tracebacks grow where they are raised."""
    if isinstance(error, LockstepError):
        return error.with_message(error.message)
    return error
