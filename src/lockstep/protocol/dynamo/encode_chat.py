"""Asks in Dynamo's chat dialect: ids in `nvext.token_data`, beside one placeholder message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from lockstep.protocol.common.lazy_ids import as_list
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.vllm.encode_generate import refuse_mode, refuse_stop_strings, refuse_versions
from lockstep.tokens import LogprobMode
from lockstep.tokens.errors import BadRequest, UnknownField, UnsupportedField

PLACEHOLDER = "(token-in mode)"
"""Dynamo demands a message and ignores its text when token_data is there."""
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
EXTRA_FIELDS = (
    "engine_data",
    "completion_token_ids",
    "prompt_token_ids",
    "prompt_logprobs",
    "routed_experts",
    "worker_id",
    "timing",
)
"""Names that Dynamo 1.6 answers; any other is silently ignored there, so it is refused here."""
EXPERTS_FROM = "lockstep.experts:"
"""An annotation: a Lockstep engine returns routed experts from the row that it names. The extra
field `routed_experts` would send them twice. Dynamo's own engines return them when started so."""


class DynamoChatRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    model: str | None = None
    messages: list[dict[str, str]]
    stream: bool = False
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: bool
    top_logprobs: int = 0
    return_tokens_as_token_ids: bool = False
    prompt_logprobs: int | None = None
    allowed_token_ids: list[int] | None = None
    nvext: dict[str, Any]


ENCODER = msgspec.json.Encoder()


def encode_dynamo(ask: GenerateRequest, *, mode: LogprobMode, stream: bool = False) -> bytes:
    """The body for one choice. Nothing is dropped: what Dynamo would not forward is refused.

    Raises UnsupportedField for stop strings, logit_bias, ignore_eos with stop ids, versions and
    other logprob modes, UnknownField for nvext keys Dynamo rejects, NotImplementedError for
    multimodal prompts.
    """
    sampling = ask.sampling
    refuse_versions(ask, "Dynamo")
    refuse_mode(ask, mode)
    refuse_stop_strings(ask)
    if ask.features is not None:
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
            f"n is {sampling.n}: Dynamo keeps the engine data of one choice only; ask n times",
            param="n",
        )
    request = DynamoChatRequest(
        model=ask.model,
        messages=[{"role": "user", "content": PLACEHOLDER}],
        stream=stream,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or -1,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_completion_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=list(sampling.stop_token_ids) or None,
        ignore_eos=sampling.ignore_eos,
        logprobs=True,
        top_logprobs=sampling.logprobs,
        # Without this an alternative is only named by its text, which names no id.
        return_tokens_as_token_ids=sampling.logprobs > 0,
        prompt_logprobs=sampling.prompt_logprobs,
        allowed_token_ids=(
            None if sampling.allowed_token_ids is None else list(sampling.allowed_token_ids)
        ),
        nvext=extension(ask),
    )
    return ENCODER.encode(request)


def extension(ask: GenerateRequest) -> dict[str, Any]:
    """The caller's nvext with ours merged in: salt and priority each once, extra_fields united."""
    given: Mapping[str, Any] = ask.nvext or {}
    if unknown := sorted(set(given) - NVEXT):
        raise UnknownField(
            f"nvext has keys that Dynamo rejects: {', '.join(unknown)}; it knows "
            f"{', '.join(sorted(NVEXT))}",
            param=f"nvext.{unknown[0]}",
        )
    if "token_data" in given:
        raise BadRequest(
            "nvext.token_data is filled with prompt_ids: do not give it yourself",
            param="nvext.token_data",
        )
    merged = dict(given)
    merged["token_data"] = as_list(ask.prompt_ids)
    merged["extra_fields"] = extra_fields(ask, given)
    if ask.experts_start is not None:
        rows = f"{EXPERTS_FROM}{ask.experts_start}"
        merged["annotations"] = [*(given.get("annotations") or ()), rows]
    salt = _same("nvext.cache_salt", given.get("cache_salt"), ask.cache_salt)
    if salt is not None:
        merged["cache_salt"] = salt
    hints = dict(given.get("agent_hints") or {})
    # Dynamo's engine side negates this number, so higher is sooner here.
    ours = -ask.priority if ask.priority else None
    priority = _same("nvext.agent_hints.priority", hints.get("priority"), ours)
    if priority is not None:
        if not -(2**31) <= priority < 2**31:
            raise BadRequest(f"priority {priority} does not fit Dynamo's 32 bits", param="priority")
        hints["priority"] = priority
    if hints:
        merged["agent_hints"] = hints
    return merged


def extra_fields(ask: GenerateRequest, given: Mapping[str, Any]) -> list[str]:
    wanted = ["engine_data", "completion_token_ids", "worker_id"]
    if ask.sampling.prompt_logprobs is not None:
        wanted.append("prompt_logprobs")
    extra = list(given.get("extra_fields") or ())
    if unknown := [name for name in extra if name not in EXTRA_FIELDS]:
        raise UnknownField(
            f"nvext.extra_fields has names that Dynamo ignores: {', '.join(unknown)}; it answers "
            f"{', '.join(EXTRA_FIELDS)}",
            param="nvext.extra_fields",
        )
    return list(dict.fromkeys(wanted + extra))


def _same(field: str, given: Any, ours: Any) -> Any:
    """The one value of a field that may come from two places. Raises BadRequest if they differ."""
    if given is not None and ours is not None and given != ours:
        raise BadRequest(
            f"{field} is {given!r}, but the ask itself says {ours!r}: give it in one place",
            param=field,
        )
    return ours if given is None else given
