"""POST /inference/v1/generate: token ids in, token ids and logprobs out, in vLLM's dialect.

Bodies are forwarded as bytes to workers that speak this dialect, and their responses are returned
as bytes: they are decoded once, to check the contract, and never encoded again. Other backends get
the request in their own dialect.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
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
from lockstep.gateway.callers import Caller, caller_of, request_id, session_id
from lockstep.gateway.context import GatewayContext
from lockstep.gateway.model_registry import ServedModel
from lockstep.gateway.turn.open import join_session
from lockstep.gateway.turn.token_turn import TokenTurn
from lockstep.http import sse
from lockstep.http.handlers import EventStream, json_response
from lockstep.http.http_request import read_body, unless_gone
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
from lockstep.protocol.openai import chat_response, completions
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
ID_PREFIXES = (wire.REQUEST_ID_PREFIX, chat_response.ID_PREFIX, completions.ID_PREFIX)


class GenerateRoutes:
    """POST /inference/v1/generate and /inference/v1/abort_requests."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self.routes = [
            HttpRoute("/inference/v1/generate", self.generate, methods=["POST"]),
            HttpRoute("/inference/v1/abort_requests", self.abort, methods=["POST"]),
        ]

    async def generate(self, http: Request) -> Response:
        """Return completions of a prompt; the session of the request stores them by their ids."""
        request_id(http)
        raw, fields, ids = await read_body(http, self._decode, self._context.limits)
        model = await self._context.models.resolve(fields.model, caller_of(http).tenant)
        caller = caller_of(http)
        client_id = request_id(http, fields.request_id).removeprefix(wire.REQUEST_ID_PREFIX)
        request = _generate_request(fields, ids, model, client_id, caller)
        if tracing.active is not None:
            tracing.active.start_turn("text_completion", model.name, session_id(http))
        # A relayed body keeps its bytes: only the fields that the worker must see differently are
        # appended.
        if request.cache_salt != fields.cache_salt:
            raw = _with_field(raw, "cache_salt", request.cache_salt)
        if fields.model not in (None, request.model):
            raw = _with_field(raw, "model", request.model)
        turn = await self._turn(http, request, model)
        clamped = turn is not None and turn.sampling != request.sampling
        if turn is not None:
            request = replace(request, sampling=turn.sampling, support=request.support or None)
        affinity = Affinity.of(
            request.prompt_ids,
            session=session_id(http),
            salt=request.cache_salt,
            adapter=model.adapter,
        )
        if fields.stream:
            events = self._events(affinity, request, fields, raw, client_id, turn)
            return await EventStream.started(http, events, client_id)

        async def call(worker: Worker) -> tuple[bytes | bytearray, list[Completion]]:
            # A session stores logprobs and supports even if the client does not request them: such
            # a body is not relayed but encoded again.
            relayed: bytes | None = raw
            if turn is not None and None in (fields.form.logprobs, fields.form.support):
                relayed = None
            if clamped:
                relayed = None
            return await self._whole(worker, request, fields, model, relayed, client_id)

        async def work() -> bytes | bytearray:
            response, completions = await self._context.pool.run(affinity, call, request)
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
        return await TokenTurn.of(
            session, request.prompt_ids, request.sampling, model.adapter, model.max_model_len
        )

    def _decode(self, raw: bytes) -> tuple[bytes, GenerateFields, Sequence[int]]:
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
        client_id: str,
    ) -> tuple[bytes | bytearray, list[Completion]]:
        """Return the response, and its completions if it has logprobs. `raw` is relayed if set."""
        relay = worker.transport.relay
        if relay is not None and raw is not None:
            # Marked before the request: a version accepted while it runs is valid for it.
            since = worker.accepted.mark()
            if (tracer := tracing.active) is not None:
                tracer.generation(request.model, request.sampling)
            relayed, reading = await relay.forward(raw, request)
            completions = await _decode_checked(relayed, reading, fields, worker, since)
            if tracer is not None:
                tracer.generated(completions)
            return _with_client_id(relayed, request, client_id), completions
        completions = await worker.generate(request)
        response = await off_loop(
            is_large_response(completions, request.sampling.logprobs),
            wire.generate_response,
            completions,
            request_id=wire.REQUEST_ID_PREFIX + client_id,
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
        client_id: str,
        turn: TokenTurn | None,
    ) -> AsyncGenerator[bytes, None]:
        def sample(worker: Worker) -> CompletionStream:
            return worker.stream(request)

        def open_events(worker: Worker) -> AsyncIterator[bytes]:
            if (relay := worker.transport.relay) is not None:
                return _relay_events(worker, relay, request, fields, raw, client_id)
            return _encode_events(sample(worker), request, fields, client_id)

        pool = self._context.pool
        if turn is None:
            return pool.stream(affinity, open_events, request)
        # A turn to be stored is decoded anyway, and its end is held back until it is stored.
        samples = pool.stream(affinity, sample, request)
        return _encode_events(samples, request, fields, client_id, turn)

    async def abort(self, http: Request) -> Response:
        """Abort requests by id on any worker; return how many were running, null if unknown."""
        request_id(http)
        body = await read_body(http, decode_abort, self._context.limits)
        if not body.request_ids:
            raise BadRequest("request_ids is empty: name at least one", param="request_ids")
        caller = caller_of(http)
        names = [caller.request_id(bare_id(name)) for name in dict.fromkeys(body.request_ids)]
        stopped = await self._context.pool.abort(*names)
        return json_response({"status": "aborted", "aborted": stopped})


