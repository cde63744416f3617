"""Prometheus metrics of one worker, read from the engine at scrape time."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lockstep.engine import Engine

COUNTERS = {
    "steps": "Batches computed.",
    "prompt_tokens": "Prompt tokens of admitted requests.",
    "generated_tokens": "Tokens sampled.",
    "prefix_query_tokens": "Tokens looked up in the prefix cache.",
    "prefix_hit_tokens": "Tokens found in the prefix cache.",
}
GAUGES = {
    "running": "Sequences in the batch.",
    "waiting": "Sequences in the queue.",
    "prefix_blocks": "Blocks in the prefix cache.",
    "slots": "Sequences that the KV cache holds at once.",
    "slot_tokens": "Tokens per sequence in the KV cache.",
}


class WorkerMetrics(Collector):
    """Collector that reads `engine.stats()`. Nothing is counted on the hot path."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for name, text in COUNTERS.items():
            counter = CounterMetricFamily(f"lockstep_worker_{name}", text, labels=["model"])
            counter.add_metric([self._model], stats[name])
            yield counter
        for name, text in GAUGES.items():
            gauge = GaugeMetricFamily(f"lockstep_worker_{name}", text, labels=["model"])
            gauge.add_metric([self._model], stats[name])
            yield gauge
        info = GaugeMetricFamily(
            "lockstep_worker_info",
            "Served model, version, state and arithmetic; the value is always 1.",
            labels=["model", "version", "state", "arithmetic"],
        )
        info.add_metric([self._model, stats["version"], stats["state"], stats["arithmetic"]], 1)
        yield info

    def exposition(self) -> tuple[bytes, str]:
        """Return the body and media type of a scrape."""
        encode, media_type = choose_encoder("")
        return encode(self.registry), media_type
