"""Runs requests on a fleet: the right worker, a bounded number at once, another if one fails."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TypeVar

from lockstep.backends import ModelCard, TransportName
from lockstep.fleet.control.accepted_versions import AcceptedVersions
from lockstep.fleet.members import Gate, Members, State, Worker
from lockstep.fleet.routing.admission import AdmissionLimiter
from lockstep.fleet.routing.affinity import Affinity
from lockstep.fleet.routing.rendezvous import RendezvousHash
from lockstep.tokens import LogprobMode
from lockstep.tokens.errors import (
    BadRequest,
    DeadlineExceeded,
    EngineFailure,
    Unavailable,
)

__all__ = ["Pool", "State", "Worker"]

T = TypeVar("T")
ASKED_FOR_MODELS = 16
"""Workers asked for their models at once; in a larger fleet these stand for the others."""


ENGINES_BROKEN = 2
"""Engines that one request may break: the second says that it is the request, not the engine."""


class Pool:
    """The workers behind one URL.

    Requests with the same route go to the same worker while it serves and is not overloaded. At
    most `max_in_flight` run at once; `queue_limit` more wait, for `queue_seconds` at most. One
    whose worker fails before anything was delivered is tried on others, `attempts` times in all:
    a request that kills workers must not kill a fleet.
    """

    def __init__(
        self,
        *,
        max_in_flight: int = 1024,
        queue_limit: int = 4096,
        queue_seconds: float = 60.0,
        load_factor: float = 1.25,
        probe_seconds: float = 1.0,
        attempts: int = 4,
    ) -> None:
        if attempts < 1:
            raise BadRequest(f"attempts is {attempts}: expected at least 1", param="attempts")
        self._ring: RendezvousHash[Worker] = RendezvousHash(load_factor)
        self.agreement = AcceptedVersions()
        self._members = Members(self._ring, probe_seconds, self.agreement)
        self._slots = AdmissionLimiter(max_in_flight, queue_limit, queue_seconds)
        self._attempts = attempts
        self._retry_after = probe_seconds

    async def __aenter__(self) -> Pool:
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._slots.close(Unavailable("this server is shutting down: send it to another one"))
        await self._members.close()

    @property
    def workers(self) -> Sequence[Worker]:
        """Every worker, serving or not, in the order they came."""
        return tuple(self._members.workers.values())

    @property
    def in_flight(self) -> int:
        return self._slots.taken

    @property
    def waiting(self) -> int:
        return self._slots.waiting

    async def add(
        self,
        url: str,
        *,
        worker_id: str | None = None,
        transport: TransportName | None = None,
        api_key: str | None = None,
        logprob_mode: LogprobMode | None = None,
    ) -> Worker:
        """Takes a worker in; its id is by default its host and port.

        One that cannot be reached is taken in as down, and serves once it can. `transport` is
        found out unless it is given; `logprob_mode` is needed for servers that do not tell.
        Raises Conflict when the id exists, BadRequest for what is no URL.
        """
        return await self._members.add(
            url,
            worker_id=worker_id,
            transport=transport,
            api_key=api_key,
            logprob_mode=logprob_mode,
        )

    async def remove(self, worker_id: str, *, drain_seconds: float = 30.0) -> None:
        """Gives the worker nothing new, waits for what it has, and forgets it. Raises NotFound."""
        await self._members.remove(worker_id, drain_seconds)

    def gate(self, gate: Gate) -> None:
        """Has `gate` called for every worker before it serves; what it raises keeps it out."""
        self._members.gate = gate

    def leave_out(self, worker_id: str, reason: str) -> None:
        """Gives that worker nothing more until it passes the gate again. Raises NotFound."""
        self._members.leave_out(self._members.get(worker_id), reason)

    def hold(self, worker_id: str, held: bool) -> None:
        """Gives that worker no new requests while it is held, whatever its state."""
        self._members.hold(self._members.get(worker_id), held)

    def next_try(self, worker_id: str) -> float | None:
        """Seconds until a worker that is left out is tried again; None when it serves."""
        worker = self._members.workers.get(worker_id)
        if worker is None or worker.state != "down" or worker.due == math.inf:
            return None
        return max(worker.due - asyncio.get_running_loop().time(), 0.0)

    def check(self, worker_id: str) -> None:
        """Has that worker probed now, because it was restarted, say. Raises NotFound."""
        self._members.check(self._members.get(worker_id))

    async def wait_ready(self, count: int, seconds: float) -> None:
        """Returns when `count` workers serve. Raises Unavailable that names the others if late."""
        await self._members.wait(count, seconds)

    async def run(self, route: Affinity, call: Callable[[Worker], Awaitable[T]]) -> T:
        """The result of `call` on the route's worker.

        `call` raises Unavailable when the worker could not serve it: that worker is left out until
        it is healthy, and another is tried. After EngineFailure the worker is probed and one other
        is tried. Any other error is the answer. Raises Unavailable when nobody serves, and Busy
        when too many wait; both say when to come back.
        """
        self._check_any()
        if not self._slots.take_now():
            await self._slots.take()
        attempt = _Attempt(self, route)
        try:
            while True:
                with attempt as worker:
                    return await call(worker)
        finally:
            self._slots.give()

    async def stream(
        self, route: Affinity, open: Callable[[Worker], AsyncIterator[T]]
    ) -> AsyncGenerator[T, None]:
        """The items of what `open` returns for the route's worker; as `run`, up to the first item.

        After it the request stays where it is: an error is raised to the caller, who has seen a
        part of the answer.
        """
        self._check_any()
        if not self._slots.take_now():
            await self._slots.take()
        attempt = _Attempt(self, route)
        try:
            while True:
                with attempt as worker:
                    items = open(worker)
                    try:
                        async for item in items:
                            attempt.delivered = True
                            yield item
                    finally:
                        close = getattr(items, "aclose", None)
                        if close is not None:
                            await close()
                    return
        finally:
            self._slots.give()

    async def models(self) -> list[ModelCard]:
        """The models that all workers serve, base first. Raises Unavailable when none can tell.

        The weight version is None while workers differ in it.
        """
        self._check_any()
        serving = self._serving()
        asked = random.sample(serving, min(len(serving), ASKED_FOR_MODELS))
        lists = await self._each(asked, lambda worker: worker.transport.models())
        common = {card.id: card for card in lists[0]}
        for cards in lists[1:]:
            found = {card.id: card for card in cards}
            common = {
                name: _both(card, found[name]) for name, card in common.items() if name in found
            }
        return sorted(common.values(), key=lambda card: card.parent is not None)

    async def abort(self, request_id: str) -> int:
        """Ends that request wherever it runs; how many were really stopped."""
        self._check_any()
        workers = [one for one in self.workers if one.state != "down"]
        counts = await self._each(workers, lambda worker: worker.transport.abort(request_id))
        return sum(count or 0 for count in counts)

    async def _each(
        self, workers: Sequence[Worker], call: Callable[[Worker], Awaitable[T]]
    ) -> list[T]:
        """The answers of those workers that have one; a worker that is gone has nothing to say.

        Raises Unavailable when all are gone, and any other error.
        """
        noted = [worker.changes for worker in workers]
        answers = await asyncio.gather(*map(call, workers), return_exceptions=True)
        good: list[T] = []
        for worker, changes, answer in zip(workers, noted, answers, strict=True):
            if isinstance(answer, Unavailable):
                self._members.failed(worker, changes, answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                good.append(answer)
        if not good:
            raise self._nobody()
        return good

    def _serving(self) -> list[Worker]:
        return [one for one in self.workers if one.state == "serving"]

    def _check_any(self) -> None:
        if not len(self._ring):
            raise self._nobody()

    def _nobody(self) -> Unavailable:
        reasons = "; ".join(self._members.why_down()) or "none was added"
        return Unavailable(f"no worker serves: {reasons}", retry_after=self._retry_after)


class _Attempt:
    """One request on its way. Entered, it picks a worker; left with a failure that another worker
    may mend, it swallows it, so that the caller enters again."""

    __slots__ = ("_broke", "_changes", "_pool", "_route", "_tried", "_worker", "delivered")

    def __init__(self, pool: Pool, route: Affinity) -> None:
        self._pool = pool
        self._route = route
        self._tried: list[Worker] = []
        self._broke = 0
        self.delivered = False

    def __enter__(self) -> Worker:
        pool, pinned = self._pool, self._route.worker
        if pinned is None:
            found = pool._ring.pick(self._route.key, self._tried)
            if found is None:
                raise pool._nobody()
            worker = found
        else:
            worker = pool._members.get(pinned)
            if worker.state != "serving":
                raise Unavailable(
                    f"worker {pinned!r} was asked for and is {worker.state} ({worker.error}): "
                    "leave the choice of the worker open, or try again later",
                    param="worker",
                    retry_after=pool._retry_after,
                )
        self._worker, self._changes = worker, worker.changes
        pool._ring.begin(worker)
        return worker

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None
    ) -> bool:
        pool, worker = self._pool, self._worker
        pool._ring.end(worker)
        if worker.state == "draining" and not worker.in_flight:
            worker.idle.set()
        if error is None:
            worker.strikes = 0
        elif isinstance(error, Unavailable):
            pool._members.failed(worker, self._changes, error)
            return self._goes_on(error)
        elif isinstance(error, EngineFailure):
            pool._members.check(worker)
            self._broke += 1
            return self._broke < ENGINES_BROKEN and not self.delivered and self._another()
        elif isinstance(error, DeadlineExceeded):
            # Another worker is not asked: the request itself may take that long.
            pool._members.check(worker)
        return False

    def _goes_on(self, error: Unavailable) -> bool:
        pool = self._pool
        if error.retry_after is None:
            error.retry_after = pool._retry_after
        if self.delivered:
            raise Unavailable(
                f"worker {self._worker.id} failed after a part of the answer was delivered, so it "
                f"is not tried elsewhere: {error.message}",
                retry_after=error.retry_after,
            ) from error
        return self._another()

    def _another(self) -> bool:
        """Whether there is another worker to try, and may be."""
        pool = self._pool
        self._tried.append(self._worker)
        if self._route.worker is not None or len(self._tried) >= pool._attempts:
            return False
        return pool._ring.pick(self._route.key, self._tried) is not None


def _both(one: ModelCard, other: ModelCard) -> ModelCard:
    lengths = [card.max_model_len for card in (one, other) if card.max_model_len is not None]
    same = one.weight_version == other.weight_version
    plans = one.numerics, other.numerics
    return replace(
        one,
        max_model_len=min(lengths, default=None),
        weight_version=one.weight_version if same else None,
        numerics=plans[0].joined(plans[1]) if plans[0] and plans[1] else None,
    )
