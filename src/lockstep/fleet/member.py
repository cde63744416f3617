"""One worker as the fleet controls it: its admin driver, and how far it is to be believed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter, time
from typing import Literal

from lockstep.backends.admin import Admin
from lockstep.fleet.control.desired import Closeness
from lockstep.tokens.errors import DeadlineExceeded, EngineFailure, LockstepError
from lockstep.tokens.operation import Operation, WorkerResult

log = logging.getLogger(__name__)

MemberState = Literal["joining", "syncing", "proving", "serving", "draining", "quarantined"]


@dataclass(slots=True, eq=False)
class Member:
    """A worker's control side. Only a `serving` member gets traffic.

    `reason` says why it is quarantined; `since` when it came to its state (Unix time).
    `closeness` is how closely it followed the trainer when it proved its weights last.
    """

    id: str
    url: str
    admin: Admin
    state: MemberState = "joining"
    reason: str | None = None
    version: str | None = None
    since: float = field(default_factory=time)
    closeness: Closeness | None = None

    def become(self, state: MemberState, reason: str | None = None) -> None:
        if state != self.state:
            self.since = time()
        self.state, self.reason = state, reason


Failures = dict[Member, LockstepError]


async def each(
    phase: str,
    members: Iterable[Member],
    call: Callable[[Member], Awaitable[None]],
    seconds: float,
    operation: Operation,
) -> tuple[list[Member], Failures]:
    """Runs one phase on all members at once, each for `seconds` at most.

    Returns those that did it and the errors of the others; how long each took is recorded.
    """

    async def one(member: Member) -> LockstepError | None:
        begun = perf_counter()
        try:
            await call(member)
        except LockstepError as error:
            return error
        except TimeoutError:
            return late
        except Exception as error:
            # A driver's own fault must not leave the other workers half way.
            log.exception("%s on %s", phase, member.id)
            return EngineFailure(f"{phase} failed within its driver: {error!r}")
        finally:
            result = operation.workers.setdefault(member.id, WorkerResult())
            result.seconds[phase] = round(perf_counter() - begun, 6)
        return None

    asked = list(members)
    late = DeadlineExceeded(f"{phase} took longer than {seconds:g} s")
    tasks = [asyncio.create_task(one(member)) for member in asked]
    try:
        # One clock for all, as all begin at once: a thousand would be a large part of the work.
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    errors = [late if task.cancelled() else task.result() for task in tasks]
    failures = {m: e for m, e in zip(asked, errors, strict=True) if e is not None}
    for member, error in failures.items():
        result = operation.workers[member.id]
        result.status, result.phase, result.error = "failed", phase, error.message
    return [member for member in asked if member not in failures], failures
