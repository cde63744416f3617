"""NVIDIA Dynamo's frontend: POST /v1/chat/completions with token ids in nvext."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from uuid import UUID

from lockstep.backends.choices import gather, merge
from lockstep.backends.http import Link
from lockstep.backends.limits import Limits, read_models
from lockstep.backends.transport import ModelCard, TransportName
from lockstep.tokens import Completion, LogprobMode
from lockstep.wire.answer import UNKNOWN_VERSION, Delta, Reading
from lockstep.wire.ask import Ask
from lockstep.wire.ask_dynamo import encode_dynamo
from lockstep.wire.read_dynamo import DynamoStream, read_dynamo

ROUTE = "/v1/chat/completions"


class DynamoTransport:
    """A Dynamo frontend. n > 1 is asked n times: one answer holds the data of one choice only.

    `logprob_mode` is what its engines were started with (RL workers compute processed ones).
    `version` labels the tokens of engines that do not tell their weight version.
    """

    name: TransportName = "dynamo"

    def __init__(
        self,
        link: Link,
        *,
        logprob_mode: LogprobMode = "processed",
        version: str = UNKNOWN_VERSION,
    ) -> None:
        self._link = link
        self._mode = logprob_mode
        self._version = version
        self._limits = Limits(self.models)

    @property
    def base_url(self) -> str:
        return self._link.base_url

    async def generate(self, ask: Ask) -> list[Completion]:
        encode_dynamo(ask.alone(0), mode=self._mode)  # refuses before anything is sent
        card = await self._limits.room(ask)
        return await gather(ask, lambda one, index: self._one(one, index, card))

    async def stream(self, ask: Ask) -> AsyncGenerator[Delta | Completion, None]:
        encode_dynamo(ask.alone(0), mode=self._mode)
        card = await self._limits.room(ask)
        async with aclosing(merge(ask, lambda one, at: self._follow(one, at, card))) as items:
            async for item in items:
                yield item

    async def models(self) -> list[ModelCard]:
        return read_models(await self._link.get("/v1/models"))

    async def abort(self, request_id: str) -> int | None:
        """Dynamo's frontend has no such route: cancel the call, which closes its connection."""
        return None

    async def close(self) -> None:
        await self._link.close()

    async def _one(self, ask: Ask, index: int, card: ModelCard | None) -> Completion:
        body = encode_dynamo(ask, mode=self._mode)
        answer = await self._link.post_spliced(
            ROUTE, body, timeout=ask.timeout, headers=_headers(ask)
        )
        return read_dynamo(answer, self._reading(ask, index, card))

    async def _follow(
        self, ask: Ask, index: int, card: ModelCard | None
    ) -> AsyncGenerator[Delta | Completion, None]:
        collected = DynamoStream(self._reading(ask, index, card))
        body = encode_dynamo(ask, mode=self._mode, stream=True)
        events = self._link.events(ROUTE, body, timeout=ask.timeout, headers=_headers(ask))
        async with aclosing(events):
            async for event in events:
                for delta in collected.feed(event):
                    yield Delta(index, delta.token_ids, delta.logprobs)
        for completion in collected.finish():
            yield completion

    def _reading(self, ask: Ask, index: int, card: ModelCard | None) -> Reading:
        adapter = card.id if card is not None and card.parent else None
        return Reading(ask, self._mode, self._version, self.base_url, adapter, index)


def _headers(ask: Ask) -> dict[str, str]:
    headers = dict(ask.headers or {})
    if ask.request_id is not None:
        headers["x-request-id"] = ask.request_id
        with suppress(ValueError):  # only a UUID may become the id that the worker sees
            headers["x-dynamo-request-id"] = str(UUID(ask.request_id))
    return headers
