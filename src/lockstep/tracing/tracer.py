"""Spans of a gateway and its workers: request, turn, route, engine call, store, update phase.

Attributes follow OpenTelemetry's conventions for HTTP and generative AI, plus `lockstep.*`. Spans
never contain messages, prompts or tokens.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from time import time_ns
from typing import Any, TypeVar

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep.tokens import Completion, Sampling
from lockstep.tokens.errors import LockstepError

T = TypeVar("T")
Attributes = Mapping[str, str | int | float | bool | Sequence[str]]
TRACE_CONTEXT = TraceContextTextMapPropagator()
TRACE_HEADERS = (b"traceparent", b"tracestate")
REQUEST = contexts.create_key("lockstep-request")
"""Context key of a request's RequestSpans."""
POLLED = frozenset({"/health", "/metrics", "/v1/rl/health", "/v1/rl/ready"})
"""Routes that are polled every few seconds: they get no spans."""


class RequestSpans:
    """Spans of one request that last as long as it does: the request's own and its turn's."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.turn: Span | None = None
        self.status = 499
        self.error: BaseException | None = None

    def end(self) -> None:
        self.span.set_attribute("http.response.status_code", self.status)
        # By the convention, a client's mistake is not an error of the server.
        if self.status >= 500 or (self.error is not None and self.status < 400):
            mark_failed(self.span, self.error, f"status {self.status}")
        if self.turn is not None:
            if self.error is not None or self.status >= 400:
                mark_failed(self.turn, self.error, f"status {self.status}")
            self.turn.end()
        self.span.end()


class EngineCall:
    """One call of a worker; everything awaited within it has its span as parent."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._context = trace.set_span_in_context(span)

    async def run(self, work: Awaitable[T]) -> T:
        token = contexts.attach(self._context)
        try:
            return await work
        finally:
            contexts.detach(token)

    async def items(self, items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
        """Yield the same items. Only producing them is part of the call, not consuming them."""
        try:
            while True:
                token = contexts.attach(self._context)
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return
                finally:
                    contexts.detach(token)
                yield item
        finally:
            if (close := getattr(items, "aclose", None)) is not None:
                await close()

    def end(self, error: BaseException | None) -> None:
        if error is not None:
            mark_failed(self._span, error)
        self._span.end()


class Tracer:
    """Creates the spans of this process. The parent is the current span of the same task."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("lockstep", version("lockstep-rl"))

    def app(self, app: ASGIApp) -> ASGIApp:
        """Wrap the application with a span per request, below the caller's span if it sent one."""

        async def traced_app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"] in POLLED:
                await app(scope, receive, send)
                return
            with self._request(scope) as spans:

                async def send_traced(message: Message) -> None:
                    if message["type"] == "http.response.start":
                        spans.status = message["status"]
                    await send(message)

                await app(scope, receive, send_traced)

        return traced_app

    @contextmanager
    def _request(self, scope: Scope) -> Iterator[RequestSpans]:
        sent = {name.decode(): value.decode("latin-1")
                for name, value in scope["headers"] if name in TRACE_HEADERS}  # fmt: skip
        parent = TRACE_CONTEXT.extract(sent) if sent else None
        method = scope["method"]
        span = self._tracer.start_span(
            method,
            parent,
            kind=SpanKind.SERVER,
            attributes={"http.request.method": method, "url.path": scope["path"]},
        )
        spans = RequestSpans(span)
        context = contexts.set_value(REQUEST, spans, trace.set_span_in_context(span, parent))
        token = contexts.attach(context)
        try:
            yield spans
        except BaseException as error:
            spans.error = spans.error or error
            raise
        finally:
            if (route := _route(scope)) is not None:
                span.set_attribute("http.route", route)
                span.update_name(f"{method} {route}")
            if request_id := scope.get("state", {}).get("request_id"):
                span.set_attribute("lockstep.request_id", request_id)
            spans.end()
            contexts.detach(token)

    def request_failed(self, error: BaseException) -> None:
        """Record the error of the current request, in its response or within its stream."""
        spans = contexts.get_value(REQUEST)
        if isinstance(spans, RequestSpans):
            spans.error = error

    def start_turn(self, operation: str, model: str, session: str | None) -> None:
        """Start the turn span of the current request; it ends with the request."""
        spans = contexts.get_value(REQUEST)
        if not isinstance(spans, RequestSpans) or spans.turn is not None:
            return
        if not spans.span.is_recording():
            return  # not sampled: neither are its children
        attributes = _names(operation, model)
        if session is not None:
            attributes |= {"lockstep.session": session, "gen_ai.conversation.id": session}
            spans.span.set_attribute("lockstep.session", session)
        spans.turn = self._tracer.start_span(f"{operation} {model}", attributes=attributes)
        # Until the end of the request's task: everything that follows in it is part of the turn.
        contexts.attach(trace.set_span_in_context(spans.turn))

    def now(self) -> int:
        """Return the current time in the unit of spans."""
        return time_ns()

    def routed(self, since: int, worker: str, url: str, tried: int) -> EngineCall | None:
        """Record the choice of a worker after a wait since `since`, and start its call span; None
        in a trace that is not sampled.
        """
        if _is_left_out(trace.get_current_span()):
            return None
        attributes: Attributes = {"lockstep.worker": worker, "lockstep.attempt": tried + 1}
        route = self._tracer.start_span("route", attributes=attributes, start_time=since)
        route.end()
        attributes = {**attributes, "server.address": url}
        return EngineCall(
            self._tracer.start_span("engine call", kind=SpanKind.CLIENT, attributes=attributes)
        )

    def generation(self, model: str | None, sampling: Sampling) -> None:
        """Add the requested options to the current engine call."""
        span = trace.get_current_span()
        if not span.is_recording():
            return
        attributes: dict[str, Any] = {
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.choice.count": sampling.n,
        }
        if sampling.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
        if model is not None:
            attributes |= _names("text_completion", model)
            span.update_name(f"text_completion {model}")
        span.set_attributes(attributes)

    def generated(self, completions: Sequence[Completion]) -> None:
        """Add the sampled tokens and versions to the current engine call and its turn."""
        if not completions:
            return
        versions = dict.fromkeys(
            span.version for completion in completions for span in completion.versions
        )
        attributes: dict[str, Any] = {
            "gen_ai.usage.input_tokens": len(completions[0].prompt_ids),
            "gen_ai.usage.output_tokens": sum(
                len(completion.token_ids) for completion in completions
            ),
            "gen_ai.response.finish_reasons": [completion.finish for completion in completions],
            "lockstep.version": ",".join(versions),
        }
        trace.get_current_span().set_attributes(attributes)
        spans = contexts.get_value(REQUEST)
        if isinstance(spans, RequestSpans) and spans.turn is not None:
            spans.turn.set_attributes(attributes)

    @contextmanager
    def span(self, name: str, attributes: Attributes | None = None) -> Iterator[Span]:
        """Open a span for the block and record its error; none in a trace that is not sampled."""
        if _is_left_out(current := trace.get_current_span()):
            yield current
            return
        with self._tracer.start_as_current_span(
            name, attributes=attributes, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield span
            except BaseException as error:
                mark_failed(span, error)
                raise

    def headers(self) -> dict[str, str]:
        """Return the headers that make another server's spans part of the current trace."""
        carrier: dict[str, str] = {}
        TRACE_CONTEXT.inject(carrier)
        return carrier


def mark_failed(span: Span, error: BaseException | None, otherwise: str = "failed") -> None:
    """Set the error status and type of a span."""
    if error is None:
        kind, why = otherwise, otherwise
    elif isinstance(error, LockstepError):
        kind, why = error.code, error.message
    else:
        # The text of an unexpected error may contain anything, so only its type is recorded.
        kind = why = type(error).__name__
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, why))


def _is_left_out(span: Span) -> bool:
    """Return whether the context belongs to a trace that is not sampled."""
    return not span.is_recording() and span.get_span_context().is_valid


def _names(operation: str, model: str) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "lockstep",
        "gen_ai.request.model": model,
    }


def _route(scope: Scope) -> str | None:
    """Return the path template of the matched route; None if no route matched."""
    if "endpoint" not in scope:
        return None
    names = {str(value): name for name, value in scope.get("path_params", {}).items()}
    parts = [f"{{{names[part]}}}" if part in names else part for part in scope["path"].split("/")]
    return "/".join(parts)
