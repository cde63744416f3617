"""SGLang's native POST /generate."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from lockstep.backends.model_limits import ModelLimits, read_models
from lockstep.backends.repeated_choices import gather, merge
from lockstep.backends.transport import ModelCard, TransportName
from lockstep.http.client import HttpClient
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.common.response import UNKNOWN_VERSION, Reading, StreamDelta
from lockstep.protocol.sglang.generate import (
    Layout,
    SglangStreamDecoder,
    check_layout,
    decode_sglang,
    encode_sglang,
)
from lockstep.tokens import Completion, LogprobMode
from lockstep.tokens.errors import BadRequest, UnknownModel

ROUTE = "/generate"


class SglangTransport:
    """An SGLang server. n > 1 is asked n times.

    `logprob_mode`: SGLang divides by the temperature before it takes logprobs, unless it was
    started with SGLANG_RETURN_ORIGINAL_LOGPROB. `experts_layout` is (layers, top_k) of the model,
    which SGLang does not send with routed experts.
    """

    name: TransportName = "sglang"

    def __init__(
        self,
        link: HttpClient,
        *,
        logprob_mode: LogprobMode = "processed",
        version: str = UNKNOWN_VERSION,
        experts_layout: Layout | None = None,
    ) -> None:
        self._link = link
        self._mode = logprob_mode
        self._version = version
        self._layout = experts_layout
        self._limits = ModelLimits(self.models)

    @property
    def base_url(self) -> str:
        return self._link.base_url

    async def generate(self, ask: GenerateRequest) -> list[Completion]:
        card = await self._prepare(ask)
        return await gather(ask, lambda one, index: self._one(one, index, card))

    async def stream(self, ask: GenerateRequest) -> AsyncGenerator[StreamDelta | Completion, None]:
        card = await self._prepare(ask)
        async with aclosing(merge(ask, lambda one, at: self._follow(one, at, card))) as items:
            async for item in items:
                yield item

    async def models(self) -> list[ModelCard]:
        return read_models(await self._link.get("/v1/models"))

    async def abort(self, request_id: str) -> int | None:
        await self._link.post("/abort_request", msgspec.json.encode({"rid": request_id}))
        return None

    async def close(self) -> None:
        await self._link.close()

    async def _prepare(self, ask: GenerateRequest) -> ModelCard | None:
        """The model's card, after everything that could be refused has been."""
        check_layout(ask, self._layout)
        card = await self._limits.room(ask)
        if card is None and ask.model is not None and self._limits.known:
            # The route has no model field: it would answer with whatever model it has.
            raise UnknownModel(
                f"{ask.model!r} is not served here: {', '.join(self._limits.known)}", param="model"
            )
        self._encode(ask.alone(0), card, stream=False)
        return card

    async def _one(self, ask: GenerateRequest, index: int, card: ModelCard | None) -> Completion:
        body = self._encode(ask, card, stream=False)
        answer = await self._link.post_spliced(
            ROUTE, body, timeout=ask.timeout, headers=ask.headers
        )
        return decode_sglang(answer, self._reading(ask, index, card), self._layout)

    async def _follow(
        self, ask: GenerateRequest, index: int, card: ModelCard | None
    ) -> AsyncGenerator[StreamDelta | Completion, None]:
        collected = SglangStreamDecoder(self._reading(ask, index, card), self._layout)
        body = self._encode(ask, card, stream=True)
        events = self._link.events(ROUTE, body, timeout=ask.timeout, headers=ask.headers)
        async with aclosing(events):
            async for event in events:
                for delta in collected.feed(event):
                    yield delta
        for completion in collected.finish():
            yield completion

    def _encode(self, ask: GenerateRequest, card: ModelCard | None, *, stream: bool) -> bytes:
        tokens = ask.sampling.max_tokens
        if tokens is None and card is not None and card.max_model_len is not None:
            tokens = card.max_model_len - len(ask.prompt_ids)
        if tokens is None:
            raise BadRequest(
                "max_tokens is needed: SGLang would stop after 128 tokens, and this server does "
                "not tell how long its context is",
                param="max_tokens",
            )
        adapter = card.id if card is not None and card.parent else None
        return encode_sglang(
            ask, mode=self._mode, max_new_tokens=tokens, adapter=adapter, stream=stream
        )

    def _reading(self, ask: GenerateRequest, index: int, card: ModelCard | None) -> Reading:
        adapter = card.id if card is not None and card.parent else None
        return Reading(ask, self._mode, self._version, self.base_url, adapter, index)
