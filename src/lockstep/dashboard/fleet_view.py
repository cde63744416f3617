"""The fleet as the dashboard shows it: a row for every worker and every operation."""

from __future__ import annotations

from collections import Counter, deque
from time import monotonic

import msgspec

from lockstep.fleet.fleet import Fleet
from lockstep.fleet.worker import Worker
from lockstep.tokens.errors import Unavailable
from lockstep.tokens.operation import Evidence, Operation

SHOWN_OPERATIONS = 40
RATE_SECONDS = 5.0
"""Window for tokens per second: responses deliver many tokens at once."""
SLOW_SECONDS, MOST_SLOW = 2.0, 12
STORE_SECONDS = 1.0
"""Interval at which operations are read from the store while none runs here."""


class WorkerRow(msgspec.Struct, frozen=True):
    """A worker. `rate` is in sampled tokens per second; `behind` counts its requests in flight by
    the number of versions accepted since they began.
    """

    id: str
    backend: str
    state: str
    version: str | None
    reason: str | None
    since: float
    in_flight: int
    rate: float
    sampled: int
    behind: dict[int, int]
    evidence: Evidence | None
    judged: float | None
    next_try: float | None
    gpus: tuple[str, ...] = ()


class WorkerPhases(msgspec.Struct, frozen=True):
    """The result of one worker in an operation, with seconds by phase."""

    status: str
    seconds: dict[str, float]
    error: str | None
    evidence: Evidence | None


class OperationRow(msgspec.Struct, frozen=True):
    """An operation on the fleet, running or ended. `phases` are the longest of any worker.

    `delta_bytes` is the size of new weights that were published as a delta, `changed` the share of
    values that it changes. `fetched_bytes` were downloaded from a store, by gateway and workers.
    """

    id: str
    kind: str
    status: str
    started: float
    ended: float | None
    version: str | None
    nbytes: int | None
    delta_bytes: int | None
    changed: float | None
    fetched_bytes: int | None
    pause_seconds: float | None
    phases: dict[str, float]
    workers: dict[str, WorkerPhases]
    warnings: list[str]
    error: str | None


class FleetTotals(msgspec.Struct, frozen=True):
    """Totals of the fleet. `role` is the role of this gateway among those that share the fleet."""

    model: str | None
    version: str | None
    paused: str | None
    serving: int
    workers: int
    in_flight: int
    waiting: int
    rate: float
    adapters: dict[str, str]
    role: str
    leader: str | None
    gateways: int


class SlowRequest(msgspec.Struct, frozen=True):
    """A request that has been running for long."""

    worker: str
    session: str | None
    seconds: float
    behind: int


class FleetView:
    """Reader of a fleet. It keeps the counts of earlier readings, from which rates are computed."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._counts: dict[str, deque[tuple[float, int]]] = {}
        self._stored: dict[str, OperationRow] = {}
        self._read_at, self._were_running = -STORE_SECONDS, False

    def workers(self) -> dict[str, WorkerRow]:
        """Return every worker by its id."""
        now = monotonic()
        workers = self._fleet.pool.workers
        for gone in self._counts.keys() - {worker.id for worker in workers}:
            del self._counts[gone]
        return {worker.id: self._row(worker, now) for worker in workers}

    async def operations(self) -> dict[str, OperationRow]:
        """Return the last operations and the running ones, by id."""
        running = self._fleet.operations.running
        if running or self._were_running or monotonic() - self._read_at >= STORE_SECONDS:
            await self._read_operations()
        self._were_running = bool(running)
        return self._stored | {operation.id: operation_row(operation) for operation in running}

    async def _read_operations(self) -> None:
        try:
            latest = await self._fleet.operations.latest(SHOWN_OPERATIONS)
        except Unavailable:  # the store is unavailable: show the operations read before
            return
        self._read_at = monotonic()
        ended = {key: row for key, row in self._stored.items() if row.ended is not None}
        self._stored = {
            operation.id: ended.get(operation.id) or operation_row(operation)
            for operation in latest
        }

    def totals(self, rows: dict[str, WorkerRow], model: str | None) -> FleetTotals:
        """Return the totals of the fleet, given its workers."""
        fleet, leadership = self._fleet, self._fleet.leadership.view()
        return FleetTotals(
            model=model,
            version=fleet.desired.version,
            paused=fleet.desired.paused,
            serving=sum(row.state == "serving" for row in rows.values()),
            workers=len(rows),
            in_flight=fleet.pool.in_flight,
            waiting=fleet.pool.waiting,
            rate=round(sum(row.rate for row in rows.values()), 1),
            adapters={name: spec.label for name, spec in fleet.desired.adapters.items()},
            role=leadership.role,
            leader=leadership.leader,
            gateways=len(leadership.gateways),
        )

    def slow(self) -> list[SlowRequest]:
        """Return the requests that have been at a worker for longest."""
        now = monotonic()
        old = [
            (now - attempt.begun, worker, attempt)
            for worker in self._fleet.pool.workers
            for attempt in worker.attempts
            if now - attempt.begun > SLOW_SECONDS
        ]
        old.sort(key=lambda entry: -entry[0])
        return [
            SlowRequest(
                worker.id, attempt.session, round(age, 1), worker.accepted.behind(attempt.mark)
            )
            for age, worker, attempt in old[:MOST_SLOW]
        ]

    def _row(self, worker: Worker, now: float) -> WorkerRow:
        behind = Counter(worker.accepted.behind(attempt.mark) for attempt in worker.attempts)
        next_try = self._fleet.pool.next_try(worker)
        return WorkerRow(
            id=worker.id,
            backend=worker.admin.name if worker.admin is not None else "",
            state="held" if worker.held and worker.serves else worker.state,
            version=worker.version,
            reason=worker.reason,
            since=worker.since,
            in_flight=worker.in_flight,
            rate=self._rate(worker, now),
            sampled=worker.sampled,
            behind=dict(sorted(behind.items())),
            evidence=worker.evidence,
            judged=worker.judged,
            next_try=None if next_try is None else round(next_try),
            gpus=worker.gpus,
        )

    def _rate(self, worker: Worker, now: float) -> float:
        counts = self._counts.setdefault(worker.id, deque())
        counts.append((now, worker.sampled))
        while len(counts) > 2 and counts[1][0] <= now - RATE_SECONDS:
            counts.popleft()
        begun, before = counts[0]
        seconds = now - begun
        return round((worker.sampled - before) / seconds, 1) if seconds > 0 else 0.0


def operation_row(operation: Operation) -> OperationRow:
    """Return an operation with its phases so far."""
    phases: dict[str, float] = {}
    for result in operation.workers.values():
        for phase, seconds in result.seconds.items():
            phases[phase] = max(phases.get(phase, 0.0), seconds)
    delta = operation.delta
    fetches = [operation.fetched, *(result.fetched for result in operation.workers.values())]
    fetched = [fetch.nbytes for fetch in fetches if fetch is not None]
    return OperationRow(
        id=operation.id,
        kind=operation.kind,
        status=operation.status,
        started=operation.started,
        ended=operation.ended,
        version=operation.version,
        nbytes=operation.nbytes,
        delta_bytes=None if delta is None else delta.nbytes,
        changed=None if delta is None else round(delta.changed / max(delta.values, 1), 6),
        fetched_bytes=sum(fetched) if fetched else None,
        pause_seconds=operation.pause_seconds,
        phases=phases,
        workers={
            name: WorkerPhases(phases.status, dict(phases.seconds), phases.error, phases.evidence)
            for name, phases in operation.workers.items()
        },
        warnings=list(operation.warnings),
        error=operation.error,
    )  # fmt: skip
