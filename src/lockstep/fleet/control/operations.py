"""Runs changes of the fleet one at a time, records them, and runs each key only once."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
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
"""Operations that could not be recorded and are kept in memory until they can."""


def error_of(operation: Operation) -> LockstepError:
    """The error that a failed operation ended with, carrying the operation.

    It is made from the record: the same for who waited and for who comes later with its key.
    """
    message = operation.error or f"{operation.kind} failed"
    kind = BY_CODE.get(operation.code or "", LockstepError)
    if kind.fields:  # the record keeps no more than every error has
        kind = LockstepError
    return kind(message, param=operation.param, operation=operation)


class Operations:
    """Runs operations one after the other. They go on when the caller goes away."""

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
    ) -> Operation:
        """Runs the work, or gives the outcome of the operation with the same key.

        What cannot be recorded is not begun, unless it may run `unrecorded`. `alone` names a field
        of the request: another operation under way with the same value there is a Conflict. Raises
        the error that stopped it, with the operation as its `operation`; Conflict for a key that
        meant another request, Busy when too many wait.
        """
        async with self._starting:  # or two of one key would both see none
            operation = None if key is None else await self._known(kind, dict(request), key)
            if operation is None:
                self._check_alone(request, alone)
                operation = self._begin(kind, dict(request), work, key, unrecorded)
        return await self._outcome(operation)

    def _check_alone(self, request: Mapping[str, str | None], field: str | None) -> None:
        for other in self.running if field is not None else ():
            if other.request.get(field or "") == request[field or ""]:
                raise Conflict(
                    f"{other.kind} of {request[field or '']!r} is under way as operation "
                    f"{other.id}: wait until it has ended",
                    param=field,
                )

    async def _known(self, kind: str, request: dict[str, str | None], key: str) -> Operation | None:
        known = next((operation for operation in self.running if operation.key == key), None)
        known = known or next((one for one in self._unwritten.values() if one.key == key), None)
        known = known or await self._store.by_key(key)
        if known is not None and (known.kind, known.request) != (kind, request):
            raise Conflict(
                f"the idempotency key {key!r} was used for {known.kind} with {known.request}: a "
                "new request needs a new key",
                param="Idempotency-Key",
            )
        # One that was cut off by the end of its process has no outcome to give: it runs again.
        return None if known is None or known.status == "lost" else known

    def _begin(
        self,
        kind: str,
        request: dict[str, str | None],
        work: Work,
        key: str | None,
        unrecorded: bool,
    ) -> Operation:
        if len(self._running) >= QUEUE:
            raise Busy(f"{len(self._running)} operations are waiting already: try again later")
        operation = Operation(secrets.token_hex(8), kind, request, key, started=time(), workers={})
        task = asyncio.create_task(
            self._do(operation, work, unrecorded), name=f"{kind} {operation.id}"
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
        """The last ones, newest first."""
        latest = await self._store.latest(count)
        # What the store has of these is how they began.
        written = [one for one in latest if one.id not in self._unwritten]
        return [*reversed(self._unwritten.values()), *written][:count]

    async def abandon(self, reason: str) -> None:
        """Ends what runs, at once: another gateway decides now. Who waits gets Unavailable."""
        self._abandoned = reason
        try:
            await self.close(0.0)
        finally:
            self._abandoned = None
        self.superseded = False  # the next leader is one of those that share the store
        self._unwritten.clear()  # the next leader has recorded them as lost

    async def close(self, seconds: float) -> None:
        """Waits for what runs, then cuts it off."""
        tasks = [task for _, task in self._running.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _outcome(self, operation: Operation) -> Operation:
        if operation.id in self._running:
            operation, task = self._running[operation.id]
            await asyncio.shield(task)
        if operation.status in ("failed", "lost"):
            raise error_of(operation)
        return operation

    async def _do(self, operation: Operation, work: Work, unrecorded: bool) -> None:
        try:
            async with self.lock:
                try:
                    await self._write(operation, needed=not unrecorded)
                    await work(operation)
                except asyncio.CancelledError:
                    if self._abandoned is None:
                        raise
                    self._lose(operation, self._abandoned)
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
        except asyncio.CancelledError:  # it was still waiting for its turn
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
        """Records it, and those before it that could not be. Raises Unavailable if it is `needed`;
        else it is kept in memory, as its outcome is true all the same."""
        self._unwritten[operation.id] = operation
        try:
            for one in list(self._unwritten.values()):
                await self._store.record(one)
                del self._unwritten[one.id]
        except LockstepError as error:
            if len(self._unwritten) > MOST_UNWRITTEN:
                del self._unwritten[next(iter(self._unwritten))]
            if needed:
                raise
            log.warning("%s was not recorded: %s", operation.kind, error.message)
