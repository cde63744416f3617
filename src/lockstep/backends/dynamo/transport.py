"""NVIDIA Dynamo's frontend: POST /v1/chat/completions with token ids in nvext."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID, uuid4

import msgspec

from lockstep.backends.repeated_choices import RepeatedChoices
from lockstep.backends.transport import CompletionStream, ModelCard, TransportName
from lockstep.http.client.client import HttpClient
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.common.response import Provenance, StreamDelta, decode_response
from lockstep.protocol.dynamo.decode_chat import DynamoStreamDecoder, decode_dynamo
from lockstep.protocol.dynamo.encode_chat import encode_dynamo
from lockstep.protocol.json.base64_extract import Base64Extractor
from lockstep.tokens import Completion, LogprobMode
from lockstep.tokens.errors import BadRequest, Unavailable, UnknownModel

ROUTE = "/v1/chat/completions"
PIN = "backend_instance_id"
ID_HEADER = "x-dynamo-request-id"
"""Header with the id by which the worker knows a request; Dynamo accepts UUIDs only."""


def pinned_url(frontend: str, instance: str) -> str:
    """Return the URL of one worker behind a frontend: http://INSTANCE@HOST:PORT."""
    parts = urlsplit(frontend)
    return urlunsplit(parts._replace(netloc=f"{instance}@{parts.netloc.rpartition('@')[2]}"))


class _Instance(msgspec.Struct):
    instance_id: int
    endpoint: str = ""


class _Health(msgspec.Struct):
    instances: list[_Instance] = []


HEALTH = msgspec.json.Decoder(_Health)


