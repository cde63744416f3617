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

from lockstep import tracing
from lockstep.backends.transport import CompletionStream, Relay
from lockstep.fleet.routing.affinity import Affinity
from lockstep.fleet.worker import Worker
from lockstep.gateway.context import GatewayContext, join_session, request_id, session_id
from lockstep.gateway.models import ServedModel
from lockstep.gateway.sessions.token_turn import TokenTurn
from lockstep.gateway.tenants import Caller, caller_of
from lockstep.http import sse
from lockstep.http.body import read_body
from lockstep.http.handlers import EventStream, json_response, unless_gone
from lockstep.http.off_loop import is_large_json, is_large_response, off_loop
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
        """Completions of a prompt; a session that the request names records them by their ids."""
        request_id(http)
        raw, fields, ids = await read_body(http, self._decoded, self._context.limits)
        model = await self._context.models.resolve(fields.model)
        caller = caller_of(http)
        shown = request_id(http, fields.request_id).removeprefix(wire.REQUEST_ID_PREFIX)
        request = _generate_request(fields, ids, model, shown, caller)
        if tracing.active is not None:
            tracing.active.start_turn("text_completion", model.name, session_id(http))
        if request.cache_salt != fields.cache_salt:
            raw = _with_field(raw, "cache_salt", request.cache_salt)
        if fields.model not in (None, request.model):
            raw = _with_field(raw, "model", request.model)
        turn = await self._turn(http, request, model)
        affinity = Affinity.of(
            request.prompt_ids,
            session=session_id(http),
            salt=request.cache_salt,
            adapter=model.adapter,
        )
        if fields.stream:
            events = self._events(affinity, request, fields, raw, shown, turn)
            return await EventStream.started(http, events, shown)

        async def call(worker: Worker) -> tuple[bytes | bytearray, list[Completion]]:
            # What a session records has logprobs, whether or not the client wants to see them.
            relayed = raw if turn is None or fields.form.logprobs is not None else None
            return await self._whole(worker, request, fields, model, relayed, shown)

        async def work() -> bytes | bytearray:
            response, completions = await self._context.pool.run(affinity, call)
            if turn is not None:
                await turn.commit(completions)
            return response

        return json_response(await unless_gone(http, work()))

    async def _turn(
        self, http: Request, request: GenerateRequest, model: ServedModel
    ) -> TokenTurn | None:
        if session_id(http) is None:
            return None
        renderer = await self._context.models.renderer()
        session = await join_session(http, self._context, renderer)
        return await TokenTurn.of(session, request.prompt_ids, request.sampling, model.adapter)

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
        raw: bytes | None,
        shown: str,
    ) -> tuple[bytes | bytearray, list[Completion]]:
        """The response, and its completions where it has logprobs; `raw` is relayed if given."""
        relay = worker.transport.relay
        if relay is not None and raw is not None:
            since = worker.accepted.mark()
            if (tracer := tracing.active) is not None:
                tracer.generation(request.model, request.sampling)
            relayed, reading = await relay.forward(raw, request)
            completions = await _checked(relayed, reading, fields, worker, since)
            if tracer is not None:
                tracer.generated(completions)
            return _shown_as(relayed, request, shown), completions
        completions = await worker.generate(request)
        response = await off_loop(
            is_large_response(completions, request.sampling.logprobs),
            wire.generate_response,
            completions,
            request_id=wire.REQUEST_ID_PREFIX + shown,
            model=model.name,
            created=int(time()),
            form=fields.form,
        )
        return response, completions

    def _events(
        self,
        affinity: Affinity,
        request: GenerateRequest,
        fields: GenerateFields,
        raw: bytes,
        shown: str,
        turn: TokenTurn | None,
    ) -> AsyncGenerator[bytes, None]:
        def sampled(worker: Worker) -> CompletionStream:
            return worker.stream(request)

        def opened(worker: Worker) -> AsyncIterator[bytes]:
            if (relay := worker.transport.relay) is not None:
                return _relayed(worker, relay, request, fields, raw, shown)
            return _translated(sampled(worker), request, fields, shown)

        pool = self._context.pool
        if turn is None:
            return pool.stream(affinity, opened)
        return _translated(pool.stream(affinity, sampled), request, fields, shown, turn)

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


def _with_field(raw: bytes, name: str, value: str | None) -> bytes:
    """The body with that value: of a field that comes twice, decoders of the workers take the last.
    It is an object with fields, or it would not have been decoded."""
    return raw.rstrip()[:-1] + f',"{name}":'.encode() + msgspec.json.encode(value) + b"}"


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
    if tracing.active is not None:
        tracing.active.generation(request.model, request.sampling)
    checks = _ScoredEvents if fields.sampling_params.logprobs is not None else _BareEvents
    events = checks(worker, request)
    async with aclosing(relay.forward_events(raw, request)) as batches:
        async for batch in batches:
            await events.learn(batch)
            passed = 0
            try:
                for _ in events.check(batch):
                    passed += 1
            except LockstepError:
                # The events before the faulty one are right: the client gets them first.
                if passed:
                    yield _written(batch[:passed], request, shown)
                raise
            yield _written(batch, request, shown)
    await events.finish()


