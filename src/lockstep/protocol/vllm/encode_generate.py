"""Encoder of vLLM's token-in/token-out requests: for vLLM, Lockstep, and Dynamo's route."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.common.sampling_fields import LEFT_OUT_WHEN_OFF, OPTIONS, write_sampling
from lockstep.protocol.common.structured_outputs import COMPILER_OPTIONS, StructuredOutputs
from lockstep.protocol.json.lazy_ids import as_json
from lockstep.protocol.vllm.generate_request import RelayedBody, SamplingParams
from lockstep.tokens import LogprobMode
from lockstep.tokens.errors import BadRequest, UnsupportedField

ENCODER = msgspec.json.Encoder()
VLLM_MAX_LOGPROBS = 20
"""vLLM's limit unless it was started with --max-logprobs."""
NAMES: Mapping[str, str | None] = {
    **{option: option for option in OPTIONS},
    "logprob_mode": None,  # vLLM ignores it: `refuse_mode`, or set below for a Lockstep server
    "grammar": None,  # `structured_outputs`, set below
    "score_start": None,  # `refuse_scoring`, or set below for a Lockstep server
}


def encode_vllm(request: GenerateRequest, *, mode: LogprobMode, stream: bool = False) -> bytes:
    """Return the body for a plain vLLM server with logprob mode `mode`.

    vLLM ignores unknown fields, so options that only Lockstep supports are rejected here:
    UnsupportedField for a required weight version or another logprob mode.
    """
    refuse_versions(request, "a plain vLLM server")
    refuse_mode(request, mode)
    refuse_scoring(request, "vLLM")
    refuse_whitespace(request, "vLLM")
    params = sampling_params(request)
    if request.sampling.logprobs:
        # vLLM counts the sampled token among the k it lists, so request one more.
        wanted = request.sampling.logprobs
        params.logprobs = min(wanted + 1, max(wanted, VLLM_MAX_LOGPROBS))
    body = _body(request, params, stream=stream, features=request.features)
    if request.sampling.grammar is not None and request.sampling.grammar.has_thought:
        # With a reasoning parser, vLLM would otherwise start the grammar after the thinking.
        body.reasoning_ended = True
    return ENCODER.encode(body)


def encode_lockstep(request: GenerateRequest, *, stream: bool = False) -> bytes:
    """Return the body for a Lockstep server, which supports versions, logprob modes, row starts."""
    params = sampling_params(request)
    params.logprob_mode = request.sampling.logprob_mode
    params.score_start = request.sampling.score_start
    body = _body(request, params, stream=stream, features=request.features)
    body.weight_version = request.weight_version
    body.min_weight_version = request.min_weight_version
    if request.experts_start is not None:
        body.return_routed_experts = True
    if request.wants_support:
        body.return_sampling_mask, body.sampling_mask_format = True, "packed"
    elif request.sampling.truncates:
        body.return_sampling_mask = False
    if not request.sampling.logprobs:
        body.logprobs_format = "flat"  # bare numbers: a tenth of the bytes
    return ENCODER.encode(body)


def encode_dynamo_generate(request: GenerateRequest, *, mode: LogprobMode) -> bytes:
    """Return the body for Dynamo's own /inference/v1/generate: one choice, no stream.

    Dynamo sends no EOS ids to the worker on this route, so a request that relies on them would run
    to its length limit: BadRequest without stop_token_ids and without ignore_eos.
    """
    refuse_versions(request, "Dynamo")
    refuse_mode(request, mode)
    refuse_scoring(request, "Dynamo")
    refuse_grammar(request, "this route of Dynamo")
    refuse_stop_strings(request)
    if request.features is not None:
        raise NotImplementedError("multimodal prompts need the `vllm` transport, not Dynamo's")
    if not request.sampling.stop_token_ids and not request.sampling.ignore_eos:
        raise BadRequest(
            "stop_token_ids is empty: this route of Dynamo knows no EOS ids, so the generation "
            "would never stop by itself; give them, or set ignore_eos",
            param="stop_token_ids",
        )
    params = sampling_params(request)
    params.routed_experts_prompt_start = None  # trimmed by us: the route does not know the field
    return ENCODER.encode(_body(request, params, stream=False, features=None))