class DynamoTransport(RepeatedChoices):
    """A Dynamo frontend. n > 1 is n requests: one response holds the data of one choice only.

    `logprob_mode` is the mode its engines were started with (RL workers compute processed ones).

    With a URL of the form http://INSTANCE@HOST:PORT every request goes to that worker only. When
    that worker is gone, requests fail with Unavailable, whatever the frontend says.
    """

    name: TransportName = "dynamo"
    usual_mode: LogprobMode = "processed"
    aborts_by_id = False

    def __init__(
        self,
        http: HttpClient,
        *,
        logprob_mode: LogprobMode | None = None,
        version: str | None = None,
    ) -> None:
        self._pin, http.base_url = _split(http.base_url)
        super().__init__(http, logprob_mode=logprob_mode, version=version)
        self._sent: dict[str, list[_SentRequest]] = {}

    async def models(self) -> list[ModelCard]:
        """Return the models that the frontend lists. Raises Unavailable when a pinned worker is
        gone."""
        if self._pin is not None:
            await self._check_there()
        return await super().models()

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        with self._named(request) as request:
            return await super().generate(request)

    async def stream(self, request: GenerateRequest) -> CompletionStream:
        with self._named(request) as request:
            async with aclosing(super().stream(request)) as items:
                async for item in items:
                    yield item

    async def abort(self, *request_ids: str) -> int | None:
        """Do nothing: Dynamo's frontend has no such route. Cancel the call, which closes its
        connection, or abort the `sent_ids` through the worker's control side."""
        return None

    def sent_ids(self, *request_ids: str) -> list[str]:
        """Return the ids by which Dynamo's worker knows these requests, one for each choice."""
        return [
            str(sent.choice(index))
            for request_id in request_ids
            for sent in self._sent.get(request_id) or _sent_elsewhere(request_id)
            for index in range(sent.choices)
        ]

    @contextmanager
    def _named(self, request: GenerateRequest) -> Iterator[GenerateRequest]:
        """Give a request its UUID and remember it while the request runs."""
        name = request.request_id
        if name is None:
            yield request
            return
        running = self._sent.setdefault(name, [])
        # Dynamo fails requests that share their UUID with a running one, so a second request of
        # the same name gets another.
        uuid = uuid4() if running else _uuid_of(name) or uuid4()
        sent = _SentRequest(uuid, request.sampling.n)
        running.append(sent)
        try:
            yield replace(request, headers={**(request.headers or {}), ID_HEADER: str(uuid)})
        finally:
            running.remove(sent)
            if not running:
                del self._sent[name]

    async def _prepare(self, request: GenerateRequest) -> tuple[GenerateRequest, ModelCard | None]:
        request = self._pin_request(request)
        encode_dynamo(request.alone(0), mode=self._mode)  # raises before anything is sent
        return request, await self._limits.check_length(request)

    async def _generate(
        self, request: GenerateRequest, index: int, card: ModelCard | None
    ) -> Completion:
        body = encode_dynamo(request, mode=self._mode)
        try:
            response = await self._http.post_collected(
                ROUTE,
                body,
                Base64Extractor,
                timeout=request.timeout,
                headers=_headers(request, index),
            )
        except (BadRequest, UnknownModel):
            await self._check_there()
            raise
        return await self._decode(decode_dynamo, response, self._reading(request, card, index))

    async def _follow(
        self, request: GenerateRequest, index: int, card: ModelCard | None
    ) -> CompletionStream:
        reading = self._reading(request, card, index)
        decoder, made = DynamoStreamDecoder(reading), Provenance.of(reading)
        body = encode_dynamo(request, mode=self._mode, stream=True)
        events = self._http.events(
            ROUTE, body, timeout=request.timeout, headers=_headers(request, index)
        )
        try:
            async with aclosing(events):
                async for event in events:
                    for delta in decoder.feed(event):
                        yield StreamDelta(index, delta.token_ids, delta.logprobs, made)
        except (BadRequest, UnknownModel):
            await self._check_there()
            raise
        for completion in decoder.finish():
            yield completion

    def _pin_request(self, request: GenerateRequest) -> GenerateRequest:
        if self._pin is None:
            return request
        nvext: dict[str, Any] = dict(request.nvext or {})
        if nvext.setdefault(PIN, self._pin) != self._pin:
            raise BadRequest(
                f"nvext.{PIN} is {nvext[PIN]}, but this URL is that of worker {self._pin}: leave "
                "it out, or use the URL of the frontend",
                param=f"nvext.{PIN}",
            )
        return replace(request, nvext=nvext)

    async def _check_there(self) -> None:
        """Raise Unavailable when the pinned worker is gone. The frontend reports that as a bad
        request, or as an unknown model."""
        if self._pin is None:
            return
        health = decode_response(HEALTH, await self._http.get("/health"))
        if all(instance.instance_id != self._pin for instance in health.instances):
            raise Unavailable(f"{self.base_url} does not list worker {self._pin} (any more)")


def _split(url: str) -> tuple[int | None, str]:
    """Split a URL into the worker that it names, if any, and the URL of the frontend. Raises
    BadRequest."""
    parts = urlsplit(url)
    if parts.username is None:
        return None, url
    if not parts.username.isdigit() or parts.password is not None:
        raise BadRequest(
            f"url is {url!r}: before @ a Dynamo frontend expects the instance_id of one of its "
            "workers, a number",
            param="url",
        )
    frontend = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    return int(parts.username), frontend


@dataclass(slots=True, eq=False)
class _SentRequest:
    """A running request of `choices` choices; choice i is sent under the UUID plus i."""

    uuid: UUID
    choices: int

    def choice(self, index: int) -> UUID:
        return UUID(int=(self.uuid.int + index) % 2**128)


def _uuid_of(request_id: str) -> UUID | None:
    try:
        return UUID(request_id)
    except ValueError:
        return None


def _sent_elsewhere(request_id: str) -> list[_SentRequest]:
    """Return the request that another gateway may have sent: only a UUID has the same id there."""
    uuid = _uuid_of(request_id)
    return [] if uuid is None else [_SentRequest(uuid, 1)]


def _headers(request: GenerateRequest, index: int) -> dict[str, str]:
    headers = dict(request.headers or {})
    if request.request_id is not None:
        headers["x-request-id"] = request.request_id
        headers[ID_HEADER] = str(_SentRequest(UUID(headers[ID_HEADER]), 1).choice(index))
    return headers
