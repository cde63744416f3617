"""vLLM's POST /inference/v1/generate, which Lockstep's own servers speak as well."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from lockstep.backends.model_limits import ModelLimits, read_models
from lockstep.backends.transport import ModelCard, TransportName
from lockstep.http.client import HttpClient
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.common.response import UNKNOWN_VERSION, Reading, StreamDelta
from lockstep.protocol.vllm.decode_generate import GenerateStreamDecoder, decode_generate
from lockstep.protocol.vllm.encode_generate import encode_lockstep, encode_vllm
from lockstep.protocol.vllm.generate_response import REQUEST_ID_PREFIX
from lockstep.tokens import Completion, LogprobMode

ROUTE = "/inference/v1/generate"


class VllmTransport:
    """A vLLM server started with --enable-scale-out, or a Lockstep worker or gateway.

    `logprob_mode` is what the vLLM server was started with; a Lockstep server says it itself.
    `lockstep` is found out from the model cards unless it is given.
    """

    name: TransportName = "vllm"

    def __init__(
        self,
        link: HttpClient,
        *,
        logprob_mode: LogprobMode = "raw",
        version: str = UNKNOWN_VERSION,
        lockstep: bool | None = None,
    ) -> None:
        self._link = link
        self._mode = logprob_mode
        self._version = version
        self._lockstep = lockstep
        self._limits = ModelLimits(self.models)

    @property
    def base_url(self) -> str:
        return self._link.base_url

    async def generate(self, ask: GenerateRequest) -> list[Completion]:
        body, reading = await self._prepare(ask, stream=False)
        answer = await self._link.post_spliced(
            ROUTE, body, timeout=ask.timeout, headers=ask.headers
        )
        return decode_generate(answer, reading)

    async def stream(self, ask: GenerateRequest) -> AsyncGenerator[StreamDelta | Completion, None]:
        body, reading = await self._prepare(ask, stream=True)
        collected = GenerateStreamDecoder(reading)
        batches = self._link.event_batches(ROUTE, body, timeout=ask.timeout, headers=ask.headers)
        async with aclosing(batches):
            async for batch in batches:
                for delta in collected.deltas(batch):
                    yield delta
        for completion in collected.finish():
            yield completion

    async def relay(self, body: bytes, ask: GenerateRequest) -> tuple[bytearray, Reading]:
        """The answer to a body that was written in this dialect already, as it came.

        For a gateway that forwards bytes; the reading is what it needs to check them.
        """
        answer = await self._link.post(ROUTE, body, timeout=ask.timeout, headers=ask.headers)
        return answer, Reading(ask, self._mode, self._version, worker=self.base_url)

    def relay_events(self, body: bytes, ask: GenerateRequest) -> AsyncGenerator[list[bytes], None]:
        """`relay` for a streamed answer: the data of its events, those together that came so."""
        return self._link.event_batches(ROUTE, body, timeout=ask.timeout, headers=ask.headers)

    async def models(self) -> list[ModelCard]:
        return read_models(await self._link.get("/v1/models"))

    async def abort(self, request_id: str) -> int | None:
        # vLLM knows requests by the prefixed id it answers with, and does not say what it stopped.
        names = [REQUEST_ID_PREFIX + request_id.removeprefix(REQUEST_ID_PREFIX)]
        body = msgspec.json.encode({"request_ids": names})
        answer = await self._link.post("/inference/v1/abort_requests", body)
        stopped = msgspec.json.decode(answer).get("aborted") if answer.startswith(b"{") else None
        return stopped if isinstance(stopped, int) else None

    async def close(self) -> None:
        await self._link.close()

    async def _prepare(self, ask: GenerateRequest, *, stream: bool) -> tuple[bytes, Reading]:
        card = await self._limits.room(ask)
        lockstep = self._lockstep
        if lockstep is None:
            lockstep = card is not None and card.owned_by == "lockstep"
        if lockstep:
            body = encode_lockstep(ask, stream=stream)
        else:
            body = encode_vllm(ask, mode=self._mode, stream=stream)
        adapter = card.id if card is not None and card.parent else None
        reading = Reading(ask, self._mode, self._version, worker=self.base_url, adapter=adapter)
        return body, reading
