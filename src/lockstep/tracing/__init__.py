"""Spans of requests and updates, for OpenTelemetry; off unless `traced` runs.

Whoever makes a span looks at `active` first, which is None while tracing is off: nothing of
OpenTelemetry is imported then, and a request pays for the look alone.
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
    """Traces this process while the block runs, as the standard OTEL_* variables say.

    `service` is its name unless they have another. The last spans are sent at the end, within
    seconds whether anybody takes them or not. Raises ModuleNotFoundError when OpenTelemetry is
    not installed, and BadRequest for a setting that cannot be followed.
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
