"""SGLang's native POST /generate."""

from __future__ import annotations

from contextlib import aclosing

import msgspec

from lockstep.backends.repeated_choices import RepeatedChoices
from lockstep.backends.sglang.server import BEYOND, GENERATE, ServedNames, vocabulary_size
from lockstep.backends.transport import CompletionStream, ModelCard, TransportName
from lockstep.http.client.client import HttpClient
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.json.base64_extract import Base64Extractor
from lockstep.protocol.json.lazy_ids import as_list
from lockstep.protocol.sglang.generate import (
    Layout,
    SglangStreamDecoder,
    check_layout,
    decode_sglang,
    encode_sglang,
    rid_of,
)
from lockstep.tokens import Completion, LogprobMode
from lockstep.tokens.errors import BadRequest, UnknownModel
from lockstep.tokens.ids import check_ids


class SglangTransport(RepeatedChoices):
    """An SGLang server. n > 1 is n requests. Token ids are checked before they are sent.

    `logprob_mode`: SGLang divides by the temperature before it takes logprobs, unless it was
    started with SGLANG_RETURN_ORIGINAL_LOGPROB. `experts_layout` is (layers, top_k) of the model,
    which SGLang does not send with routed experts.
    """

    name: TransportName = "sglang"
    usual_mode: LogprobMode = "processed"
    aborts_by_id = True

    def __init__(
        self,
        http: HttpClient,
        *,
        logprob_mode: LogprobMode | None = None,
        version: str | None = None,
        experts_layout: Layout | None = None,
    ) -> None:
        super().__init__(http, logprob_mode=logprob_mode, version=version)
        self._layout = experts_layout
        self._names = ServedNames(http)
        self._vocabulary: int | None = None

    async def models(self) -> list[ModelCard]:
        """Return the models and adapters that the server lists now, the base model under the name
        that the server was started with."""
        return await self._names.restore(await super().models())

    async def abort(self, *request_ids: str) -> int | None:
        for request_id in request_ids:  # the route takes one id
            body = msgspec.json.encode({"rid": rid_of(request_id)})
            await self._http.post("/abort_request", body)
        return None

    async def _prepare(self, request: GenerateRequest) -> tuple[GenerateRequest, ModelCard | None]:
        """Return the model's card, after checking everything that could be rejected."""
        check_layout(request, self._layout)
        card = await self._limits.check_length(request)
        if card is None and request.model is not None and self._limits.names:
            # The route has no model field: the server would answer with the model it has.
            raise UnknownModel(
                f"{request.model!r} is not served here: {', '.join(self._limits.names)}",
                param="model",
            )
        self._encode(request.alone(0), card, stream=False)
        await self._check_ids(request)
        return request, card

    async def _check_ids(self, request: GenerateRequest) -> None:
        """Raise BadTokenId for an id outside the vocabulary, which would end the server's process.

        A server that does not report its vocabulary gets ids from 0 to 2**31 - 2.
        """
        if self._vocabulary is None:
            self._vocabulary = await vocabulary_size(self._http) or BEYOND
        check_ids(as_list(request.prompt_ids), self._vocabulary, "prompt_ids")

    @property
    def _last_id(self) -> int | None:
        return None if self._vocabulary is None else self._vocabulary - 1

    async def _generate(
        self, request: GenerateRequest, index: int, card: ModelCard | None
    ) -> Completion:
        body = self._encode(request, card, stream=False)
        response = await self._http.post_collected(
            GENERATE, body, Base64Extractor, timeout=request.timeout, headers=request.headers
        )
        reading = self._reading(request, card, index)
        return await self._decode(
            decode_sglang, response, reading, self._layout, last_id=self._last_id
        )

    async def _follow(
        self, request: GenerateRequest, index: int, card: ModelCard | None
    ) -> CompletionStream:
        reading = self._reading(request, card, index)
        decoder = SglangStreamDecoder(reading, self._layout, self._last_id)
        body = self._encode(request, card, stream=True)
        events = self._http.events(GENERATE, body, timeout=request.timeout, headers=request.headers)
        async with aclosing(events):
            async for event in events:
                for delta in decoder.feed(event):
                    yield delta
        for completion in decoder.finish():
            yield completion

    def _encode(self, request: GenerateRequest, card: ModelCard | None, *, stream: bool) -> bytes:
        tokens = request.sampling.max_tokens
        if tokens is None and card is not None and card.max_model_len is not None:
            tokens = card.max_model_len - len(request.prompt_ids)
        if tokens is None:
            raise BadRequest(
                "max_tokens is needed: SGLang would stop after 128 tokens, and this server does "
                "not report the length of its context",
                param="max_tokens",
            )
        adapter = card.id if card is not None and card.parent else None
        return encode_sglang(
            request, mode=self._mode, max_new_tokens=tokens, adapter=adapter, stream=stream
        )
