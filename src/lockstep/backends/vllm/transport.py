"""vLLM's POST /inference/v1/generate, which Lockstep's own servers speak as well."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from lockstep.backends.http_transport import HttpTransport
from lockstep.backends.transport import CompletionStream, ModelCard, Relay, TransportName
from lockstep.http.client.client import HttpClient
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.common.response import Reading
from lockstep.protocol.json.base64_extract import Base64Extractor, ExtractedBody
from lockstep.protocol.vllm.decode_generate import GenerateStreamDecoder, decode_generate
from lockstep.protocol.vllm.encode_generate import encode_lockstep, encode_vllm
from lockstep.protocol.vllm.generate_response import REQUEST_ID_PREFIX
from lockstep.tokens import Completion, LogprobMode

ROUTE = "/inference/v1/generate"


class VllmTransport(HttpTransport):
    """A vLLM server started with --enable-scale-out, or a Lockstep worker or gateway.

    `logprob_mode` is the mode that the vLLM server was started with; a Lockstep server reports it.
    `lockstep` says which of the two it is; by default the model cards tell.
    """

    name: TransportName = "vllm"
    usual_mode: LogprobMode = "raw"
    aborts_by_id = True
    gives_choices = True

    def __init__(
        self,
        http: HttpClient,
        *,
        logprob_mode: LogprobMode | None = None,
        version: str | None = None,
        lockstep: bool | None = None,
    ) -> None:
        super().__init__(http, logprob_mode=logprob_mode, version=version)
        self._lockstep = lockstep
        self._relays = lockstep is True

    @property
    def relay(self) -> Relay | None:
        return self if self._relays else None

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        body, reading = await self._prepare(request, stream=False)
        timeout, headers = request.timeout, request.headers
        response: bytearray | ExtractedBody
        if request.experts_start is None:
            response = await self._http.post(ROUTE, body, timeout=timeout, headers=headers)
        else:
            response = await self._http.post_collected(
                ROUTE, body, Base64Extractor, timeout=timeout, headers=headers
            )
        return await self._decode(decode_generate, response, reading)

    async def stream(self, request: GenerateRequest) -> CompletionStream:
        body, reading = await self._prepare(request, stream=True)
        decoder = GenerateStreamDecoder(reading)
        batches = self._http.event_batches(
            ROUTE, body, timeout=request.timeout, headers=request.headers
        )
        async with aclosing(batches):
            async for batch in batches:
                for delta in decoder.deltas(batch):
                    yield delta
        for completion in decoder.finish():
            yield completion

    async def forward(self, raw: bytes, request: GenerateRequest) -> tuple[bytearray, Reading]:
        response = await self._http.post(
            ROUTE, raw, timeout=request.timeout, headers=request.headers
        )
        return response, self._reading(request, None)

    def forward_events(
        self, raw: bytes, request: GenerateRequest
    ) -> AsyncGenerator[list[bytes], None]:
        return self._http.event_batches(
            ROUTE, raw, timeout=request.timeout, headers=request.headers
        )

    async def models(self) -> list[ModelCard]:
        cards = await super().models()
        if self._lockstep is None:
            # Checked each time: another kind of server may have started behind the same URL.
            self._relays = any(card.owned_by == "lockstep" for card in cards)
        return cards

    async def abort(self, *request_ids: str) -> int | None:
        # vLLM expects the prefixed id of its responses, and does not report what it stopped.
        prefixed = [REQUEST_ID_PREFIX + i.removeprefix(REQUEST_ID_PREFIX) for i in request_ids]
        body = msgspec.json.encode({"request_ids": prefixed})
        response = await self._http.post("/inference/v1/abort_requests", body)
        stopped = (
            msgspec.json.decode(response).get("aborted") if response.startswith(b"{") else None
        )
        return stopped if isinstance(stopped, int) else None

    async def _prepare(self, request: GenerateRequest, *, stream: bool) -> tuple[bytes, Reading]:
        card = await self._limits.check_length(request)
        lockstep = self._lockstep
        if lockstep is None:
            # An adapter that was just loaded may not be listed yet: ask what its server is.
            lockstep = self._relays if card is None else card.owned_by == "lockstep"
        if lockstep:
            body = encode_lockstep(request, stream=stream)
        else:
            body = encode_vllm(request, mode=self._mode, stream=stream)
        return body, self._reading(request, card)
