"""SGLang's native dialect, POST /generate: requests, and responses whole and streamed.

Ids and logprobs both come from meta_info, where each entry is [logprob, id, text]. Streamed events
are cumulative: the last one is the whole response.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from lockstep.protocol.common.decode_error import NO_ERROR, error_of, raise_stated
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.common.response import (
    Provenance,
    Reading,
    StreamDelta,
    decode_response,
    finish_of,
    spans_of,
    stop_token_of,
)
from lockstep.protocol.common.routed_experts import EncodedExperts, decoded_size, trim
from lockstep.protocol.common.sampling_fields import write_sampling
from lockstep.protocol.common.sampling_mask import read_support
from lockstep.protocol.json.base64_extract import ExtractedBody, extract_base64
from lockstep.protocol.json.lazy_ids import as_list
from lockstep.protocol.vllm.encode_generate import refuse_mode, refuse_versions, refuse_whitespace
from lockstep.tokens import (
    Completion,
    LogprobMode,
    PromptLogprob,
    Ranked,
    RoutedExperts,
    VersionSpan,
)
from lockstep.tokens.completion import usable
from lockstep.tokens.errors import (
    BadExperts,
    BadLogprob,
    BadRequest,
    Misaligned,
    MissingFinish,
    MissingTokenIds,
    UnsupportedField,
)
from lockstep.tokens.grammar import Grammar, GrammarKind
from lockstep.tokens.support import Support

ENCODER = msgspec.json.Encoder()
Layout = tuple[int, int]
"""(layers, top_k): SGLang sends routed experts as bare int32 without their shape."""
ITEM = 4
MAX_SUPPORT = 4096
"""SGLang's limit of top_k for supports, unless it was started with --sampling-mask-max-tokens."""
NAMES: Mapping[str, str | None] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "seed": "sampling_seed",
    "max_tokens": None,  # `max_new_tokens`, which the transport always sets
    "min_tokens": "min_new_tokens",
    "stop": None,  # rejected: its tokens would be cut off
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "logit_bias": "logit_bias",
    "logprobs": None,  # `top_logprobs_num` of the body, for prompt and completion together
    "prompt_logprobs": None,
    "n": None,  # rejected: one choice at a time
    "allowed_token_ids": None,  # rejected: SGLang has none
    "grammar": None,  # one field per kind of grammar: `_grammar`
    "score_start": None,  # rejected: only the temperature applies to prompt logprobs
    "logprob_mode": None,  # rejected unless it is the server's
}
"""SGLang's name of each option; None if it is not among its sampling_params."""
GRAMMARS: Mapping[GrammarKind, str] = {
    "json": "json_schema",
    "regex": "regex",
    "structural_tag": "structural_tag",
}


