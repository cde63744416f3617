"""Operations of a fleet: run one at a time, recorded, and run once per idempotency key."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from time import time

from lockstep.storage.protocols import ControlStore
from lockstep.tokens.errors import BY_CODE, Busy, Conflict, LockstepError, Superseded, Unavailable
from lockstep.tokens.operation import Operation

log = logging.getLogger(__name__)
audit = logging.getLogger("lockstep.audit")
Work = Callable[[Operation], Awaitable[None]]
QUEUE = 64
"""Operations that may wait for their turn."""
MOST_UNWRITTEN = 100
"""Operations kept in memory because they could not be recorded."""


def error_of(operation: Operation) -> LockstepError:
    """Return the error that a failed operation ended with, carrying the operation.

    It is made from the record, so callers that waited and callers that retry with the same key get
    the same error.
    """
    message = operation.error or f"{operation.kind} failed"
    kind = BY_CODE.get(operation.code or "", LockstepError)
    if kind.fields:  # the record has only the fields that every error has
        kind = LockstepError
    return kind(message, param=operation.param, operation=operation)


class Operations:
    """Runs operations one after the other. They continue when their caller disconnects."""

    def __init__(self, store: ControlStore) -> None:
        self._store = store
        self.lock = asyncio.Lock()
        self._starting = asyncio.Lock()
        self._running: dict[str, tuple[Operation, asyncio.Task[None]]] = {}
        self._unwritten: dict[str, Operation] = {}
        self._abandoned: str | None = None
        self.superseded = False
        """Whether a worker has refused this gateway because it obeys another one."""

    @property
    def running(self) -> list[Operation]:
        return [operation for operation, _ in self._running.values()]

    async def run(
        self,
        kind: str,
        request: Mapping[str, str | None],
        work: Work,
        *,
        key: str | None = None,
        unrecorded: bool = False,
        alone: str | None = None,
        beside: bool = False,
    ) -> Operation:
        """Run `work`, or return the outcome of the operation with the same key.

        Work that cannot be recorded is not started, unless it may run `unrecorded`. `alone` names a
        field of the request: another operation under way with the same value there is a Conflict.
        Work that changes no weights may run `beside` other operations, which then do not wait for
        it; it ends when its caller leaves. Raises the error that stopped the work, with the
        operation as its `operation`; Conflict for a key that was used for another request, Busy
        when too many operations wait.
        """
        # Looking up the key and starting the operation must be one step: two requests with one key
        # would otherwise both find none, and run twice.
        async with self._starting:
            operation = None if key is None else await self._find(kind, dict(request), key)
            if operation is None:
                self._check_alone(request, alone)
                operation = self._begin(kind, dict(request), work, key, unrecorded, beside)
        task = self._running[operation.id][1] if operation.id in self._running else None
        try:
            return await self._outcome(operation)
        except asyncio.CancelledError:
            if beside and task is not None:
                task.cancel()
            raise

    def _check_alone(self, request: Mapping[str, str | None], field: str | None) -> None:
        for other in self.running if field is not None else ():
            if other.request.get(field or "") == request[field or ""]:
                raise Conflict(
                    f"{other.kind} of {request[field or '']!r} is under way as operation "
                    f"{other.id}: wait until it ends",
                    param=field,
                )

    async def _find(self, kind: str, request: dict[str, str | None], key: str) -> Operation | None:
        in_memory = (*self.running, *self._unwritten.values())
        operation = next((operation for operation in in_memory if operation.key == key), None)
        operation = operation or await self._store.by_key(key)
        if operation is not None and (operation.kind, operation.request) != (kind, request):
            raise Conflict(
                f"the idempotency key {key!r} was used for {operation.kind} with "
                f"{operation.request}: a new request needs a new key",
                param="Idempotency-Key",
            )
        # An operation that ended with its process has no outcome: it runs again.
        return None if operation is None or operation.status == "lost" else operation

    def _begin(
        self,
        kind: str,
        request: dict[str, str | None],
        work: Work,
        key: str | None,
        unrecorded: bool,
        beside: bool,
    ) -> Operation:
        if len(self._running) >= QUEUE:
            raise Busy(f"{len(self._running)} operations are queued already: try again later")
        operation = Operation(secrets.token_hex(8), kind, request, key, started=time(), workers={})
        task = asyncio.create_task(
            self._do(operation, work, unrecorded, beside), name=f"{kind} {operation.id}"
        )
        self._running[operation.id] = operation, task
        return operation

    async def get(self, operation_id: str) -> Operation | None:
        if operation_id in self._running:
            return self._running[operation_id][0]
        if operation_id in self._unwritten:
            return self._unwritten[operation_id]
        return await self._store.operation(operation_id)

    async def latest(self, count: int) -> list[Operation]:
        """Return the last operations, newest first."""
        latest = await self._store.latest(count)
        # The store may hold the start of an unwritten operation, without its outcome.
        written = [operation for operation in latest if operation.id not in self._unwritten]
        return [*reversed(self._unwritten.values()), *written][:count]

    async def abandon(self, reason: str) -> None:
        """Cancel all operations: another gateway leads now. Their callers get Unavailable."""
        self._abandoned = reason
        try:
            await self.close(0.0)
        finally:
            self._abandoned = None
        self.superseded = False  # the next leader is one of those that share the store
        self._unwritten.clear()  # the next leader has recorded them as lost

    async def close(self, seconds: float) -> None:
        """Wait up to `seconds` for running operations, then cancel them."""
        tasks = [task for _, task in self._running.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _outcome(self, operation: Operation) -> Operation:
        if operation.id in self._running:
            operation, task = self._running[operation.id]
            # Shielded: a caller that disconnects must not stop an update half way.
            await asyncio.shield(task)
        if operation.status in ("failed", "lost"):
            raise error_of(operation)
        return operation

    async def _do(self, operation: Operation, work: Work, unrecorded: bool, beside: bool) -> None:
        try:
            async with nullcontext() if beside else self.lock:
                try:
                    await self._write(operation, needed=not unrecorded)
                    await work(operation)
                except asyncio.CancelledError:
                    if self._abandoned is not None:
                        self._lose(operation, self._abandoned)
                        return
                    if not beside:
                        raise
                    self._lose(operation, "its caller left before it ended")
                    await self._write(operation, needed=False)
                    return
                except LockstepError as error:
                    self.superseded = self.superseded or isinstance(error, Superseded)
                    operation.status, operation.error = "failed", error.message
                    operation.code, operation.http_status = error.code, error.status
                    operation.param = error.param
                except Exception as error:
                    log.exception("%s failed", operation.kind)
                    operation.status, operation.error = "failed", f"internal error: {error!r}"
                    operation.code, operation.http_status = "internal_error", 500
                else:
                    operation.status = "done"
                operation.ended = time()
                await self._write(operation, needed=False)
                audit.info(
                    "%s %s %s %s: %s", operation.kind, operation.id, operation.request,
                    operation.status, operation.error or operation.version,
                )  # fmt: skip
        except asyncio.CancelledError:  # it was still queued
            if self._abandoned is None:
                raise
            self._lose(operation, self._abandoned)
        finally:
            self._running.pop(operation.id, None)

    @staticmethod
    def _lose(operation: Operation, reason: str) -> None:
        operation.status, operation.error, operation.ended = "lost", reason, time()
        operation.code, operation.http_status = Unavailable.code, Unavailable.status

    async def _write(self, operation: Operation, *, needed: bool) -> None:
        """Record an operation, and earlier ones that could not be recorded.

        Raises Unavailable if the record is `needed`. Otherwise the operation is kept in memory: its
        outcome is true without a record.
        """
        self._unwritten[operation.id] = operation
        try:
            for unwritten in list(self._unwritten.values()):
                await self._store.record(unwritten)
                del self._unwritten[unwritten.id]
        except LockstepError as error:
            if len(self._unwritten) > MOST_UNWRITTEN:
                del self._unwritten[next(iter(self._unwritten))]
            if needed:
                raise
            log.warning("%s was not recorded: %s", operation.kind, error.message)
