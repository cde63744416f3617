"""Span exporter configured by the standard OTEL_* variables, on its own thread."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Mapping

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter

from lockstep.tokens.errors import BadRequest

log = logging.getLogger(__name__)
EXPORTER = "OTEL_TRACES_EXPORTER"
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HTTP = "http/protobuf"
END_SECONDS = 3.0
"""Seconds that the end of a process may wait for the collector to take the last spans."""


def open_provider(service: str, environ: Mapping[str, str] = os.environ) -> TracerProvider | None:
    """Return the provider that creates and sends spans; None if the environment disables them.

    Spans wait in a bounded queue for a sender thread: a slow or unreachable collector loses spans,
    never a request. Raises BadRequest for an unsupported exporter or protocol.
    """
    exporter = _exporter(environ)
    if exporter is None or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    attributes = {"service.instance.id": f"{socket.gethostname()}:{os.getpid()}"}
    if not (
        environ.get("OTEL_SERVICE_NAME")
        or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    ):
        attributes["service.name"] = service
    # The provider's own exit hook would wait for half a minute.
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _exporter(environ: Mapping[str, str]) -> SpanExporter | None:
    name = environ.get(EXPORTER) or "otlp"
    if name == "none":
        return None
    if name == "console":
        return ConsoleSpanExporter()
    if name != "otlp":
        raise BadRequest(f"{EXPORTER} is {name!r}: expected otlp, console or none", param=EXPORTER)
    variable = next((key for key in PROTOCOLS if environ.get(key)), PROTOCOLS[-1])
    protocol = environ.get(variable) or HTTP
    if protocol != HTTP:
        raise BadRequest(
            f"{variable} is {protocol!r}: traces are sent as {HTTP} only (collectors take it on "
            "port 4318)",
            param=variable,
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def shut_down(provider: TracerProvider) -> None:
    """Send the remaining spans, waiting at most END_SECONDS."""
    ending = threading.Thread(target=provider.shutdown, name="trace-end", daemon=True)
    ending.start()
    ending.join(END_SECONDS)
    if ending.is_alive():
        log.warning("the last spans could not be sent within %g s: they are lost", END_SECONDS)