def encode_sglang(
    request: GenerateRequest,
    *,
    mode: LogprobMode,
    max_new_tokens: int,
    adapter: str | None,
    stream: bool = False,
) -> bytes:
    """Return the body for one choice; `max_new_tokens` is explicit: SGLang's default is only 128.

    Raises UnsupportedField for what SGLang cannot do: versions, allowed_token_ids, other modes.
    """
    sampling = request.sampling
    refuse_versions(request, "SGLang")
    refuse_mode(request, mode)
    refuse_whitespace(request, "SGLang")
    refused = {
        "n": sampling.n != 1,
        "stop": bool(sampling.stop),
        "allowed_token_ids": sampling.allowed_token_ids is not None,
        "score_start": sampling.score_start is not None,
    }
    for field in (name for name, present in refused.items() if present):
        raise UnsupportedField(f"{field} is not supported by the SGLang transport", param=field)
    if request.features is not None:
        raise NotImplementedError("multimodal prompts need the `vllm` transport, not `sglang`")
    params = write_sampling(sampling, NAMES) | _grammar(sampling.grammar)
    params |= {
        "top_k": sampling.top_k or -1,
        "max_new_tokens": max_new_tokens,
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    body: dict[str, Any] = {
        "input_ids": as_list(request.prompt_ids),
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": -1 if sampling.prompt_logprobs is None else 0,
        "top_logprobs_num": max(sampling.logprobs, sampling.prompt_logprobs or 0),
        "stream": stream,
    }
    optional = {
        "rid": None if request.request_id is None else rid_of(request.request_id),
        "lora_path": adapter,
        "extra_key": request.cache_salt,  # SGLang's field that isolates prefix-cache entries
        "priority": -request.priority or None,  # higher is sooner there
        "return_routed_experts": None if request.experts_start is None else True,
        "routed_experts_start_len": request.experts_start or None,
        "return_sampling_mask": _returns_support(request) or None,
    }
    body |= {name: value for name, value in optional.items() if value is not None}
    return ENCODER.encode(body)


def rid_of(request_id: str) -> str:
    """Return the id that SGLang gets for a request: no such id is the beginning of another.

    SGLang aborts every request whose id starts with the given one, so that aborting "r1" would end
    "r10" as well.
    """
    return f"{len(request_id)}:{request_id}"


def _returns_support(request: GenerateRequest) -> bool:
    """Whether to request the supports: SGLang has them for a limited top_k only, and rejects others
    with 400.
    """
    return request.wants_support and 1 <= request.sampling.top_k <= MAX_SUPPORT


def _grammar(grammar: Grammar | None) -> dict[str, str]:
    """Return the option for a grammar. Raises UnsupportedField for a kind SGLang reads
    differently.
    """
    if grammar is None:
        return {}
    if grammar.kind == "json_object":
        return {"json_schema": '{"type": "object"}'}
    name = GRAMMARS.get(grammar.kind)
    if name is None:
        raise UnsupportedField(
            f"a grammar of kind {grammar.kind} is not supported by the SGLang transport: it knows "
            f"json_object, {', '.join(GRAMMARS)}",
            param="grammar",
        )
    return {name: grammar.text}


def check_layout(request: GenerateRequest, layout: Layout | None) -> None:
    """Raise BadRequest if experts are requested but their shape is unknown."""
    if request.experts_start is not None and layout is None:
        raise BadRequest(
            "routed experts from SGLang come without a shape: tell the transport "
            "experts_layout=(layers, top_k) of the model",
            param="experts_start",
        )


LogprobItem = tuple[float | None, int, Any]


class FinishReason(msgspec.Struct):
    type: str
    matched: int | str | None = None
    message: str | None = None
    status_code: int | None = None


class Meta(msgspec.Struct):
    id: str | None = None
    finish_reason: FinishReason | str | None = None
    completion_tokens: int | None = None
    weight_version: str | int | None = None
    weight_versions: list[VersionSpan] | None = None
    output_token_logprobs: list[LogprobItem | None] | None = None
    output_top_logprobs: list[list[LogprobItem] | None] | None = None
    input_token_logprobs: list[LogprobItem | None] | None = None
    input_top_logprobs: list[list[LogprobItem] | None] | None = None
    routed_experts: str | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    output_token_sampling_logprobs: list[float] | None = None


class SglangResponse(msgspec.Struct):
    meta_info: Meta | None = None
    output_ids: list[int] | None = None
    error: msgspec.Raw = NO_ERROR


DECODER = msgspec.json.Decoder(SglangResponse)


def decode_sglang(
    body: bytes | bytearray | ExtractedBody,
    reading: Reading,
    layout: Layout | None = None,
    last_id: int | None = None,
) -> Completion:
    """Return the completion of a whole response for one choice, or of the last event of a
    stream.

    `last_id` is the largest id of the vocabulary, which SGLang calls 0 in prompt logprobs.
    """
    extracted = extract_base64(body)
    response = decode_response(DECODER, extracted.json)
    raise_stated(response.error)
    request, meta = reading.request, response.meta_info or Meta()
    reason = meta.finish_reason
    kind = reason.type if isinstance(reason, FinishReason) else reason
    if isinstance(reason, FinishReason) and reason.status_code is not None:
        raise error_of(reason.status_code, ENCODER.encode({"message": reason.message}))
    finish = finish_of(kind)
    ids, logprobs = sampled(response, request, stopped=finish == "stop")
    mode, support = reading.logprob_mode, _support(meta)
    tops = _tops(meta.output_top_logprobs, request.sampling.logprobs)
    if support is not None and meta.output_token_sampling_logprobs is not None:
        # Only these are normalised over the support: the others are of the whole vocabulary.
        whole, logprobs, mode = logprobs, meta.output_token_sampling_logprobs, "processed"
        tops = _over_sets(tops, support, whole, logprobs)
    version = reading.version if meta.weight_version is None else str(meta.weight_version)
    named = reason.matched if isinstance(reason, FinishReason) else None
    return Completion(
        token_ids=ids,
        logprobs=logprobs,
        prompt_ids=request.prompt_ids,
        finish=finish,
        versions=spans_of(meta.weight_versions, version, len(ids)),
        logprob_mode=mode,
        temperature=request.sampling.temperature,
        shaping=request.sampling.shaping(),
        index=reading.index,
        request_id=request.request_id or meta.id or "",
        stop_token=stop_token_of(named, finish, ids, request),
        top_logprobs=tops,
        prompt_logprobs=_prompt(meta, request, last_id),
        worker=reading.worker,
        adapter=reading.adapter,
        experts=_experts(meta.routed_experts, extracted, layout, request, len(ids)),
        support=support,
        allow_nonfinite=request.allow_nonfinite,
    )


class SglangStreamDecoder:
    """Decoder of a stream of cumulative events; the last one is the whole response."""

    def __init__(
        self, reading: Reading, layout: Layout | None = None, last_id: int | None = None
    ) -> None:
        self._reading, self._layout, self._last_id = reading, layout, last_id
        self._seen = 0
        self._last: bytes | bytearray = b""

    def feed(self, event: bytes | bytearray) -> list[StreamDelta]:
        response = decode_response(DECODER, extract_base64(event).json)
        raise_stated(response.error)
        ids, logprobs = sampled(response, self._reading.request, stopped=True)
        if len(ids) < self._seen:
            raise Misaligned(
                f"a streamed event has {len(ids)} tokens after one with {self._seen}: expected "
                "cumulative events (the server must not stream incremental output)"
            )
        made = Provenance.of(self._reading)
        new = slice(self._seen, None)
        delta = StreamDelta(self._reading.index, ids[new], logprobs[new], made)
        self._seen, self._last = len(ids), event
        return [delta]

    def finish(self) -> list[Completion]:
        if not self._last:
            raise MissingFinish("the stream ended without a single event")
        return [decode_sglang(self._last, self._reading, self._layout, self._last_id)]


def sampled(
    response: SglangResponse, request: GenerateRequest, *, stopped: bool
) -> tuple[list[int], list[float]]:
    """Return ids and logprobs from meta_info, checked against the response's top-level ids."""
    meta = response.meta_info or Meta()
    entries, echo = meta.output_token_logprobs, response.output_ids
    if entries is None:
        if echo == [] or (echo is None and meta.completion_tokens == 0):
            return [], []
        if echo is None:
            raise MissingTokenIds("meta_info has no output_token_logprobs, and there are no ids")
        raise BadLogprob(f"the response has {len(echo)} token ids but no logprobs")
    for at, entry in enumerate(entries):
        if entry is None or (entry[0] is None and not request.allow_nonfinite):
            raise BadLogprob(f"logprob at position {at} is null")
    pairs = [entry for entry in entries if entry is not None]
    ids = [entry[1] for entry in pairs]
    if meta.completion_tokens is not None and meta.completion_tokens != len(ids):
        raise Misaligned(f"{meta.completion_tokens} completion tokens but {len(ids)} logprobs")
    # A server that trims the matched stop token does so in output_ids only.
    if echo is not None and echo != ids and not (stopped and echo == ids[:-1]):
        raise Misaligned(f"output_ids has {len(echo)} ids that are not the {len(ids)} of meta_info")
    return ids, [math.nan if entry[0] is None else entry[0] for entry in pairs]


def _support(meta: Meta) -> Support | None:
    """Return the sets that tokens were drawn from. SGLang does not sort them."""
    mask = meta.output_token_sampling_mask
    return None if mask is None else read_support([sorted(row) for row in mask])


def _tops(
    listed: list[list[LogprobItem] | None] | None, top: int
) -> list[tuple[Ranked, ...]] | None:
    if not top or listed is None:
        return None
    return [_ranked(items or [], top) for items in listed]


def _over_sets(
    tops: list[tuple[Ranked, ...]] | None,
    support: Support,
    whole: list[float],
    over_set: list[float],
) -> list[tuple[Ranked, ...]] | None:
    """Return the alternatives that could have been drawn, normalised over their set.

    The sampled token's two logprobs, over the whole vocabulary and over the set, differ by the log
    of the set's probability, as those of every other token of the set do.
    """
    if tops is None or not len(tops) == len(whole) == len(over_set):
        return tops
    return [
        tuple(
            Ranked(entry.token_id, entry.logprob + own - other, entry.rank)
            for entry in top
            if entry.token_id in ids
        )
        for top, ids, other, own in zip(tops, support.lists(), whole, over_set, strict=True)
    ]


def _ranked(items: list[LogprobItem], top: int) -> tuple[Ranked, ...]:
    ranked = [Ranked(token, value) for value, token, _ in items if value is not None]
    ranked.sort(key=lambda entry: -entry.logprob)
    return tuple(
        Ranked(entry.token_id, entry.logprob, at) for at, entry in enumerate(ranked[:top], 1)
    )


def _prompt(
    meta: Meta, request: GenerateRequest, last_id: int | None
) -> list[PromptLogprob | None] | None:
    top = request.sampling.prompt_logprobs
    if top is None:
        return None
    entries = meta.input_token_logprobs
    if entries is None or len(entries) != len(request.prompt_ids):
        count = 0 if entries is None else len(entries)
        raise Misaligned(f"{len(request.prompt_ids)} prompt ids but {count} prompt logprobs")
    result: list[PromptLogprob | None] = [None]
    for at in range(1, len(entries)):
        value, token = (entries[at] or (None, None))[:2]
        is_clipped = token == 0 and request.prompt_ids[at] == last_id
        if token is not None and token != request.prompt_ids[at] and not is_clipped:
            raise Misaligned(
                f"the prompt logprob at position {at} names token {token}, but the id there is "
                f"{request.prompt_ids[at]}"
            )
        if value is None or not (request.allow_nonfinite or usable(value)):
            raise BadLogprob(f"prompt logprob at position {at} is {value}, expected a number")
        listed = meta.input_top_logprobs
        others = _ranked((listed[at] if listed and at < len(listed) else None) or [], top)
        result.append(PromptLogprob(request.prompt_ids[at], value, None, others if top else ()))
    return result


def _experts(
    field: str | None,
    extracted: ExtractedBody,
    layout: Layout | None,
    request: GenerateRequest,
    tokens: int,
) -> RoutedExperts | None:
    if request.experts_start is None or layout is None:
        return None
    if field is None:
        raise BadExperts(
            "routed experts were requested, but the response has none: start the server with "
            "--enable-return-routed-experts"
        )
    text = extracted.text(field)
    rows, rest = divmod(decoded_size(text), layout[0] * layout[1] * ITEM)
    if rest:
        raise BadExperts(f"routed experts do not divide into rows of (layers, top_k) {layout}")
    total = len(request.prompt_ids) + tokens
    start = request.experts_start if rows == max(total - 1 - request.experts_start, 0) else 0
    experts = EncodedExperts(text, (rows, *layout), "int32", start)
    return trim(experts, total=total, first_row=request.experts_start)
