"""vLLM's POST /v1/chat/completions/render: a chat as the request for /inference/v1/generate."""

from __future__ import annotations

from typing import Any

import msgspec

from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.json.lazy_ids import as_list
from lockstep.protocol.vllm.encode_generate import sampling_params
from lockstep.protocol.vllm.generate_request import SamplingParams


class RenderedChat(msgspec.Struct, kw_only=True):
    """The response: a body that /inference/v1/generate accepts unchanged."""

    request_id: str
    token_ids: list[int]
    sampling_params: SamplingParams
    model: str | None
    cache_salt: str | None = None
    priority: int = 0
    stream: bool = False

    token_offsets: Any = None
    features: Any = None
    content_parts: Any = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    output_mode: str = "tokens"
    stream_options: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None


def rendered_chat(
    request: GenerateRequest, request_id: str, *, cache_salt: str | None, logprobs: bool
) -> RenderedChat:
    """Return the body that samples the same as a chat request, under the client's own id and
    salt.
    """
    params = sampling_params(request)
    params.logprob_mode = request.sampling.logprob_mode
    if not logprobs:
        params.logprobs = None
    return RenderedChat(
        request_id=request_id,
        token_ids=as_list(request.prompt_ids),
        sampling_params=params,
        model=request.model,
        cache_salt=cache_salt,
        priority=request.priority,
    )
