"""Futures: results that clients fetch by request id, also repeatedly."""

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
"""How long a result is stored after it was first fetched: the response may have been lost."""
UNRETRIEVED_SECONDS = 7200.0
"""How long a result is stored that no client fetches."""
SWEEP_SIZE = 100
"""How many of the oldest requests are checked for expiry when a new one is opened."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a request: the body of its response, or the body of a failure."""

    body: bytes
    kind: str = JSON
    failed: bool = False

    @classmethod
    def of(cls, value: dict[str, Any]) -> Result:
        """Return a JSON result."""
        return cls(msgspec.json.encode(value))

    @classmethod
    def failure(cls, error: BaseException) -> Result:
        """Return the failure for an error, in the category user or server according to its status.

        An error that is not a LockstepError is a bug, and is logged with its traceback.
        """
        if not isinstance(error, LockstepError):
            log.error("call failed with an internal error: %r", error, exc_info=error)
        status = error.status if isinstance(error, LockstepError) else 500
        message = error.message if isinstance(error, LockstepError) else f"internal error: {error}"
        category = "user" if 400 <= status < 500 else "server"
        body = msgspec.json.encode({"error": message, "category": category})
        return cls(body, failed=True)


@dataclass(slots=True)
class Pending:
    """One request: its result once there is one, and the task that computes it."""

    request_id: str
    label: str
    done: asyncio.Event = field(default_factory=asyncio.Event)
    result: Result | None = None
    task: asyncio.Task[None] | None = None
    ended_at: float = 0.0
    fetched_at: float | None = None


@dataclass(slots=True)
class _EndedRequests:
    """The ended requests of one label, numbered from `first` on."""

    first: int
    pending: list[Pending] = field(default_factory=list)

    def trim(self, cursor: int) -> None:
        count = min(max(cursor - self.first, 0), len(self.pending))
        del self.pending[:count]
        self.first += count


class Futures:
    """The requests of one server process. Used from one event loop."""

    def __init__(self) -> None:
        self._process = secrets.token_hex(6)
        self._count = 0
        self._all: dict[str, Pending] = {}
        self._ended: dict[str, _EndedRequests] = {}
        # Above every cursor of earlier processes, so that an old cursor never skips a new result.
        self._first = int(time() * 1000)
        self._news = asyncio.Condition()
        self._polls: set[asyncio.Timeout] = set()
        self._ending = False

    def open(self, label: str = "") -> Pending:
        """Open a request. Requests with one label can be waited for together."""
        self._sweep()
        self._count += 1
        pending = Pending(f"{self._process}-{self._count}", label)
        self._all[pending.request_id] = pending
        return pending

    def start(
        self, work: Callable[[], Awaitable[Result]], label: str = "", pending: Pending | None = None
    ) -> Pending:
        """Start `work` in a task and return the request of its result."""
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
        """Set the result of a request, unless it already has one."""
        if pending.done.is_set():
            return
        pending.result, pending.ended_at = result, monotonic()
        pending.done.set()
        if pending.label:
            self._ended_of(pending.label).pending.append(pending)
            async with self._news:
                self._news.notify_all()

    def find(self, request_id: str) -> Pending:
        """Return the request of that id. Raises Gone for one that expired or never existed."""
        pending = self._all.get(request_id)
        if pending is None:
            reason = "its result has expired"
            if request_id.partition("-")[0] != self._process:
                reason = "the server was restarted since, and unsaved weights are lost"
            raise Gone(f"request {request_id!r} no longer exists: {reason}", param="request_id")
        return pending

    async def wait(self, request_id: str, seconds: float) -> Result | None:
        """Return the result of a request; None if there is none after `seconds`. Raises Gone."""
        pending = self.find(request_id)
        try:
            async with self._poll(seconds):
                await pending.done.wait()
        except TimeoutError:
            return None
        pending.fetched_at = pending.fetched_at or monotonic()
        return pending.result

    async def wait_any(self, label: str, cursor: int, seconds: float) -> tuple[list[Pending], int]:
        """Return the requests of a label that ended since `cursor`, and the next cursor.

        The list is empty after `seconds` without one. Requests before `cursor` are dropped.
        """
        ended = self._ended_of(label)
        ended.trim(cursor)
        try:
            async with self._poll(seconds), self._news:
                await self._news.wait_for(lambda: bool(ended.pending))
        except TimeoutError:
            pass
        return list(ended.pending), ended.first + len(ended.pending)

    def _ended_of(self, label: str) -> _EndedRequests:
        return self._ended.setdefault(label, _EndedRequests(self._first))

    def cancel(self, request_id: str) -> None:
        """Cancel the work on a request. Raises Gone."""
        task = self.find(request_id).task
        if task is not None:
            task.cancel()

    def drop(self, request_ids: Iterable[str]) -> None:
        """Let results expire that their client has received."""
        for request_id in request_ids:
            pending = self._all.get(request_id)
            if pending is not None and pending.done.is_set():
                pending.fetched_at = pending.fetched_at or monotonic()

    @asynccontextmanager
    async def _poll(self, seconds: float) -> AsyncIterator[None]:
        """Raise TimeoutError after `seconds`, or when the server shuts down."""
        limit = asyncio.timeout(0 if self._ending else seconds)
        self._polls.add(limit)
        try:
            async with limit:
                yield
        finally:
            self._polls.discard(limit)

    def end_polls(self) -> None:
        """End all polls, so that clients poll again later: the server is shutting down."""
        self._ending = True
        for limit in self._polls:
            limit.reschedule(0)

    async def close(self) -> None:
        """Cancel all running work."""
        tasks = [own.task for own in self._all.values() if own.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _sweep(self) -> None:
        """Drop expired results among the oldest requests, which end roughly in their order."""
        now = monotonic()
        for request_id in list(islice(self._all, SWEEP_SIZE)):
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
