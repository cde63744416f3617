"""One phase of an operation, run on many workers at once."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, fields
from time import perf_counter

from lockstep import tracing
from lockstep.fleet.worker import Worker
from lockstep.tokens.errors import (
    BadRequest,
    DeadlineExceeded,
    EngineFailure,
    LockstepError,
    Superseded,
    Unavailable,
)
from lockstep.tokens.operation import Operation, WorkerResult

log = logging.getLogger(__name__)
Failures = dict[Worker, LockstepError]
Quarantine = Callable[[Worker, str], None]
SLOWER = 2.0
"""A straggler may take this many times as long as most workers, if that exceeds its budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseBudgets:
    """Seconds that one worker may take for each phase.

    `swap` is for the commit of weights that were proved while staged, `commit` for a commit that
    loads them. A worker that is not done `straggler` seconds after most others is left behind.
    Staging, during which the fleet keeps serving, may take `stage_straggler` seconds longer on cold
    disks.
    """

    stage: float = 600.0
    pause: float = 60.0
    swap: float = 10.0
    commit: float = 120.0
    prove: float = 60.0
    resume: float = 10.0
    straggler: float = 10.0
    stage_straggler: float = 60.0

    @classmethod
    def parse(cls, options: Iterable[str]) -> PhaseBudgets:
        """Return the budgets with those set by options of the form NAME=SECONDS. Raises
        BadRequest."""
        names = [field.name for field in fields(cls)]
        budgets: dict[str, float] = {}
        for option in options:
            name, _, number = option.partition("=")
            if name not in names or not re.fullmatch(r"\d{1,6}(\.\d{1,3})?", number, re.ASCII):
                raise BadRequest(
                    f"--budget is {option!r}: expected NAME=SECONDS, with one of "
                    f"{', '.join(names)}",
                    param="budget",
                )
            budgets[name] = float(number)
        return cls(**budgets)


async def run_phase(
    phase: str,
    workers: Iterable[Worker],
    call: Callable[[Worker], Awaitable[None]],
    seconds: float,
    operation: Operation,
    *,
    straggler: float = math.inf,
) -> tuple[list[Worker], Failures]:
    """Run one phase on all workers at once, each for `seconds` at most.

    Once half of the workers have succeeded, the others get `straggler` seconds more, or SLOWER
    times the time that the first half took. Returns the workers that succeeded and the errors of
    the others. The operation records how long each took.
    """
    called = list(workers)
    if (tracer := tracing.active) is None or not called:
        return await _run_phase(phase, called, call, seconds, operation, straggler)
    attributes = {"lockstep.operation": operation.kind, "lockstep.operation_id": operation.id}
    with tracer.span(f"{operation.kind} {phase}", attributes) as span:
        succeeded, failures = await _run_phase(phase, called, call, seconds, operation, straggler)
        span.set_attribute("lockstep.workers", len(succeeded))
        if failures:
            span.set_attribute("lockstep.workers_failed", [worker.id for worker in failures])
        return succeeded, failures


async def _run_phase(
    phase: str,
    called: list[Worker],
    call: Callable[[Worker], Awaitable[None]],
    seconds: float,
    operation: Operation,
    straggler: float,
) -> tuple[list[Worker], Failures]:
    loop = asyncio.get_running_loop()
    late = DeadlineExceeded(f"{phase} took longer than {seconds:g} s")
    start, succeeded = perf_counter(), 0
    timer: asyncio.TimerHandle | None = None

    def count_success() -> None:
        nonlocal succeeded, timer
        succeeded += 1
        if timer is None and 2 * succeeded >= len(called) and straggler < seconds:
            timer = loop.call_later(max(straggler, SLOWER * (perf_counter() - start)), leave_behind)

    def leave_behind() -> None:
        nonlocal late
        late = DeadlineExceeded(
            f"{phase} was not done after {perf_counter() - start:.1f} s, long after {succeeded} of "
            f"{len(called)} workers: it is left behind"
        )
        for task in tasks:
            task.cancel()

    async def run(worker: Worker) -> LockstepError | None:
        begun = perf_counter()
        try:
            await call(worker)
        except LockstepError as error:
            return error
        except TimeoutError:
            return late
        except Exception as error:
            # A bug in a driver must not leave the other workers between two phases.
            log.exception("%s on %s", phase, worker.id)
            return EngineFailure(f"{phase} failed within its driver: {error!r}")
        finally:
            result = operation.workers.setdefault(worker.id, WorkerResult())
            result.seconds[phase] = round(perf_counter() - begun, 6)
        count_success()
        return None

    tasks = [asyncio.create_task(run(worker)) for worker in called]
    try:
        # One timeout for all, as all begin at once: a thousand timers would be slow.
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
    finally:
        if timer is not None:
            timer.cancel()
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
    """Quarantine workers that failed, and record it in the operation."""
    for worker, error in failed.items():
        reason = f"{what}: {error.message}"
        result = operation.workers[worker.id]
        result.status, result.error = "quarantined", reason
        quarantine(worker, reason)


async def run_or_quarantine(
    phase: str,
    workers: list[Worker],
    call: Callable[[Worker], Awaitable[None]],
    seconds: float,
    operation: Operation,
    quarantine: Quarantine,
    *,
    undo: Callable[[Worker], Awaitable[None]] | None = None,
    undo_seconds: float = 10.0,
) -> None:
    """Run one phase on all workers, and quarantine those on which it fails.

    If it fails on all workers, they are not to blame. Then `undo` runs on each, where given, and
    only workers on which that fails too are quarantined.

    Raises Unavailable when the phase failed on all, and Superseded when they obey another gateway.
    """
    succeeded, failed = await run_phase(phase, workers, call, seconds, operation)
    first = next(iter(failed.values()), None)
    count = len(failed)
    if undo is not None and not succeeded:
        undone, failed = await run_phase("undo", failed, undo, undo_seconds, operation)
        for worker in undone:
            operation.workers[worker.id].status = "rolled_back"
    quarantine_failed(failed, f"{phase} failed", operation, quarantine)
    if first is not None and not succeeded:
        if isinstance(first, Superseded):
            raise first
        raise Unavailable(f"{phase} failed on all {count} workers: {first.message}")


async def undo_nothing(_: Worker) -> None:
    """Undo for phases that change nothing unless they succeed."""
