"""Health of the gateway process, computed from its metrics and the reading before."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic, process_time

import msgspec
from prometheus_client import CollectorRegistry

from lockstep.dashboard.fleet_view import SlowRequest

WINDOW_SECONDS = 10.0
REQUESTS = "lockstep_gateway_requests_total"
SECONDS = "lockstep_gateway_request_seconds_bucket"
LOOP = "lockstep_event_loop_delay_seconds_bucket"
TASKS = "lockstep_gateway_tasks"
STATM = Path("/proc/self/statm")
Buckets = dict[float, float]


class RouteRow(msgspec.Struct, frozen=True):
    """Requests of one route in the last seconds; latencies are estimated from histogram buckets."""

    route: str
    rate: float
    errors: float
    p50: float | None
    p95: float | None
    total: int


class GatewayHealth(msgspec.Struct, frozen=True):
    """Health of the gateway process."""

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


class _Look:
    """One reading: requests by route and status, and the buckets of histograms."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.at, self.cpu = monotonic(), process_time()
        self.requests: dict[tuple[str, str], float] = {}
        self.seconds: dict[str, Buckets] = {}
        self.loop: Buckets = {}
        self.tasks = 0
        for family in registry.collect():
            for sample in family.samples:
                labels = sample.labels
                if sample.name == REQUESTS:
                    self.requests[labels["route"], labels["status"]] = sample.value
                elif sample.name == SECONDS:
                    buckets = self.seconds.setdefault(labels["route"], {})
                    buckets[float(labels["le"])] = sample.value
                elif sample.name == LOOP and labels["clock"] == "wall":
                    self.loop[float(labels["le"])] = sample.value
                elif sample.name == TASKS:
                    self.tasks = int(sample.value)


class HealthView:
    """Rates and latencies over the last seconds in which the page was open."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._looks: deque[_Look] = deque()

    def read(
        self, slow: list[SlowRequest], store: Mapping[str, int], viewers: int
    ) -> GatewayHealth:
        """Return the current health. The first reading has no rates."""
        now = _Look(self._registry)
        self._looks.append(now)
        while len(self._looks) > 2 and self._looks[1].at <= now.at - WINDOW_SECONDS:
            self._looks.popleft()
        before = self._looks[0]
        span = max(now.at - before.at, 1e-9)
        routes = [self._route(name, before, now, span) for name in sorted(now.seconds)]
        routes = [row for row in routes if row.total]
        new = [_grown(now.seconds[name], before.seconds.get(name, {})) for name in now.seconds]
        loop = _grown(now.loop, before.loop)
        return GatewayHealth(
            rate=round(sum(row.rate for row in routes), 1),
            errors=round(sum(row.errors for row in routes), 2),
            p50=quantile(_summed(new), 0.5),
            p95=quantile(_summed(new), 0.95),
            loop_p99=quantile(loop, 0.99),
            loop_worst=quantile(loop, 1.0),
            memory=_memory(),
            tasks=now.tasks,
            cpu=round((now.cpu - before.cpu) / span, 3) if before is not now else 0.0,
            viewers=viewers,
            routes=sorted(routes, key=lambda row: (-row.rate, -row.total)),
            slow=slow,
            store=dict(store),
        )

    def _route(self, name: str, before: _Look, now: _Look, span: float) -> RouteRow:
        counts = {at: value for at, value in now.requests.items() if at[0] == name}
        new = {at: value - before.requests.get(at, 0.0) for at, value in counts.items()}
        failed = sum(value for (_, status), value in new.items() if status >= "429")
        buckets = _grown(now.seconds[name], before.seconds.get(name, {}))
        return RouteRow(
            route=name,
            rate=round(sum(new.values()) / span, 1),
            errors=round(failed / span, 2),
            p50=quantile(buckets, 0.5),
            p95=quantile(buckets, 0.95),
            total=int(sum(counts.values())),
        )


def quantile(buckets: Buckets, share: float) -> float | None:
    """Return a quantile, interpolated between the bounds of its bucket; None for an empty
    histogram.

    Beyond the last bound the result is that bound.
    """
    bounds = sorted(buckets)
    if not bounds or not buckets[bounds[-1]]:
        return None
    wanted, low, counted = share * buckets[bounds[-1]], 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= wanted and buckets[bound] > counted:
            if bound == float("inf"):
                return low
            inside = (wanted - counted) / (buckets[bound] - counted)
            return float(f"{low + (bound - low) * inside:.3g}")
        low, counted = bound, buckets[bound]
    return low


def _grown(now: Buckets, before: Buckets) -> Buckets:
    return {bound: value - before.get(bound, 0.0) for bound, value in now.items()}


def _summed(histograms: Sequence[Buckets]) -> Buckets:
    total: Buckets = {}
    for buckets in histograms:
        for bound, value in buckets.items():
            total[bound] = total.get(bound, 0.0) + value
    return total


def _memory() -> int:
    """Return the resident bytes of this process, in whole megabytes so that it rarely changes; 0 if
    unknown.
    """
    if not STATM.exists():
        return 0
    pages = int(STATM.read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20 << 20
