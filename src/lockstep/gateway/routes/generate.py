"""POST /inference/v1/generate: token ids in, token ids and logprobs out, in vLLM's dialect.

Bodies are forwarded as bytes to workers that speak this dialect, and so are the responses: they
are decoded once, to check the contract, and never encoded again. Other backends get the request in
their own dialect.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from time import time
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as HttpRoute

from lockstep.backends.transport import Relay
from lockstep.fleet.routing.affinity import Affinity
from lockstep.fleet.worker import Worker
from lockstep.gateway.context import GatewayContext, request_id, session_id
from lockstep.gateway.models import ServedModel
from lockstep.gateway.tenants import Caller, caller_of
from lockstep.http import sse
from lockstep.http.body import read_body
from lockstep.http.handlers import EventStream, json_response, unless_gone
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.common.response import (
    Reading,
    StreamDelta,
    check_indices,
    decode_response,
    finish_of,
    ids_of,
)
from lockstep.protocol.vllm import generate_response as wire
from lockstep.protocol.vllm.abort import decode_abort
from lockstep.protocol.vllm.decode_generate import GenerateStreamDecoder, decode_generate
from lockstep.protocol.vllm.generate_request import GenerateFields, decode_relayed
from lockstep.tokens import Completion, VersionSpan
from lockstep.tokens.errors import BadRequest, LockstepError


class _BareChoice(msgspec.Struct):
    index: int = 0
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    weight_versions: list[VersionSpan] | None = None


class _BareResponse(msgspec.Struct):
    choices: list[_BareChoice] = []


Body = TypeVar("Body", bytes, bytearray)
BARE = msgspec.json.Decoder(_BareResponse)
ID_PREFIXES = (wire.REQUEST_ID_PREFIX, "chatcmpl-", "cmpl-")


class GenerateRoutes:
    """POST /inference/v1/generate and /inference/v1/abort_requests."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self.routes = [
            HttpRoute("/inference/v1/generate", self.generate, methods=["POST"]),
            HttpRoute("/inference/v1/abort_requests", self.abort, methods=["POST"]),
        ]

    async def generate(self, http: Request) -> Response:
        """Completions of a prompt. A session header only steers routing: clients of this route
        keep their own ledger."""
        request_id(http)
        raw, fields, ids = await read_body(http, self._decoded, self._context.limits)
        model = await self._context.models.resolve(fields.model)
        caller = caller_of(http)
        shown = request_id(http, fields.request_id).removeprefix(wire.REQUEST_ID_PREFIX)
        request = _generate_request(fields, ids, model, shown, caller)
        if request.cache_salt != fields.cache_salt:
            raw = _with_salt(raw, request.cache_salt)
        affinity = Affinity.of(
            request.prompt_ids,
            session=session_id(http),
            salt=request.cache_salt,
            adapter=model.adapter,
        )
        if fields.stream:
            events = self._events(affinity, request, fields, raw, shown)
            return await EventStream.started(http, events, shown)

        async def call(worker: Worker) -> bytes | bytearray:
            return await self._whole(worker, request, fields, model, raw, shown)

        return json_response(await unless_gone(http, self._context.pool.run(affinity, call)))

    def _decoded(self, raw: bytes) -> tuple[bytes, GenerateFields, Sequence[int]]:
        fields, ids = decode_relayed(raw)
        self._context.limits.check(fields)
        return raw, fields, ids

    async def _whole(
        self,
        worker: Worker,
        request: GenerateRequest,
        fields: GenerateFields,
        model: ServedModel,
        raw: bytes,
        shown: str,
    ) -> bytes | bytearray:
        if (relay := worker.transport.relay) is not None:
            since = worker.accepted.mark()
            response, reading = await relay.forward(raw, request)
            _check(response, reading, fields, worker, since)
            return _shown_as(response, request, shown)
        completions = await worker.generate(request)
        return wire.generate_response(
            completions,
            request_id=wire.REQUEST_ID_PREFIX + shown,
            model=model.name,
            created=int(time()),
            form=fields.form,
        )

    def _events(
        self,
        affinity: Affinity,
        request: GenerateRequest,
        fields: GenerateFields,
        raw: bytes,
        shown: str,
    ) -> AsyncGenerator[bytes, None]:
        def opened(worker: Worker) -> AsyncIterator[bytes]:
            if (relay := worker.transport.relay) is not None:
                return _relayed(worker, relay, request, fields, raw, shown)
            return _translated(worker, request, fields, shown)

        return self._context.pool.stream(affinity, opened)

    async def abort(self, http: Request) -> Response:
        """Stops requests by id on whatever worker they run; says how many it really stopped."""
        request_id(http)
        body = await read_body(http, decode_abort, self._context.limits)
        if not body.request_ids:
            raise BadRequest("request_ids is empty: name at least one", param="request_ids")
        caller = caller_of(http)
        names = [caller.request_id(bare_id(name)) for name in dict.fromkeys(body.request_ids)]
        stopped = await self._context.pool.abort(*names)
        return json_response({"status": "aborted", "aborted": stopped})


