"""NVIDIA Dynamo's frontend: POST /v1/chat/completions with token ids in nvext."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID

import msgspec

from lockstep.backends.model_limits import ModelLimits, read_models
from lockstep.backends.repeated_choices import gather, merge
from lockstep.backends.transport import ModelCard, TransportName
from lockstep.http.client import HttpClient
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.common.response import UNKNOWN_VERSION, Reading, StreamDelta, decode_response
from lockstep.protocol.dynamo.decode_chat import DynamoStreamDecoder, decode_dynamo
from lockstep.protocol.dynamo.encode_chat import encode_dynamo
from lockstep.tokens import Completion, LogprobMode
from lockstep.tokens.errors import BadRequest, Unavailable, UnknownModel

ROUTE = "/v1/chat/completions"
PIN = "backend_instance_id"


def pinned(frontend: str, instance: str) -> str:
    """The URL of one worker behind a frontend: http://INSTANCE@HOST:PORT."""
    parts = urlsplit(frontend)
    return urlunsplit(parts._replace(netloc=f"{instance}@{parts.netloc.rpartition('@')[2]}"))


class _Instance(msgspec.Struct):
    instance_id: int
    endpoint: str = ""


class _Health(msgspec.Struct):
    instances: list[_Instance] = []


HEALTH = msgspec.json.Decoder(_Health)


class DynamoTransport:
    """A Dynamo frontend. n > 1 is asked n times: one answer holds the data of one choice only.

    `logprob_mode` is what its engines were started with (RL workers compute processed ones).
    `version` labels the tokens of engines that do not tell their weight version.

    With a URL of the form http://INSTANCE@HOST:PORT every request goes to that worker and no other;
    when it is gone they fail with Unavailable, whatever the frontend says.
    """

    name: TransportName = "dynamo"

    def __init__(
        self,
        link: HttpClient,
        *,
        logprob_mode: LogprobMode = "processed",
        version: str = UNKNOWN_VERSION,
    ) -> None:
        self._pin, link.base_url = _split(link.base_url)
        self._link = link
        self._mode = logprob_mode
        self._version = version
        self._limits = ModelLimits(self.models)

    @property
    def base_url(self) -> str:
        return self._link.base_url

    async def generate(self, ask: GenerateRequest) -> list[Completion]:
        ask = self._pinned(ask)
        encode_dynamo(ask.alone(0), mode=self._mode)  # refuses before anything is sent
        card = await self._limits.room(ask)
        return await gather(ask, lambda one, index: self._one(one, index, card))

    async def stream(self, ask: GenerateRequest) -> AsyncGenerator[StreamDelta | Completion, None]:
        ask = self._pinned(ask)
        encode_dynamo(ask.alone(0), mode=self._mode)
        card = await self._limits.room(ask)
        async with aclosing(merge(ask, lambda one, at: self._follow(one, at, card))) as items:
            async for item in items:
                yield item

    async def models(self) -> list[ModelCard]:
        """What the frontend lists. Raises Unavailable when a pinned worker is not there."""
        if self._pin is not None:
            await self._check_there()
        return read_models(await self._link.get("/v1/models"))

    async def abort(self, request_id: str) -> int | None:
        """Dynamo's frontend has no such route: cancel the call, which closes its connection."""
        return None

    async def close(self) -> None:
        await self._link.close()

    async def _one(self, ask: GenerateRequest, index: int, card: ModelCard | None) -> Completion:
        body = encode_dynamo(ask, mode=self._mode)
        try:
            answer = await self._link.post_spliced(
                ROUTE, body, timeout=ask.timeout, headers=_headers(ask)
            )
        except (BadRequest, UnknownModel):
            await self._check_there()
            raise
        return decode_dynamo(answer, self._reading(ask, index, card))

    async def _follow(
        self, ask: GenerateRequest, index: int, card: ModelCard | None
    ) -> AsyncGenerator[StreamDelta | Completion, None]:
        collected = DynamoStreamDecoder(self._reading(ask, index, card))
        body = encode_dynamo(ask, mode=self._mode, stream=True)
        events = self._link.events(ROUTE, body, timeout=ask.timeout, headers=_headers(ask))
        try:
            async with aclosing(events):
                async for event in events:
                    for delta in collected.feed(event):
                        yield StreamDelta(index, delta.token_ids, delta.logprobs)
        except (BadRequest, UnknownModel):
            await self._check_there()
            raise
        for completion in collected.finish():
            yield completion

    def _pinned(self, ask: GenerateRequest) -> GenerateRequest:
        if self._pin is None:
            return ask
        given: dict[str, Any] = dict(ask.nvext or {})
        if given.setdefault(PIN, self._pin) != self._pin:
            raise BadRequest(
                f"nvext.{PIN} is {given[PIN]}, but this URL is that of worker {self._pin}: leave "
                "it out, or ask the frontend itself",
                param=f"nvext.{PIN}",
            )
        return replace(ask, nvext=given)

    async def _check_there(self) -> None:
        """Raises Unavailable when the pinned worker is gone: the frontend calls that a bad request,
        or says that it does not know the model."""
        if self._pin is None:
            return
        health = decode_response(HEALTH, await self._link.get("/health"))
        if all(one.instance_id != self._pin for one in health.instances):
            raise Unavailable(f"worker {self._pin} is not known to {self.base_url} (any more)")

    def _reading(self, ask: GenerateRequest, index: int, card: ModelCard | None) -> Reading:
        adapter = card.id if card is not None and card.parent else None
        return Reading(ask, self._mode, self._version, self.base_url, adapter, index)


def _split(url: str) -> tuple[int | None, str]:
    """The worker that a URL names, and the URL of the frontend. Raises BadRequest."""
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


def _headers(ask: GenerateRequest) -> dict[str, str]:
    headers = dict(ask.headers or {})
    if ask.request_id is not None:
        headers["x-request-id"] = ask.request_id
        with suppress(ValueError):  # only a UUID may become the id that the worker sees
            headers["x-dynamo-request-id"] = str(UUID(ask.request_id))
    return headers
