"""A collector of OTLP over HTTP, as real ones are: it takes what exporters send, in protobuf."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

KINDS = {1: "internal", 2: "server", 3: "client"}


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as the collector got it."""

    name: str
    kind: str
    trace: str
    id: str
    parent: str
    service: str
    start: int
    end: int
    error: str | None
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass
class Collector:
    url: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)

    def wait(
        self, enough: Callable[[list[ReceivedSpan]], Any], seconds: float = 20.0
    ) -> list[ReceivedSpan]:
        """All spans, once there are enough. They come in batches, some time after the request."""
        deadline = time.monotonic() + seconds
        while not enough(self.spans):
            assert time.monotonic() < deadline, [(s.service, s.name, s.trace) for s in self.spans]
            time.sleep(0.05)
        return list(self.spans)


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return None if kind is None else getattr(value, kind)


def _read(body: bytes) -> Iterator[ReceivedSpan]:
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        about = {each.key: _value(each.value) for each in resource.resource.attributes}
        for span in (span for scope in resource.scope_spans for span in scope.spans):
            yield ReceivedSpan(
                name=span.name,
                kind=KINDS[span.kind],
                trace=span.trace_id.hex(),
                id=span.span_id.hex(),
                parent=span.parent_span_id.hex(),
                service=about["service.name"],
                start=span.start_time_unix_nano,
                end=span.end_time_unix_nano,
                error=span.status.message if span.status.code == 2 else None,
                attributes={each.key: _value(each.value) for each in span.attributes},
            )


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens while the block runs."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            assert self.headers["content-type"] == "application/x-protobuf"
            collector.spans += _read(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
