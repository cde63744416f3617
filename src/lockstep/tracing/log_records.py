"""Log lines that name the trace they belong to."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace


class TraceFormatter(logging.Formatter):
    """Formatter that adds trace and span ids to the output of `inner`."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        text = self._inner.format(record)
        context = trace.get_current_span().get_span_context()
        if not context.is_valid:
            return text
        ids = f" trace_id={context.trace_id:032x} span_id={context.span_id:016x}"
        first, *rest = text.split("\n", 1)  # a traceback stays below its line
        return "\n".join([first + ids, *rest])


@contextmanager
def with_trace_ids() -> Iterator[None]:
    """Make the handlers of the root logger write trace ids while the block runs."""
    handlers = logging.getLogger().handlers[:]
    before = [handler.formatter for handler in handlers]
    for handler, formatter in zip(handlers, before, strict=True):
        handler.setFormatter(TraceFormatter(formatter or logging.Formatter()))
    try:
        yield
    finally:
        for handler, formatter in zip(handlers, before, strict=True):
            handler.setFormatter(formatter)
