"""The messages of the dashboard's event stream, typed."""

from __future__ import annotations

import msgspec

from lockstep.tokens.operation import Evidence


class WorkerRow(msgspec.Struct, frozen=True):
    """A worker now. `rate` is in sampled tokens a second; `behind` counts its requests in flight
    by how many versions were accepted since they began."""

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
    """How one worker fared in an operation: seconds by phase."""

    status: str
    seconds: dict[str, float]
    error: str | None
    evidence: Evidence | None


class OperationRow(msgspec.Struct, frozen=True):
    """A change of the fleet, running or not. `phases` are the longest of any worker."""

    id: str
    kind: str
    status: str
    started: float
    ended: float | None
    version: str | None
    nbytes: int | None
    pause_seconds: float | None
    phases: dict[str, float]
    workers: dict[str, WorkerPhases]
    warnings: list[str]
    error: str | None


class FleetTotals(msgspec.Struct, frozen=True):
    """The fleet as one. `role` is that of this gateway among those that share the fleet."""

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


class RouteRow(msgspec.Struct, frozen=True):
    """Requests of one route in the last seconds; latencies are read from histogram buckets."""

    route: str
    rate: float
    errors: float
    p50: float | None
    p95: float | None
    total: int


class SlowRequest(msgspec.Struct, frozen=True):
    """A request that is under way for long."""

    worker: str
    session: str | None
    seconds: float
    behind: int


class GatewayHealth(msgspec.Struct, frozen=True):
    """How the gateway itself is."""

    rate: float
    errors: float
    p50: float | None
    p95: float | None
    loop_p99: float | None
    loop_worst: float | None
    memory: int
    tasks: int
    cpu: float
    viewers: int
    routes: list[RouteRow]
    slow: list[SlowRequest]
    store: dict[str, int]


class RunMark(msgspec.Struct, frozen=True):
    """What changes when a run directory has something new."""

    name: str
    size: int
