"""OpenTelemetry spans of requests and updates; off unless `traced` runs.

Code that creates a span checks `active` first, which is None while tracing is off: nothing of
OpenTelemetry is imported then, and a request only pays for the check.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.tracing.tracer import Tracer

active: Tracer | None = None


@contextmanager
def traced(service: str, *, on: bool = True) -> Iterator[None]:
    """Trace this process while the block runs, as configured by the standard OTEL_* variables.

    `service` is the default service name. The last spans are sent at the end, within seconds
    whether the collector responds or not. Raises ModuleNotFoundError if OpenTelemetry is not
    installed, and BadRequest for an unsupported setting.
    """
    global active
    if not on:
        yield
        return
    from lockstep.tracing.export import open_provider, shut_down
    from lockstep.tracing.log_records import with_trace_ids
    from lockstep.tracing.tracer import Tracer

    provider = open_provider(service)
    if provider is None:
        yield
        return
    active = Tracer(provider)
    try:
        with with_trace_ids():
            yield
    finally:
        active = None
        shut_down(provider)
