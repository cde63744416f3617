"""Encoder of Dynamo's chat requests: ids in `nvext.token_data`, one placeholder message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.common.sampling_fields import LEFT_OUT_WHEN_OFF, write_sampling
from lockstep.protocol.dynamo.nvext import EXTRA_FIELDS
from lockstep.protocol.json.lazy_ids import as_list
from lockstep.protocol.vllm.encode_generate import (
    refuse_grammar,
    refuse_mode,
    refuse_scoring,
    refuse_stop_strings,
    refuse_versions,
)
from lockstep.tokens import LogprobMode
from lockstep.tokens.errors import BadRequest, UnknownField, UnsupportedField

PLACEHOLDER = "(token-in mode)"
"""Text of the message that Dynamo requires and ignores when there is token_data."""
NVEXT = frozenset(
    {
        "agent_hints",
        "annotations",
        "backend_instance_id",
        "cache_salt",
        "decode_worker_id",
        "dp_rank",
        "extra_fields",
        "greed_sampling",
        "max_thinking_tokens",
        "metadata_upload",
        "prefill_dp_rank",
        "prefill_worker_id",
        "request_timestamp_ms",
        "router",
        "routing_constraints",
        "token_data",
        "use_raw_prompt",
    }
)
EXPERTS_FROM = "lockstep.experts:"
"""Prefix of an annotation: a Lockstep engine returns routed experts from the given row on. The
extra field `routed_experts` would send them twice. Dynamo's own engines return them if started so.
"""


NAMES: Mapping[str, str | None] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
    "max_tokens": "max_completion_tokens",
    "min_tokens": "min_tokens",
    "stop": None,  # rejected: the frontend would cut the completion and lose its token data
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "allowed_token_ids": "allowed_token_ids",
    "prompt_logprobs": "prompt_logprobs",
    "logprobs": None,  # sent as `top_logprobs`; `logprobs` is a boolean there
    "n": None,  # rejected: one choice at a time
    "logit_bias": None,  # rejected: it never reaches the engine
    "grammar": None,  # rejected: Dynamo's frontend would have to support it
    "score_start": None,  # rejected: prompt logprobs are raw
    "logprob_mode": None,  # rejected unless it is the server's
}
"""Dynamo's name of each option; None if it is not sent under its own name."""
ENCODER = msgspec.json.Encoder()


def encode_dynamo(request: GenerateRequest, *, mode: LogprobMode, stream: bool = False) -> bytes:
    """Return the body for one choice. Nothing is dropped: what Dynamo would not forward is
    rejected.

    Raises UnsupportedField for stop strings, logit_bias, ignore_eos with stop ids, versions and
    other logprob modes, UnknownField for nvext keys Dynamo rejects, NotImplementedError for
    multimodal prompts.
    """
    sampling = request.sampling
    refuse_versions(request, "Dynamo")
    refuse_mode(request, mode)
    if sampling.score_start is not None:
        # Scores at a temperature are rejected on decoding: only the response identifies the engine.
        refuse_scoring(request, "Dynamo")
    refuse_grammar(request, "Dynamo's chat route")
    refuse_stop_strings(request)
    if request.features is not None:
        raise NotImplementedError(
            "the `dynamo` transport sends token ids only: multimodal prompts need the `vllm` "
            "transport"
        )
    if sampling.logit_bias:
        raise UnsupportedField(
            "logit_bias is accepted by Dynamo but never reaches the engine: leave it out, "
            "or use the `vllm` transport",
            param="logit_bias",
        )
    if sampling.ignore_eos and sampling.stop_token_ids:
        raise UnsupportedField(
            f"stop_token_ids is {list(sampling.stop_token_ids)} and ignore_eos is set: Dynamo's "
            "chat route then drops every stop token; leave one of them out, or use the "
            "`dynamo-generate` transport",
            param="ignore_eos",
        )
    if sampling.n != 1:
        raise UnsupportedField(
            f"n is {sampling.n}: Dynamo keeps the engine data of one choice only; send n requests",
            param="n",
        )
    body: dict[str, Any] = {} if request.model is None else {"model": request.model}
    body |= write_sampling(sampling, NAMES, LEFT_OUT_WHEN_OFF)
    body |= {
        "messages": [{"role": "user", "content": PLACEHOLDER}],
        "top_k": sampling.top_k or -1,
        "logprobs": True,
        "nvext": extension(request),
    }
    if stream:
        body["stream"] = True
    if sampling.logprobs:
        body["top_logprobs"] = sampling.logprobs
        # Without this, an alternative is named by its text only, which does not identify an id.
        body["return_tokens_as_token_ids"] = True
    return ENCODER.encode(body)


def extension(request: GenerateRequest) -> dict[str, Any]:
    """Return the caller's nvext merged with ours: salt and priority once, extra_fields united."""
    nvext: Mapping[str, Any] = request.nvext or {}
    if unknown := sorted(set(nvext) - NVEXT):
        raise UnknownField(
            f"nvext has keys that Dynamo rejects: {', '.join(unknown)}; it knows "
            f"{', '.join(sorted(NVEXT))}",
            param=f"nvext.{unknown[0]}",
        )
    if "token_data" in nvext:
        raise BadRequest(
            "nvext.token_data is filled with prompt_ids: leave it out of nvext",
            param="nvext.token_data",
        )
    merged = dict(nvext)
    merged["token_data"] = as_list(request.prompt_ids)
    merged["extra_fields"] = extra_fields(request, nvext)
    if request.experts_start is not None:
        rows = f"{EXPERTS_FROM}{request.experts_start}"
        merged["annotations"] = [*(nvext.get("annotations") or ()), rows]
    salt = _same("nvext.cache_salt", nvext.get("cache_salt"), request.cache_salt)
    if salt is not None:
        merged["cache_salt"] = salt
    hints = dict(nvext.get("agent_hints") or {})
    # Dynamo's engine side negates this number, so higher is sooner here.
    ours = -request.priority if request.priority else None
    priority = _same("nvext.agent_hints.priority", hints.get("priority"), ours)
    if priority is not None:
        if not -(2**31) <= priority < 2**31:
            raise BadRequest(f"priority {priority} does not fit Dynamo's 32 bits", param="priority")
        hints["priority"] = priority
    if hints:
        merged["agent_hints"] = hints
    return merged


def extra_fields(request: GenerateRequest, nvext: Mapping[str, Any]) -> list[str]:
    """Return the extra fields Dynamo should return: ours, then the caller's.

    Raises UnknownField for a name that Dynamo would ignore.
    """
    fields = ["engine_data", "completion_token_ids", "worker_id"]
    if request.sampling.prompt_logprobs is not None:
        fields.append("prompt_logprobs")
    extra = list(nvext.get("extra_fields") or ())
    if unknown := [name for name in extra if name not in EXTRA_FIELDS]:
        raise UnknownField(
            f"nvext.extra_fields has names that Dynamo ignores: {', '.join(unknown)}; it knows "
            f"{', '.join(EXTRA_FIELDS)}",
            param="nvext.extra_fields",
        )
    return list(dict.fromkeys(fields + extra))


def _same(field: str, theirs: Any, ours: Any) -> Any:
    """Return the value of a field that may come from two places. Raises BadRequest if they
    differ.
    """
    if theirs is not None and ours is not None and theirs != ours:
        raise BadRequest(
            f"{field} is {theirs!r}, but the request itself says {ours!r}: give it in one place",
            param=field,
        )
    return ours if theirs is None else theirs
