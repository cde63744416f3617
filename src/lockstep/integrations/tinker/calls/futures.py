"""Results that clients come back for: each has a request id, and is there when asked for again."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic, time
from typing import Any

import msgspec

from lockstep.tokens.errors import Gone, LockstepError, NotFound

log = logging.getLogger(__name__)
PROTOBUF, JSON = "application/x-protobuf", "application/json"
RETRIEVED_SECONDS = 600.0
"""How long a result stays after it was first fetched: a response may have been lost on its way."""
UNRETRIEVED_SECONDS = 7200.0
SWEPT = 100
"""How many of the oldest requests are looked at when a new one comes."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a request came to: the body of its response, or why it failed.

    `category` of a failure says whose fault it is: user or server.
    """

    body: bytes
    kind: str = JSON
    failed: bool = False

    @classmethod
    def of(cls, value: dict[str, Any]) -> Result:
        """A result that is JSON."""
        return cls(msgspec.json.encode(value))

    @classmethod
    def failure(cls, error: BaseException) -> Result:
        """The failure that an error is; the caller's fault where its status says so.

        One that is none of Lockstep's own is a bug, and is logged with its traceback.
        """
        if not isinstance(error, LockstepError):
            log.error("a call failed: %r", error, exc_info=error)
        status = error.status if isinstance(error, LockstepError) else 500
        message = error.message if isinstance(error, LockstepError) else f"internal error: {error}"
        category = "user" if 400 <= status < 500 else "server"
        body = msgspec.json.encode({"error": message, "category": category})
        return cls(body, failed=True)


@dataclass(slots=True)
class Pending:
    """One request: its result when there is one, and whoever works on it."""

    request_id: str
    label: str
    done: asyncio.Event = field(default_factory=asyncio.Event)
    result: Result | None = None
    task: asyncio.Task[None] | None = None
    ended_at: float = 0.0
    fetched_at: float | None = None


@dataclass(slots=True)
class _Ended:
    """What ended under one label, from number `first` on."""

    first: int
    pending: list[Pending] = field(default_factory=list)

    def trim(self, cursor: int) -> None:
        seen = min(max(cursor - self.first, 0), len(self.pending))
        del self.pending[:seen]
        self.first += seen


class Futures:
    """The requests of one server process. Used from one event loop."""

    def __init__(self) -> None:
        self._process = secrets.token_hex(6)
        self._count = 0
        self._all: dict[str, Pending] = {}
        self._ended: dict[str, _Ended] = {}
        # Above every cursor of earlier processes: none of theirs must pass for one of these.
        self._first = int(time() * 1000)
        self._news = asyncio.Condition()
        self._polls: set[asyncio.Timeout] = set()
        self._ending = False

    def open(self, label: str = "") -> Pending:
        """A new request; those of one label can be waited for together."""
        self._sweep()
        self._count += 1
        pending = Pending(f"{self._process}-{self._count}", label)
        self._all[pending.request_id] = pending
        return pending

    def start(
        self, work: Callable[[], Awaitable[Result]], label: str = "", pending: Pending | None = None
    ) -> Pending:
        """A request that `work` is done for, at once."""
        pending = pending or self.open(label)
        pending.task = asyncio.create_task(self._run(pending, work))
        return pending

    async def _run(self, pending: Pending, work: Callable[[], Awaitable[Result]]) -> None:
        try:
            result = await work()
        except asyncio.CancelledError:
            result = Result.failure(NotFound("the request was cancelled"))
            await self.end(pending, result)
            raise
        except Exception as error:
            result = Result.failure(error)
        await self.end(pending, result)

    async def end(self, pending: Pending, result: Result) -> None:
        """Gives a request its result; the first one counts."""
        if pending.done.is_set():
            return
        pending.result, pending.ended_at = result, monotonic()
        pending.done.set()
        if pending.label:
            self._under(pending.label).pending.append(pending)
            async with self._news:
                self._news.notify_all()

    def find(self, request_id: str) -> Pending:
        """The request of that id. Raises Gone when there was or may have been one."""
        pending = self._all.get(request_id)
        if pending is None:
            why = "its result was dropped, as it was fetched long ago or by nobody for hours"
            if request_id.partition("-")[0] != self._process:
                why = "the server was restarted since; what was not saved before is lost"
            raise Gone(f"request {request_id!r} is not known any more: {why}", param="request_id")
        return pending

    async def wait(self, request_id: str, seconds: float) -> Result | None:
        """Its result, or None when it has none after so many seconds. Raises Gone."""
        pending = self.find(request_id)
        try:
            async with self._poll(seconds):
                await pending.done.wait()
        except TimeoutError:
            return None
        pending.fetched_at = pending.fetched_at or monotonic()
        return pending.result

    async def wait_any(self, label: str, cursor: int, seconds: float) -> tuple[list[Pending], int]:
        """What has ended under a label since `cursor`, and the next cursor; empty after a while.

        What came before `cursor` was seen, and is forgotten.
        """
        ended = self._under(label)
        ended.trim(cursor)
        try:
            async with self._poll(seconds), self._news:
                await self._news.wait_for(lambda: bool(ended.pending))
        except TimeoutError:
            pass
        return list(ended.pending), ended.first + len(ended.pending)

    def _under(self, label: str) -> _Ended:
        return self._ended.setdefault(label, _Ended(self._first))

    def cancel(self, request_id: str) -> None:
        """Stops the work on a request. Raises Gone."""
        task = self.find(request_id).task
        if task is not None:
            task.cancel()

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forgets results that their client has."""
        for request_id in request_ids:
            pending = self._all.get(request_id)
            if pending is not None and pending.done.is_set():
                pending.fetched_at = pending.fetched_at or monotonic()

    @asynccontextmanager
    async def _poll(self, seconds: float) -> AsyncIterator[None]:
        """Raises TimeoutError after so many seconds, or when the server ends."""
        limit = asyncio.timeout(0 if self._ending else seconds)
        self._polls.add(limit)
        try:
            async with limit:
                yield
        finally:
            self._polls.discard(limit)

    def end_polls(self) -> None:
        """Has everybody who waits come back later: the server ends."""
        self._ending = True
        for limit in self._polls:
            limit.reschedule(0)

    async def close(self) -> None:
        """Stops all work that is under way."""
        tasks = [each.task for each in self._all.values() if each.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _sweep(self) -> None:
        """Drops old results; looks at the oldest only, as they end roughly in their order."""
        now = monotonic()
        for request_id in list(islice(self._all, SWEPT)):
            pending = self._all[request_id]
            if not pending.done.is_set():
                continue
            fetched = pending.fetched_at
            late = now > (
                pending.ended_at + UNRETRIEVED_SECONDS
                if fetched is None
                else fetched + RETRIEVED_SECONDS
            )
            if late:
                del self._all[request_id]
                pending.result = None