def _with_field(raw: bytes, name: str, value: str | None) -> bytes:
    """Return the body with a field appended; of a repeated field, workers decode the last one.

    The body is an object with at least one field, or it would not have been decoded.
    """
    return raw.rstrip()[:-1] + f',"{name}":'.encode() + msgspec.json.encode(value) + b"}"


def _with_client_id(response: Body, request: GenerateRequest, client_id: str) -> Body:
    """Return the response with the client's id in place of the worker's."""
    if request.request_id == client_id:
        return response
    sent, own = (
        msgspec.json.encode(wire.REQUEST_ID_PREFIX + (name or ""))
        for name in (request.request_id, client_id)
    )
    return response.replace(sent, own, 1)


def bare_id(name: str) -> str:
    """Return the id of a request without the prefix that its response had."""
    for prefix in ID_PREFIXES:
        name = name.removeprefix(prefix)
    return name


async def _relay_events(
    worker: Worker,
    relay: Relay,
    request: GenerateRequest,
    fields: GenerateFields,
    raw: bytes,
    client_id: str,
) -> AsyncIterator[bytes]:
    """Yield the worker's events after checking them; every choice must finish.

    Events that arrive together are sent together.
    """
    if tracing.active is not None:
        tracing.active.generation(request.model, request.sampling)
    checks = _ScoredEvents if fields.sampling_params.logprobs is not None else _BareEvents
    events = checks(worker, request)
    async with aclosing(relay.forward_events(raw, request)) as batches:
        async for batch in batches:
            await events.learn(batch)
            valid = 0
            try:
                for _ in events.check(batch):
                    valid += 1
            except LockstepError:
                # The client first gets the events before the faulty one: they are valid.
                if valid:
                    yield _join_events(batch[:valid], request, client_id)
                raise
            yield _join_events(batch, request, client_id)
    await events.finish()


def _join_events(events: list[bytes], request: GenerateRequest, client_id: str) -> bytes:
    """Return the events as one piece of a stream, with the client's id."""
    if request.request_id != client_id:
        events = [_with_client_id(event, request, client_id) for event in events]
    return b"data: " + b"\n\ndata: ".join(events) + b"\n\n"


class _ScoredEvents:
    """Checks a streamed response with logprobs, each event and the whole."""

    def __init__(self, worker: Worker, request: GenerateRequest) -> None:
        self._worker, self._since = worker, worker.accepted.mark()
        self._request = request
        self._decoder = GenerateStreamDecoder(Reading(request))
        self._generated: Counter[int] = Counter()

    def check(self, batch: list[bytes]) -> Iterator[None]:
        for pieces in self._decoder.collect(batch):
            for index, ids, logprobs in pieces:
                self._generated[index] += len(ids)
                self._worker.response_check.check_tokens(
                    self._request, index, ids, logprobs, self._generated[index], self._worker.id
                )
            yield

    async def learn(self, batch: list[bytes]) -> None:
        """Do nothing: versions are checked at the end."""

    async def finish(self) -> None:
        completions = self._decoder.finish()
        self._worker.response_check.check(self._request, completions, self._worker.id)
        await self._worker.accepted.confirm(completions, self._since, self._worker.id)
        if tracing.active is not None:
            tracing.active.generated(completions)
        self._worker.sampled += sum(len(completion.token_ids) for completion in completions)


