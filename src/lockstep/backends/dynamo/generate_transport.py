"""Dynamo's own POST /inference/v1/generate, where an operator has switched it on."""

from __future__ import annotations

from lockstep.backends.repeated_choices import RepeatedChoices
from lockstep.backends.transport import CompletionStream, ModelCard, TransportName
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.common.response import StreamDelta
from lockstep.protocol.json.base64_extract import Base64Extractor
from lockstep.protocol.vllm.decode_generate import decode_generate
from lockstep.protocol.vllm.encode_generate import encode_dynamo_generate
from lockstep.tokens import Completion, LogprobMode

ROUTE = "/inference/v1/generate"


class DynamoGenerateTransport(RepeatedChoices):
    """A Dynamo frontend with DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE=1, and workers that opted in.

    The route does not stream, so `stream` yields one delta per choice. It sends no EOS ids to the
    worker, so requests must name their stop tokens. n > 1 is n requests.
    """

    name: TransportName = "dynamo-generate"
    usual_mode: LogprobMode = "processed"
    aborts_by_id = False

    async def stream(self, request: GenerateRequest) -> CompletionStream:
        completions = await self.generate(request)
        for choice in completions:
            yield StreamDelta(choice.index, list(choice.token_ids), list(choice.logprobs))
        for choice in completions:
            yield choice

    async def abort(self, *request_ids: str) -> int | None:
        """Do nothing: Dynamo's frontend has no such route. Cancel the call, which closes its
        connection."""
        return None

    async def _prepare(self, request: GenerateRequest) -> tuple[GenerateRequest, ModelCard | None]:
        encode_dynamo_generate(request.alone(0), mode=self._mode)  # raises before anything is sent
        return request, await self._limits.check_length(request)

    async def _generate(
        self, request: GenerateRequest, index: int, card: ModelCard | None
    ) -> Completion:
        body = encode_dynamo_generate(request, mode=self._mode)
        response = await self._http.post_collected(
            ROUTE, body, Base64Extractor, timeout=request.timeout, headers=request.headers
        )
        reading = self._reading(request, card, index)
        return (await self._decode(decode_generate, response, reading))[0]
