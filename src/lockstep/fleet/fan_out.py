"""Runs one phase of an operation on many workers at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from time import perf_counter

from lockstep.fleet.worker import Worker
from lockstep.tokens.errors import DeadlineExceeded, EngineFailure, LockstepError
from lockstep.tokens.operation import Operation, WorkerResult

log = logging.getLogger(__name__)
Failures = dict[Worker, LockstepError]
Quarantine = Callable[[Worker, str], None]


async def each(
    phase: str,
    workers: Iterable[Worker],
    call: Callable[[Worker], Awaitable[None]],
    seconds: float,
    operation: Operation,
) -> tuple[list[Worker], Failures]:
    """Runs one phase on all workers at once, each for `seconds` at most.

    Returns those that succeeded and the errors of the others; how long each took is recorded.
    """

    async def one(worker: Worker) -> LockstepError | None:
        begun = perf_counter()
        try:
            await call(worker)
        except LockstepError as error:
            return error
        except TimeoutError:
            return late
        except Exception as error:
            # A driver's own fault must not leave the other workers half way.
            log.exception("%s on %s", phase, worker.id)
            return EngineFailure(f"{phase} failed within its driver: {error!r}")
        finally:
            result = operation.workers.setdefault(worker.id, WorkerResult())
            result.seconds[phase] = round(perf_counter() - begun, 6)
        return None

    called = list(workers)
    late = DeadlineExceeded(f"{phase} took longer than {seconds:g} s")
    tasks = [asyncio.create_task(one(worker)) for worker in called]
    try:
        # One clock for all, as all begin at once: a thousand would be a large part of the work.
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    errors = [late if task.cancelled() else task.result() for task in tasks]
    failures = {w: e for w, e in zip(called, errors, strict=True) if e is not None}
    for worker, error in failures.items():
        result = operation.workers[worker.id]
        result.status, result.phase, result.error = "failed", phase, error.message
    return [worker for worker in called if worker not in failures], failures


def quarantine_failed(
    failed: Failures, what: str, operation: Operation, quarantine: Quarantine
) -> None:
    """Quarantines each of these workers, and says so in the operation."""
    for worker, error in failed.items():
        reason = f"{what}: {error.message}"
        result = operation.workers[worker.id]
        result.status, result.error = "quarantined", reason
        quarantine(worker, reason)