class _BareEvents:
    """Checks a streamed response without logprobs: versions, and that every choice finished."""

    def __init__(self, worker: Worker, request: GenerateRequest) -> None:
        self._worker, self._since = worker, worker.accepted.mark()
        self._request = request
        self._choices = request.sampling.n
        self._generated: Counter[int] = Counter()
        self._finished: set[int] = set()

    def check(self, batch: list[bytes]) -> Iterator[None]:
        for event in batch:
            for choice in decode_response(BARE, event).choices:
                ids = choice.token_ids or ()
                self._worker.sampled += len(ids)
                self._generated[choice.index] += len(ids)
                self._worker.response_check.check_tokens(
                    self._request,
                    choice.index,
                    ids,
                    (),
                    self._generated[choice.index],
                    self._worker.id,
                )
                spans = choice.weight_versions or ()
                if choice.finish_reason:
                    self._worker.accepted.check_spans(spans, self._since, self._worker.id)
                    self._finished.add(choice.index)
            yield

    async def learn(self, batch: list[bytes]) -> None:
        """Fetch the versions that the leader has accepted, if this gateway follows one."""
        if self._worker.accepted.read_anew is None:
            return
        for event in batch:
            for choice in decode_response(BARE, event).choices:
                await self._worker.accepted.learn(choice.weight_versions or (), self._since)

    async def finish(self) -> None:
        check_indices(self._finished, self._choices)


async def _encode_events(
    stream: CompletionStream,
    request: GenerateRequest,
    fields: GenerateFields,
    client_id: str,
    turn: TokenTurn | None = None,
) -> AsyncGenerator[bytes, None]:
    """Yield completions as they are sampled, encoded in this dialect.

    The chunks that end them are sent after the turn was stored in its session.
    """
    response_id = wire.REQUEST_ID_PREFIX + client_id
    encoder = wire.GenerateStreamEncoder(response_id, request.prompt_ids, fields.form)
    completions: list[Completion] = []
    async with aclosing(stream) as items:
        async for item in items:
            if isinstance(item, Completion):
                completions.append(item)
            elif isinstance(item, StreamDelta):
                chunk = encoder.chunk(item.index, item.token_ids, item.logprobs, None, None, None)
                yield sse.event(chunk)
    if turn is not None:
        await turn.commit(completions)
    # The deltas had all tokens: these chunks only add how each choice ended.
    for completion in completions:
        yield sse.event(encoder.chunk(completion.index, [], [], None, None, completion))
    if fields.include_usage:
        yield sse.event(encoder.usage())


async def _decode_checked(
    response: bytearray, reading: Reading, fields: GenerateFields, worker: Worker, since: int
) -> list[Completion]:
    """Check a response and return its completions; none if it has no logprobs.

    Raises the error of a response that the client must not get.
    """
    if fields.sampling_params.logprobs is not None:
        completions = await off_loop(
            is_large_json(len(response)), decode_generate, response, reading
        )
        worker.response_check.check(reading.request, completions, worker.id)
        await worker.accepted.confirm(completions, since, worker.id)
        worker.sampled += sum(len(completion.token_ids) for completion in completions)
        return completions
    bare = decode_response(BARE, response)
    check_indices((choice.index for choice in bare.choices), reading.request.sampling.n)
    for choice in bare.choices:
        ids = ids_of(choice.token_ids, f"choice {choice.index} of the response")
        worker.response_check.check_tokens(
            reading.request, choice.index, ids, (), len(ids), worker.id
        )
        worker.sampled += len(ids)
        finish_of(choice.finish_reason)
        await worker.accepted.learn(choice.weight_versions or (), since)
        worker.accepted.check_spans(choice.weight_versions or (), since, worker.id)
    return []


def _generate_request(
    fields: GenerateFields, ids: Sequence[int], model: ServedModel, client_id: str, caller: Caller
) -> GenerateRequest:
    name = caller.request_id(client_id)
    return GenerateRequest(
        prompt_ids=ids,
        sampling=fields.sampling(),
        model=model.name,
        request_id=name,
        cache_salt=caller.cache_salt(fields.cache_salt),
        priority=fields.priority,
        experts_start=fields.experts_start,
        experts_skipped=fields.experts_skipped,
        support=fields.support,
        weight_version=fields.weight_version,
        min_weight_version=fields.min_weight_version,
        headers=caller.headers(name),
    )
