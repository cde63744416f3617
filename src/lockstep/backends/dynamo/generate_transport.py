"""Dynamo's own POST /inference/v1/generate, where an operator has switched it on."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from lockstep.backends.model_limits import ModelLimits, read_models
from lockstep.backends.repeated_choices import gather
from lockstep.backends.transport import ModelCard, TransportName
from lockstep.http.client import HttpClient
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.common.response import UNKNOWN_VERSION, Reading, StreamDelta
from lockstep.protocol.vllm.decode_generate import decode_generate
from lockstep.protocol.vllm.encode_generate import encode_dynamo_generate
from lockstep.tokens import Completion, LogprobMode

ROUTE = "/inference/v1/generate"


class DynamoGenerateTransport:
    """Needs DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE=1 on the frontend, and a worker that opted in.

    The route does not stream, so `stream` gives one delta per choice. It sends no EOS ids to the
    worker, so asks must name their stop tokens. n > 1 is asked n times.
    """

    name: TransportName = "dynamo-generate"

    def __init__(
        self,
        link: HttpClient,
        *,
        logprob_mode: LogprobMode = "processed",
        version: str = UNKNOWN_VERSION,
    ) -> None:
        self._link = link
        self._mode = logprob_mode
        self._version = version
        self._limits = ModelLimits(self.models)

    @property
    def base_url(self) -> str:
        return self._link.base_url

    async def generate(self, ask: GenerateRequest) -> list[Completion]:
        encode_dynamo_generate(ask.alone(0), mode=self._mode)  # refuses before anything is sent
        card = await self._limits.room(ask)
        return await gather(ask, lambda one, index: self._one(one, index, card))

    async def stream(self, ask: GenerateRequest) -> AsyncGenerator[StreamDelta | Completion, None]:
        completions = await self.generate(ask)
        for done in completions:
            yield StreamDelta(done.index, list(done.token_ids), list(done.logprobs))
        for done in completions:
            yield done

    async def models(self) -> list[ModelCard]:
        return read_models(await self._link.get("/v1/models"))

    async def abort(self, request_id: str) -> int | None:
        """Dynamo's frontend has no such route: cancel the call, which closes its connection."""
        return None

    async def close(self) -> None:
        await self._link.close()

    async def _one(self, ask: GenerateRequest, index: int, card: ModelCard | None) -> Completion:
        body = encode_dynamo_generate(ask, mode=self._mode)
        answer = await self._link.post_spliced(
            ROUTE, body, timeout=ask.timeout, headers=ask.headers
        )
        adapter = card.id if card is not None and card.parent else None
        reading = Reading(ask, self._mode, self._version, self.base_url, adapter, index)
        return decode_generate(answer, reading)[0]
