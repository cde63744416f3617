"""The generate face: vLLM's dialect in front of a fleet, every answer checked on its way.

Bodies go to Lockstep workers as they came, and so do the answers back: they are decoded once, to
check the contract, and never written anew. Other backends are asked in their own dialect.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from time import time

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as HttpRoute

from lockstep.backends.vllm.transport import VllmTransport
from lockstep.fleet.routing.affinity import Affinity
from lockstep.fleet.routing.pool import Worker
from lockstep.gateway.context import GatewayContext, request_id, session_id
from lockstep.gateway.models import ServedModel
from lockstep.http import sse
from lockstep.http.handlers import EventStream, json_response, read_json, unless_gone
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


class _BareAnswer(msgspec.Struct):
    choices: list[_BareChoice] = []


BARE = msgspec.json.Decoder(_BareAnswer)
ANSWERED_AS = (wire.REQUEST_ID_PREFIX, "chatcmpl-", "cmpl-")


class GenerateRoutes:
    """POST /inference/v1/generate and /inference/v1/abort_requests."""

    def __init__(self, gateway: GatewayContext) -> None:
        self._gateway = gateway
        self.routes = [
            HttpRoute("/inference/v1/generate", self.generate, methods=["POST"]),
            HttpRoute("/inference/v1/abort_requests", self.abort, methods=["POST"]),
        ]

    async def generate(self, http: Request) -> Response:
        """A session header only steers routing here: these clients keep their own ledger."""
        request_id(http)
        body = await read_json(http, self._gateway.body_limit)
        asked, ids = decode_relayed(body)
        served = await self._gateway.book.resolve(asked.model)
        ask = _ask(asked, ids, served, request_id(http, asked.request_id))
        route = Affinity.of(
            ask.prompt_ids, session=session_id(http), salt=ask.cache_salt, adapter=served.adapter
        )
        if asked.stream:
            events = self._events(route, ask, asked, body)
            return await EventStream.started(http, events, ask.request_id)

        async def call(worker: Worker) -> bytes | bytearray:
            return await self._whole(worker, ask, asked, served, body)

        return json_response(await unless_gone(http, self._gateway.pool.run(route, call)))

    async def _whole(
        self,
        worker: Worker,
        ask: GenerateRequest,
        asked: GenerateFields,
        served: ServedModel,
        body: bytes,
    ) -> bytes | bytearray:
        if worker.lockstep and isinstance(worker.transport, VllmTransport):
            since = worker.agreement.mark()
            answer, reading = await worker.transport.relay(body, ask)
            _check(answer, reading, asked, worker, since)
            return answer
        done = await worker.generate(ask)
        return wire.generate_response(
            done,
            request_id=wire.REQUEST_ID_PREFIX + (ask.request_id or ""),
            model=served.name,
            created=int(time()),
            form=asked.form,
        )

    def _events(
        self, route: Affinity, ask: GenerateRequest, asked: GenerateFields, body: bytes
    ) -> AsyncGenerator[bytes, None]:
        def opened(worker: Worker) -> AsyncIterator[bytes]:
            if worker.lockstep and isinstance(worker.transport, VllmTransport):
                return _relayed(worker, worker.transport, ask, asked, body)
            return _rewritten(worker, ask, asked)

        return self._gateway.pool.stream(route, opened)

    async def abort(self, http: Request) -> Response:
        """Stops requests by id on whatever worker they run; says how many it really stopped."""
        request_id(http)
        asked = decode_abort(await read_json(http, self._gateway.body_limit))
        if not asked.request_ids:
            raise BadRequest("request_ids is empty: name at least one", param="request_ids")
        stopped = 0
        for name in asked.request_ids:
            stopped += await self._gateway.pool.abort(bare_id(name))
        return json_response({"status": "aborted", "aborted": stopped})


def bare_id(name: str) -> str:
    """A request's own id, from the id that any face answered with."""
    for prefix in ANSWERED_AS:
        name = name.removeprefix(prefix)
    return name


