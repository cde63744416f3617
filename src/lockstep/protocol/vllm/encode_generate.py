"""Asks in vLLM's token-in/token-out dialect: for vLLM, Lockstep servers and Dynamo's route."""

from __future__ import annotations

import msgspec

from lockstep.protocol.common.lazy_ids import as_json
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.vllm.generate_request import RelayedBody, SamplingParams
from lockstep.tokens import LogprobMode, Sampling
from lockstep.tokens.errors import BadRequest, UnsupportedField
from lockstep.tokens.sampling import MAX_LOGPROBS

ENCODER = msgspec.json.Encoder()


def encode_vllm(ask: GenerateRequest, *, mode: LogprobMode, stream: bool = False) -> bytes:
    """The body for a plain vLLM server, whose logprob mode is `mode`.

    vLLM ignores fields it does not know, so what only Lockstep can honour is refused here:
    UnsupportedField for a demanded weight version or another logprob mode.
    """
    refuse_versions(ask, "a plain vLLM server")
    refuse_mode(ask, mode)
    params = _params(ask)
    if ask.sampling.logprobs:
        # vLLM counts the sampled token among the k it lists: one more, and none is missing.
        params.logprobs = min(ask.sampling.logprobs + 1, MAX_LOGPROBS)
    return ENCODER.encode(_request(ask, params, stream=stream, features=ask.features))


def encode_lockstep(ask: GenerateRequest, *, stream: bool = False) -> bytes:
    """The body for a Lockstep server, which honours versions, logprob modes and row starts."""
    params = _params(ask)
    params.logprob_mode = ask.sampling.logprob_mode
    request = _request(ask, params, stream=stream, features=ask.features)
    request.weight_version = ask.weight_version
    request.min_weight_version = ask.min_weight_version
    if ask.experts_start is not None:
        request.return_routed_experts = True
    if not ask.sampling.logprobs:
        request.logprobs_format = "flat"  # bare numbers: a tenth of the bytes, the same record
    return ENCODER.encode(request)


def encode_dynamo_generate(ask: GenerateRequest, *, mode: LogprobMode) -> bytes:
    """The body for Dynamo's own /inference/v1/generate: one choice, no stream.

    Dynamo sends no EOS ids to the worker on this route, so an ask that relies on them would run
    to its length: BadRequest unless stop_token_ids are given or ignore_eos is meant.
    """
    refuse_versions(ask, "Dynamo")
    refuse_mode(ask, mode)
    refuse_stop_strings(ask)
    if ask.features is not None:
        raise NotImplementedError("multimodal prompts need the `vllm` transport, not Dynamo's")
    if not ask.sampling.stop_token_ids and not ask.sampling.ignore_eos:
        raise BadRequest(
            "stop_token_ids is empty: this route of Dynamo knows no EOS ids, so the generation "
            "would never stop by itself; give them, or set ignore_eos",
            param="stop_token_ids",
        )
    params = _params(ask)
    params.routed_experts_prompt_start = None  # trimmed here: the route does not know the field
    return ENCODER.encode(_request(ask, params, stream=False, features=None))


def _request(
    ask: GenerateRequest, params: SamplingParams, *, stream: bool, features: object
) -> RelayedBody:
    return RelayedBody(
        token_ids=as_json(ask.prompt_ids),
        sampling_params=params,
        request_id=ask.request_id,
        model=ask.model,
        stream=stream,
        cache_salt=ask.cache_salt,
        priority=ask.priority,
        features=features,
    )


def _params(ask: GenerateRequest) -> SamplingParams:
    """Every option that shapes the distribution is spelt out: no server default may slip in."""
    sampling = ask.sampling
    return SamplingParams(
        n=sampling.n,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens or None,
        stop_token_ids=list(sampling.stop_token_ids) or None,
        ignore_eos=sampling.ignore_eos or None,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        allowed_token_ids=(
            None if sampling.allowed_token_ids is None else list(sampling.allowed_token_ids)
        ),
        logit_bias=biases(sampling),
        routed_experts_prompt_start=ask.experts_start,
        stop=list(ask.stop) or None,
    )


def biases(sampling: Sampling) -> dict[str, float] | None:
    if sampling.logit_bias is None:
        return None
    return {str(token): bias for token, bias in sampling.logit_bias.items()}


def refuse_versions(ask: GenerateRequest, server: str) -> None:
    """Raises UnsupportedField for a version demand, which this server would silently ignore."""
    for field in ("weight_version", "min_weight_version"):
        if getattr(ask, field) is not None:
            raise UnsupportedField(
                f"{field} is {getattr(ask, field)!r}, but {server} cannot be held to a version: "
                "leave it out, or ask a Lockstep server",
                param=field,
            )


def refuse_mode(ask: GenerateRequest, mode: LogprobMode) -> None:
    """Raises UnsupportedField when the ask wants another logprob mode than the server has."""
    wanted = ask.sampling.logprob_mode
    if wanted is not None and wanted != mode:
        raise UnsupportedField(
            f"logprob_mode is {wanted!r}, but this server computes {mode!r} logprobs and cannot "
            "change that per request: restart it with the other mode, or tell the transport "
            "which one it has",
            param="logprob_mode",
        )


def refuse_stop_strings(ask: GenerateRequest) -> None:
    """Raises UnsupportedField: Dynamo enforces stop strings itself and then drops engine data."""
    if ask.stop:
        raise UnsupportedField(
            f"stop is {list(ask.stop)!r}: Dynamo's frontend would cut the answer there and lose "
            "its token data; stop by token ids instead (stop_token_ids)",
            param="stop",
        )
