"""What tracing costs when it is off, and what it never does to a request when it is on."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator

import aiohttp
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lockstep import tracing
from lockstep.fleet.routing.affinity import Affinity
from lockstep.fleet.worker import Worker
from lockstep.http.handlers import EventStream
from lockstep.http.server.server import listen, serving, url_of
from lockstep.tokens.errors import BadRequest, EngineFailure, Unavailable
from lockstep.tracing.export import END_SECONDS, open_provider, shut_down
from lockstep.tracing.log_records import TraceFormatter
from lockstep.tracing.tracer import Tracer
from tests.fleet.fakes import fleet
from tests.processes import ServeProcess


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Tracing is on in this process; what it exported."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "active", Tracer(provider))
    yield exporter
    provider.shutdown()


def test_nothing_of_opentelemetry_is_imported_while_it_is_off() -> None:
    script = (
        "import sys, lockstep.cli, lockstep.gateway.app, lockstep.worker.serve\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL"),
        ({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"),
    ],
)
def test_a_setting_that_cannot_be_followed_is_an_error(environ: dict[str, str], named: str) -> None:
    with pytest.raises(BadRequest, match=named) as caught:
        open_provider("lockstep", environ)
    assert caught.value.param == named


@pytest.mark.parametrize(
    "environ", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}]
)
def test_the_standard_switches_turn_it_off(environ: dict[str, str]) -> None:
    assert open_provider("lockstep", environ) is None


@pytest.mark.parametrize(
    ("environ", "name"),
    [({}, "lockstep-worker"), ({"OTEL_SERVICE_NAME": "mine"}, "mine"),
     ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=mine"}, "mine")],
)  # fmt: skip
def test_a_service_is_called_as_the_environment_says(
    environ: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    provider = open_provider("lockstep-worker", {"OTEL_TRACES_EXPORTER": "console", **environ})
    assert provider is not None
    assert provider.resource.attributes["service.name"] == name
    shut_down(provider)


def test_a_log_line_names_its_trace(exported: InMemorySpanExporter) -> None:
    record = logging.LogRecord("name", logging.ERROR, "", 0, "it failed\nhere", (), None)
    formatter = TraceFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    assert formatter.format(record) == "ERROR: it failed\nhere"
    assert tracing.active is not None
    with tracing.active.span("work"):
        line = formatter.format(record)
    (span,) = exported.get_finished_spans()
    assert span.context is not None
    ids = f"trace_id={span.context.trace_id:032x} span_id={span.context.span_id:016x}"
    assert line == f"ERROR: it failed {ids}\nhere"


async def test_every_attempt_is_a_call_and_the_failed_one_says_so(
    exported: InMemorySpanExporter,
) -> None:
    tried: list[str] = []

    async def fails_once(worker: Worker) -> str:
        tried.append(worker.id)
        if len(tried) == 1:
            raise Unavailable("it broke")
        return worker.id

    async with fleet(2) as (pool, _):
        await pool.run(Affinity(session="a conversation"), fails_once)
    calls = [span for span in exported.get_finished_spans() if span.name == "engine call"]
    assert [attribute(span, "lockstep.worker") for span in calls] == tried
    assert [attribute(span, "lockstep.attempt") for span in calls] == [1, 2]
    assert [span.status.is_ok for span in calls] == [False, True]
    assert attribute(calls[0], "error.type") == "unavailable"


def attribute(span: ReadableSpan, name: str) -> object:
    return (span.attributes or {})[name]


def test_a_collector_that_hangs_delays_the_end_by_seconds_only() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{hanging.getsockname()[1]}"}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(*environ.popitem())
            provider = open_provider("lockstep")
        assert provider is not None
        provider.get_tracer("test").start_span("one").end()
        began = time.monotonic()
        shut_down(provider)
        assert time.monotonic() - began < END_SECONDS + 1


@pytest.mark.failure_mode("F90")
async def test_a_collector_that_hangs_never_slows_or_fails_a_request() -> None:
    body = {"messages": [{"role": "user", "content": "Reverse: 40213"}], "max_tokens": 1}
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        url = f"http://127.0.0.1:{hanging.getsockname()[1]}"
        served = ServeProcess(
            "--trace", "--sessions", "memory", "--worker-args", "--max-model-len 512",
            OTEL_EXPORTER_OTLP_ENDPOINT=url, OTEL_BSP_SCHEDULE_DELAY="10",
            OTEL_BSP_MAX_QUEUE_SIZE="64", OTEL_BSP_MAX_EXPORT_BATCH_SIZE="8",
        )  # fmt: skip
        took = []
        try:
            async with aiohttp.ClientSession() as session:
                for _ in range(60):  # far more spans than the queue holds
                    began = time.monotonic()
                    async with session.post(served.url + "/v1/chat/completions", json=body) as got:
                        assert got.status == 200
                    took.append(time.monotonic() - began)
        finally:
            began = time.monotonic()
            code = served.stop()
        assert code == 0
        assert sorted(took)[-2] < 1.0, "an export has 10 s to time out"
        assert time.monotonic() - began < 15


async def test_a_trace_that_is_not_sampled_has_no_spans_below_it_either(
    exported: InMemorySpanExporter,
) -> None:
    async def call(worker: Worker) -> dict[str, str]:
        assert tracing.active is not None
        return tracing.active.headers()

    left_out = trace.NonRecordingSpan(trace.SpanContext(7, 9, is_remote=True))
    async with fleet(1) as (pool, _):
        with trace.use_span(left_out):
            sent = await pool.run(Affinity(session="a conversation"), call)
    assert exported.get_finished_spans() == ()
    assert sent["traceparent"].endswith("-00"), "the worker is told so"


async def test_a_stream_that_breaks_off_after_its_status_is_an_error(
    exported: InMemorySpanExporter,
) -> None:
    async def events() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        raise EngineFailure("the engine broke")

    async def stream(_: Request) -> Response:
        return EventStream(events())

    app = Starlette(routes=[Route("/stream", stream)])
    with listen("127.0.0.1", 0) as sock:
        async with serving([(app, sock)]), aiohttp.ClientSession() as session:
            async with session.get(f"{url_of(sock)}/stream") as response:
                assert response.status == 200
                await response.read()
    (span,) = exported.get_finished_spans()
    assert attribute(span, "http.response.status_code") == 200
    assert attribute(span, "error.type") == "engine_failure"
    assert span.status.description == "the engine broke"
