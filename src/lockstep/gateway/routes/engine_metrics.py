"""GET /v1/rl/metrics: the load of each engine under vLLM's metric names, for schedulers.

prime-rl derives its number of rollouts from the KV capacity, queues and preemptions of engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lockstep.fleet.worker import Worker
from lockstep.gateway.context import GatewayContext
from lockstep.tokens.errors import LockstepError

TIMEOUT_SECONDS = 2.0
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
COUNTERS = (
    "prompt_tokens_total", "generation_tokens_total", "num_preemptions_total",
    "prefix_cache_queries_total", "prefix_cache_hits_total", "request_success_total",
)  # fmt: skip
INFO = "cache_config_info"
SIZES = ("block_size", "num_gpu_blocks")
"""Labels of INFO whose product is the number of tokens that an engine can hold."""
LOCKSTEP_METRICS = {
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "prompt_tokens_total": "prompt_tokens_total",
    "generated_tokens_total": "generation_tokens_total",
    "prefix_query_tokens_total": "prefix_cache_queries_total",
    "prefix_hit_tokens_total": "prefix_cache_hits_total",
}
"""vLLM's names for the metrics of Lockstep workers."""


@dataclass(frozen=True, slots=True)
class EngineSample:
    """One value of one engine; `labels` are those beside the engine's name."""

    name: str
    engine: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()

    def line(self) -> str:
        """Return the sample as a line of Prometheus' text format."""
        pairs = [("engine", self.engine), *self.labels]
        labels = ",".join(f'{name}="{_escape(value)}"' for name, value in pairs)
        return f"vllm:{self.name}{{{labels}}} {self.value}"


class EngineMetricsRoutes:
    """GET /v1/rl/metrics, which reads the metrics of each worker when it is scraped."""

    def __init__(self, context: GatewayContext) -> None:
        self._pool = context.pool
        self.routes = [Route("/v1/rl/metrics", self.scrape)]

    async def scrape(self, _: Request) -> Response:
        serving = [worker for worker in self._pool.workers if worker.serves]
        by_worker = await asyncio.gather(*(_read_worker(worker) for worker in serving))
        samples = [sample for of_worker in by_worker for sample in of_worker]
        # Requests queued in the gateway are at no engine yet: they get an engine name of their own.
        samples.append(EngineSample("num_requests_waiting", "gateway", self._pool.waiting))
        return Response(_exposition(samples), media_type="text/plain; version=0.0.4")


async def _read_worker(worker: Worker) -> list[EngineSample]:
    """Return the samples of a worker's engines; without metrics, the requests sent to it."""
    try:
        body = await worker.client.get("/metrics", timeout=TIMEOUT_SECONDS)
        samples = list(read_samples(bytes(body).decode(), worker.id))
    except (LockstepError, ValueError):
        samples = []
    return samples or [EngineSample("num_requests_running", worker.id, worker.in_flight)]


def read_samples(text: str, worker: str) -> Iterator[EngineSample]:
    """Yield the samples in the metrics of a vLLM or Lockstep worker. Raises ValueError."""
    own: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            kind, _, name = sample.name.partition(":")
            if kind == "vllm" and name in (*GAUGES, *COUNTERS, INFO):
                yield _vllm_sample(name, sample.value, sample.labels, worker)
            elif sample.name.startswith("lockstep_worker_"):
                own[sample.name.removeprefix("lockstep_worker_")] = sample.value
    for name, value in own.items():
        if name in LOCKSTEP_METRICS:
            yield EngineSample(LOCKSTEP_METRICS[name], worker, value)
    if own.get("slots"):
        slots, tokens = int(own["slots"]), int(own["slot_tokens"])
        sizes = zip(SIZES, (str(tokens), str(slots)), strict=True)
        yield EngineSample(INFO, worker, 1.0, tuple(sizes))
        yield EngineSample("kv_cache_usage_perc", worker, own.get("running", 0.0) / slots)
        # The embedded engine never preempts: a sequence keeps its slot to the end.
        yield EngineSample("num_preemptions_total", worker, 0.0)


def _vllm_sample(name: str, value: float, labels: Mapping[str, str], worker: str) -> EngineSample:
    engine = labels.get("engine", "0")
    sizes = tuple((label, labels[label]) for label in SIZES if name == INFO and label in labels)
    return EngineSample(name, worker if engine == "0" else f"{worker}/{engine}", value, sizes)


def _exposition(samples: Iterable[EngineSample]) -> str:
    by_name: dict[str, list[str]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample.line())
    lines = []
    for name, of_name in by_name.items():
        kind = "counter" if name in COUNTERS else "gauge"
        lines += [f"# TYPE vllm:{name.removesuffix('_total')} {kind}", *of_name]
    return "\n".join([*lines, ""])


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