def _body(
    request: GenerateRequest, params: SamplingParams, *, stream: bool, features: object
) -> RelayedBody:
    return RelayedBody(
        token_ids=as_json(request.prompt_ids),
        sampling_params=params,
        request_id=request.request_id,
        model=request.model,
        stream=stream,
        cache_salt=request.cache_salt,
        priority=request.priority,
        features=features,
    )


def sampling_params(request: GenerateRequest) -> SamplingParams:
    """Return the options of a request under vLLM's names."""
    params = SamplingParams(**write_sampling(request.sampling, NAMES, LEFT_OUT_WHEN_OFF))
    params.routed_experts_prompt_start = request.first_experts_row
    if (grammar := request.sampling.grammar) is not None:
        params.structured_outputs = StructuredOutputs.of(grammar)
    return params


def refuse_versions(request: GenerateRequest, server: str) -> None:
    """Raise UnsupportedField for a required version, which this server would silently ignore."""
    for field in ("weight_version", "min_weight_version"):
        if getattr(request, field) is not None:
            raise UnsupportedField(
                f"{field} is {getattr(request, field)!r}, but {server} cannot be held to a "
                "version: leave it out, or use a Lockstep server",
                param=field,
            )


def refuse_mode(request: GenerateRequest, mode: LogprobMode) -> None:
    """Raise UnsupportedField if the request needs another logprob mode than the server has."""
    requested = request.sampling.logprob_mode
    if requested is not None and requested != mode:
        raise UnsupportedField(
            f"logprob_mode is {requested!r}, but this server computes {mode!r} logprobs and cannot "
            "change that per request: restart it with the other mode, or tell the transport "
            "which one it has",
            param="logprob_mode",
        )


def refuse_scoring(request: GenerateRequest, server: str) -> None:
    """Raise UnsupportedField for processed scores of a prompt: this server has only raw ones."""
    sampling = request.sampling
    heated = sampling.temperature not in (0.0, 1.0) and sampling.logprob_mode == "processed"
    if sampling.score_start is not None or (sampling.prompt_logprobs is not None and heated):
        field = "prompt_logprobs" if sampling.score_start is None else "score_start"
        raise UnsupportedField(
            f"{field} is {getattr(sampling, field)} with temperature {sampling.temperature:g}: the "
            f"prompt logprobs of {server} are raw whatever its mode; score at temperature 1 "
            "without other options, or use a Lockstep server",
            param=field,
        )


def refuse_whitespace(request: GenerateRequest, server: str) -> None:
    """Raise UnsupportedField for a grammar with its own whitespace, which this server ignores."""
    grammar = request.sampling.grammar
    if grammar is not None and f'"{COMPILER_OPTIONS}"' in grammar.text:
        raise UnsupportedField(
            f"the whitespace of JSON ({COMPILER_OPTIONS}) cannot be set per request on {server}: "
            "leave out disable_any_whitespace and whitespace_pattern, or use a Lockstep worker",
            param="structured_outputs",
        )


def refuse_grammar(request: GenerateRequest, server: str) -> None:
    """Raise UnsupportedField for a grammar that this server would not enforce."""
    if (grammar := request.sampling.grammar) is not None:
        raise UnsupportedField(
            f"a grammar ({grammar.kind}) was requested, which {server} does not pass to its engine "
            "token by token: use the `vllm` transport or a Lockstep worker, or ask for text",
            param="grammar",
        )


def refuse_stop_strings(request: GenerateRequest) -> None:
    """Raise UnsupportedField: Dynamo enforces stop strings itself and then drops engine data."""
    if stop := list(request.sampling.stop):
        raise UnsupportedField(
            f"stop is {stop!r}: Dynamo's frontend would cut the completion there and "
            "lose its token data; stop by token ids instead (stop_token_ids)",
            param="stop",
        )