async def _relayed(
    worker: Worker,
    transport: VllmTransport,
    ask: GenerateRequest,
    asked: GenerateFields,
    body: bytes,
) -> AsyncIterator[bytes]:
    """The worker's events as they come, checked; the stream must end with every choice finished.

    What came together goes on together.
    """
    checks = _ScoredEvents if asked.sampling_params.logprobs is not None else _BareEvents
    answer = checks(worker, ask)
    async with aclosing(transport.relay_events(body, ask)) as batches:
        async for batch in batches:
            passed: list[bytes] = []
            try:
                for event, _ in zip(batch, answer.check(batch), strict=True):
                    passed += (b"data: ", event, b"\n\n")
            except LockstepError:
                # What came before the fault is part of the answer.
                if passed:
                    yield b"".join(passed)
                raise
            yield b"".join(passed)
    answer.finish()


class _ScoredEvents:
    """Checks a streamed answer with logprobs, event by event and as a whole."""

    def __init__(self, worker: Worker, ask: GenerateRequest) -> None:
        self._worker, self._since = worker, worker.agreement.mark()
        self._collected = GenerateStreamDecoder(Reading(ask))
        self.check = self._collected.collect

    def finish(self) -> None:
        self._worker.agreement.check(self._collected.finish(), self._since, self._worker.id)


class _BareEvents:
    """The same without logprobs, where there is less to check."""

    def __init__(self, worker: Worker, ask: GenerateRequest) -> None:
        self._worker, self._since = worker, worker.agreement.mark()
        self._choices = ask.sampling.n
        self._finished: set[int] = set()

    def check(self, batch: list[bytes]) -> Iterator[None]:
        for event in batch:
            for choice in decode_response(BARE, event).choices:
                spans = choice.weight_versions or ()
                self._worker.agreement.check_spans(spans, self._since, self._worker.id)
                if choice.finish_reason:
                    self._finished.add(choice.index)
            yield

    def finish(self) -> None:
        check_indices(self._finished, self._choices)


async def _rewritten(
    worker: Worker, ask: GenerateRequest, asked: GenerateFields
) -> AsyncIterator[bytes]:
    """Another dialect's stream in this one's words."""
    named = wire.REQUEST_ID_PREFIX + (ask.request_id or "")
    stream = wire.GenerateStreamEncoder(named, ask.prompt_ids, asked.form)
    # Completions come last and repeat what the deltas brought: they only add how it ended.
    async with aclosing(worker.stream(ask)) as events:
        async for event in events:
            if isinstance(event, Completion):
                yield sse.event(stream.chunk(event.index, [], [], None, None, event))
            elif isinstance(event, StreamDelta):
                chunk = stream.chunk(event.index, event.token_ids, event.logprobs, None, None, None)
                yield sse.event(chunk)
    if asked.include_usage:
        yield sse.event(stream.usage())


def _check(
    answer: bytearray, reading: Reading, asked: GenerateFields, worker: Worker, since: int
) -> None:
    """Raises the error of an answer that must not be handed on."""
    if asked.sampling_params.logprobs is not None:
        worker.agreement.check(decode_generate(answer, reading), since, worker.id)
        return
    bare = decode_response(BARE, answer)
    check_indices((choice.index for choice in bare.choices), reading.ask.sampling.n)
    for choice in bare.choices:
        ids_of(choice.token_ids, f"choice {choice.index} of the answer")
        finish_of(choice.finish_reason)
        worker.agreement.check_spans(choice.weight_versions or (), since, worker.id)


def _ask(
    asked: GenerateFields, ids: Sequence[int], served: ServedModel, chosen: str
) -> GenerateRequest:
    bare = chosen.removeprefix(wire.REQUEST_ID_PREFIX)
    return GenerateRequest(
        prompt_ids=ids,
        sampling=asked.sampling(),
        model=asked.model or served.name,
        request_id=bare,
        cache_salt=asked.cache_salt,
        priority=asked.priority,
        experts_start=asked.experts_start,
        weight_version=asked.weight_version,
        min_weight_version=asked.min_weight_version,
        headers={"X-Request-Id": bare},
    )
