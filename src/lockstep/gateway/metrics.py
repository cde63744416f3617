"""Prometheus metrics of the gateway: requests by route and status, workers and sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep.gateway.context import GatewayContext
from lockstep.http.route_templates import RouteTemplates

BUCKETS = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0)
SESSIONS = {
    "live": "Sessions in the store.",
    "bytes": "Bytes of the sessions in the store.",
    "hot": "Sessions held in memory.",
    "hot_bytes": "Bytes of the sessions held in memory.",
    "evicted": "Sessions evicted from memory since the start; the store keeps them.",
    "turns": "Turns stored since the start.",
    "opened": "Sessions created since the start.",
    "loaded": "Sessions loaded from the store since the start.",
    "expired": "Idle sessions deleted since the start.",
    "deleted": "Sessions deleted on request since the start.",
    "unwritten": "Turns that could not be stored since the start; their requests failed.",
}
REFUSED = "Turns rejected since the start because the limit of {} was reached."
BREAKS = "Prefix breaks with the cause {} since the start."


class GatewayMetrics(Collector):
    """Counts requests when they end; reads workers and sessions when scraped."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "lockstep_gateway_requests", "Requests by route and status.", ["route", "status"],
            registry=self.registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "lockstep_gateway_request_seconds", "Seconds to the end of a response.", ["route"],
            buckets=BUCKETS, registry=self.registry,
        )  # fmt: skip
        self.registry.register(self)
        self.routes = [Route("/metrics", self.scrape)]

    def middleware(self, app: ASGIApp, templates: RouteTemplates) -> ASGIApp:
        """Return `app` with each request counted under the template of its route."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            status, started = 499, perf_counter()

            async def watched(message: Message) -> None:
                nonlocal status
                if message["type"] == "http.response.start":
                    status = message["status"]
                await send(message)

            try:
                await app(scope, receive, watched)
            finally:
                self.count(templates.of(scope["path"]), status, perf_counter() - started)

        return counted

    def count(self, route: str, status: int, seconds: float) -> None:
        """Count a finished request. `route` is a template such as /v1/models/{model}: with raw
        paths, a client could create any number of series."""
        requests, times = self.series(route, status)
        requests.inc()
        times.observe(seconds)

    def series(self, route: str, status: int) -> tuple[Counter, Histogram]:
        """Return the counter and the histogram of requests to a route that end with a status."""
        return self._requests.labels(route, str(status)), self._seconds.labels(route)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        in_flight = GaugeMetricFamily(
            "lockstep_gateway_worker_in_flight", "Requests running at a worker.", labels=["worker"]
        )
        serving = GaugeMetricFamily(
            "lockstep_gateway_worker_serving",
            "1 while a worker gets traffic, else 0.",
            labels=["worker"],
        )
        impossible = CounterMetricFamily(
            "lockstep_gateway_worker_impossible_responses",
            "Responses of a worker that no engine can return: ids outside the vocabulary, positive "
            "logprobs, more tokens than max_tokens.",
            labels=["worker"],
        )
        for worker in self._context.pool.workers:
            impossible.add_metric([worker.id], worker.impossible)
            in_flight.add_metric([worker.id], worker.in_flight)
            serving.add_metric([worker.id], worker.state == "serving")
        yield in_flight
        yield serving
        yield impossible
        tasks = GaugeMetricFamily("lockstep_gateway_tasks", "Tasks on the event loop.")
        tasks.add_metric([], len(asyncio.all_tasks()))
        yield tasks
        for name, value in self._context.sessions.stats().items():
            gauge = GaugeMetricFamily(f"lockstep_gateway_sessions_{name}", _sessions_help(name))
            gauge.add_metric([], value)
            yield gauge

    async def scrape(self, _: Request) -> Response:
        encode, media_type = choose_encoder("")
        return Response(encode(self.registry), media_type=media_type)


def _sessions_help(name: str) -> str:
    """Return the help text of a number of `Sessions.stats`."""
    kind, _, what = name.partition("_")
    if kind in ("refused", "breaks"):
        return (REFUSED if kind == "refused" else BREAKS).format(what)
    return SESSIONS[name]