def _written(events: list[bytes], request: GenerateRequest, shown: str) -> bytes:
    """The events as one piece of a stream, under the id by which the client knows its request."""
    if request.request_id != shown:
        events = [_shown_as(event, request, shown) for event in events]
    return b"data: " + b"\n\ndata: ".join(events) + b"\n\n"


class _ScoredEvents:
    """Checks a streamed response with logprobs, event by event and as a whole."""

    def __init__(self, worker: Worker, request: GenerateRequest) -> None:
        self._worker, self._since = worker, worker.accepted.mark()
        self._decoder = GenerateStreamDecoder(Reading(request))
        self.check = self._decoder.collect

    async def learn(self, batch: list[bytes]) -> None:
        """Versions are checked at the end."""

    async def finish(self) -> None:
        completions = self._decoder.finish()
        await self._worker.accepted.confirm(completions, self._since, self._worker.id)
        if tracing.active is not None:
            tracing.active.generated(completions)
        self._worker.sampled += sum(len(each.token_ids) for each in completions)


class _BareEvents:
    """Checks a streamed response without logprobs: versions, and that every choice finished."""

    def __init__(self, worker: Worker, request: GenerateRequest) -> None:
        self._worker, self._since = worker, worker.accepted.mark()
        self._choices = request.sampling.n
        self._finished: set[int] = set()

    def check(self, batch: list[bytes]) -> Iterator[None]:
        for event in batch:
            for choice in decode_response(BARE, event).choices:
                self._worker.sampled += len(choice.token_ids or ())
                spans = choice.weight_versions or ()
                self._worker.accepted.check_spans(spans, self._since, self._worker.id)
                if choice.finish_reason:
                    self._finished.add(choice.index)
            yield

    async def learn(self, batch: list[bytes]) -> None:
        """Looks at what the leader has accepted, where this gateway follows one."""
        if self._worker.accepted.read_anew is None:
            return
        for event in batch:
            for choice in decode_response(BARE, event).choices:
                await self._worker.accepted.learn(choice.weight_versions or (), self._since)

    async def finish(self) -> None:
        check_indices(self._finished, self._choices)


async def _translated(
    sampled: CompletionStream,
    request: GenerateRequest,
    fields: GenerateFields,
    shown: str,
    turn: TokenTurn | None = None,
) -> AsyncGenerator[bytes, None]:
    """Completions as they are sampled, encoded in this dialect.

    What ends them is sent after the turn was stored in its session.
    """
    prefixed = wire.REQUEST_ID_PREFIX + shown
    encoder = wire.GenerateStreamEncoder(prefixed, request.prompt_ids, fields.form)
    completions: list[Completion] = []
    async with aclosing(sampled) as items:
        async for item in items:
            if isinstance(item, Completion):
                completions.append(item)
            elif isinstance(item, StreamDelta):
                chunk = encoder.chunk(item.index, item.token_ids, item.logprobs, None, None, None)
                yield sse.event(chunk)
    if turn is not None:
        await turn.commit(completions)
    # They repeat what the deltas brought: these chunks only add how it ended.
    for completion in completions:
        yield sse.event(encoder.chunk(completion.index, [], [], None, None, completion))
    if fields.include_usage:
        yield sse.event(encoder.usage())


async def _checked(
    response: bytearray, reading: Reading, fields: GenerateFields, worker: Worker, since: int
) -> list[Completion]:
    """The completions of a response, none where it has no logprobs.

    Raises the error of a response that must not be handed on.
    """
    if fields.sampling_params.logprobs is not None:
        completions = await off_loop(
            is_large_json(len(response)), decode_generate, response, reading
        )
        await worker.accepted.confirm(completions, since, worker.id)
        worker.sampled += sum(len(each.token_ids) for each in completions)
        return completions
    bare = decode_response(BARE, response)
    check_indices((choice.index for choice in bare.choices), reading.request.sampling.n)
    for choice in bare.choices:
        worker.sampled += len(ids_of(choice.token_ids, f"choice {choice.index} of the response"))
        finish_of(choice.finish_reason)
        await worker.accepted.learn(choice.weight_versions or (), since)
        worker.accepted.check_spans(choice.weight_versions or (), since, worker.id)
    return []


def _generate_request(
    fields: GenerateFields, ids: Sequence[int], model: ServedModel, shown: str, caller: Caller
) -> GenerateRequest:
    name = caller.request_id(shown)
    return GenerateRequest(
        prompt_ids=ids,
        sampling=fields.sampling(),
        model=model.name,
        request_id=name,
        cache_salt=caller.cache_salt(fields.cache_salt),
        priority=fields.priority,
        experts_start=fields.experts_start,
        experts_skipped=fields.experts_skipped,
        weight_version=fields.weight_version,
        min_weight_version=fields.min_weight_version,
        headers={"X-Request-Id": name},
    )