def _with_salt(raw: bytes, salt: str | None) -> bytes:
    """The body with that salt: of a field that comes twice, decoders of the workers take the last.
    It is an object with fields, or it would not have been decoded."""
    return raw.rstrip()[:-1] + b',"cache_salt":' + msgspec.json.encode(salt) + b"}"


def _shown_as(response: Body, request: GenerateRequest, shown: str) -> Body:
    """The response with the id by which the client knows its request."""
    if request.request_id == shown:
        return response
    sent, own = (
        msgspec.json.encode(wire.REQUEST_ID_PREFIX + (name or ""))
        for name in (request.request_id, shown)
    )
    return response.replace(sent, own, 1)


def bare_id(name: str) -> str:
    """A request's own id, without the prefix that its route put before it in the response."""
    for prefix in ID_PREFIXES:
        name = name.removeprefix(prefix)
    return name


async def _relayed(
    worker: Worker,
    relay: Relay,
    request: GenerateRequest,
    fields: GenerateFields,
    raw: bytes,
    shown: str,
) -> AsyncIterator[bytes]:
    """The worker's events as they come, checked; the stream must end with every choice finished.

    Events that arrive together are sent on together.
    """
    checks = _ScoredEvents if fields.sampling_params.logprobs is not None else _BareEvents
    events = checks(worker, request)
    async with aclosing(relay.forward_events(raw, request)) as batches:
        async for batch in batches:
            passed: list[bytes] = []
            try:
                for event, _ in zip(batch, events.check(batch), strict=True):
                    passed += (b"data: ", _shown_as(event, request, shown), b"\n\n")
            except LockstepError:
                # The events before the faulty one are right: the client gets them first.
                if passed:
                    yield b"".join(passed)
                raise
            yield b"".join(passed)
    events.finish()


class _ScoredEvents:
    """Checks a streamed response with logprobs, event by event and as a whole."""

    def __init__(self, worker: Worker, request: GenerateRequest) -> None:
        self._worker, self._since = worker, worker.accepted.mark()
        self._decoder = GenerateStreamDecoder(Reading(request))
        self.check = self._decoder.collect

    def finish(self) -> None:
        self._worker.accepted.check(self._decoder.finish(), self._since, self._worker.id)


class _BareEvents:
    """Checks a streamed response without logprobs: versions, and that every choice finished."""

    def __init__(self, worker: Worker, request: GenerateRequest) -> None:
        self._worker, self._since = worker, worker.accepted.mark()
        self._choices = request.sampling.n
        self._finished: set[int] = set()

    def check(self, batch: list[bytes]) -> Iterator[None]:
        for event in batch:
            for choice in decode_response(BARE, event).choices:
                spans = choice.weight_versions or ()
                self._worker.accepted.check_spans(spans, self._since, self._worker.id)
                if choice.finish_reason:
                    self._finished.add(choice.index)
            yield

    def finish(self) -> None:
        check_indices(self._finished, self._choices)


async def _translated(
    worker: Worker, request: GenerateRequest, fields: GenerateFields, shown: str
) -> AsyncIterator[bytes]:
    """The stream of a worker that speaks another dialect, encoded in this one."""
    prefixed = wire.REQUEST_ID_PREFIX + shown
    encoder = wire.GenerateStreamEncoder(prefixed, request.prompt_ids, fields.form)
    # Completions come last and repeat what the deltas brought: they only add how it ended.
    async with aclosing(worker.stream(request)) as items:
        async for item in items:
            if isinstance(item, Completion):
                yield sse.event(encoder.chunk(item.index, [], [], None, None, item))
            elif isinstance(item, StreamDelta):
                chunk = encoder.chunk(item.index, item.token_ids, item.logprobs, None, None, None)
                yield sse.event(chunk)
    if fields.include_usage:
        yield sse.event(encoder.usage())


def _check(
    response: bytearray, reading: Reading, fields: GenerateFields, worker: Worker, since: int
) -> None:
    """Raises the error of a response that must not be handed on."""
    if fields.sampling_params.logprobs is not None:
        worker.accepted.check(decode_generate(response, reading), since, worker.id)
        return
    bare = decode_response(BARE, response)
    check_indices((choice.index for choice in bare.choices), reading.request.sampling.n)
    for choice in bare.choices:
        ids_of(choice.token_ids, f"choice {choice.index} of the response")
        finish_of(choice.finish_reason)
        worker.accepted.check_spans(choice.weight_versions or (), since, worker.id)


def _generate_request(
    fields: GenerateFields, ids: Sequence[int], model: ServedModel, shown: str, caller: Caller
) -> GenerateRequest:
    name = caller.request_id(shown)
    return GenerateRequest(
        prompt_ids=ids,
        sampling=fields.sampling(),
        model=fields.model or model.name,
        request_id=name,
        cache_salt=caller.cache_salt(fields.cache_salt),
        priority=fields.priority,
        experts_start=fields.experts_start,
        experts_skipped=fields.experts_skipped,
        weight_version=fields.weight_version,
        min_weight_version=fields.min_weight_version,
        headers={"X-Request-Id": name},
    )
