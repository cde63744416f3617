"""vLLM's token-in/token-out dialect, POST /inference/v1/generate: responses, whole and streamed.

Each logprob entry carries both spellings of its token, `"token": "token_id:N"` and `"token_id": N`.
`top_logprobs` starts with the sampled token, followed by the most likely others. A request for
`logprobs_format: "flat"` gets bare numbers instead.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from lockstep.protocol.common.prompt_logprobs import PromptField, encode_prompt_logprobs
from lockstep.protocol.common.response import GenerateUsage, usage_of
from lockstep.protocol.common.sampling_mask import SupportField, support_field
from lockstep.protocol.json.lazy_ids import as_list
from lockstep.protocol.vllm.generate_request import Form
from lockstep.tokens import Completion, Finish, Ranked, RoutedExperts, Shaping, VersionSpan

REQUEST_ID_PREFIX = "generate-tokens-"
T = TypeVar("T")


class GenerateTopLogprob(msgspec.Struct):
    token: str
    token_id: int
    logprob: float
    rank: int | None


class GenerateLogprob(msgspec.Struct):
    token: str
    token_id: int
    logprob: float
    rank: int | None
    top_logprobs: list[GenerateTopLogprob]


class GenerateLogprobs(msgspec.Struct):
    content: list[GenerateLogprob]


class FlatLogprobs(msgspec.Struct):
    """One number per token of `token_ids`, and its rank: the same record without its names."""

    values: list[float]
    ranks: list[int] | None


class ExpertsField(msgspec.Struct):
    data: str
    shape: tuple[int, int, int]
    dtype: str
    start: int


class GenerateChoice(msgspec.Struct, kw_only=True):
    index: int
    finish_reason: Finish | None
    stop_reason: int | str | None
    token_ids: list[int]
    routed_experts: ExpertsField | str | None = None
    sampling_mask: SupportField = None
    weight_versions: Sequence[VersionSpan] | None = None
    stop_tokens: int | UnsetType = UNSET
    logprobs: GenerateLogprobs | FlatLogprobs | None = None


class GenerateResponse(msgspec.Struct, kw_only=True):
    """The unary response. The last block is Lockstep's own: how the numbers were made, by whom.

    `shaping` comes where more than the temperature shaped the distribution.
    """

    request_id: str
    model: str
    created: int
    usage: GenerateUsage
    prompt_logprobs: PromptField | None
    prompt_token_id_logprobs: None = None
    prompt_token_ids: list[int] | None
    mm_placeholders: None = None
    metrics: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None
    output_mode: Literal["tokens"] = "tokens"
    choices: list[GenerateChoice]
    logprob_mode: str
    temperature: float
    shaping: Shaping | UnsetType
    worker: str | None
    adapter: str | None


class GenerateChunk(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One streamed event. Experts and supports come with the last, versions also where they
    change.
    """

    request_id: str
    usage: GenerateUsage | None
    output_mode: str
    choices: list[GenerateChoice]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptField | None = None
    logprob_mode: str | None = None
    temperature: float | None = None
    shaping: Shaping | None = None
    worker: str | None = None
    adapter: str | None = None


def logprobs_field(
    form: Form,
    token_ids: Sequence[int],
    logprobs: list[float],
    ranks: list[int] | None,
    tops: Sequence[tuple[Ranked, ...]] | None,
) -> GenerateLogprobs | FlatLogprobs | None:
    """The logprobs of some tokens in the form that the request chose; None for none."""
    if form.logprobs is None:
        return None
    if form.logprobs == "flat":
        return FlatLogprobs(logprobs, ranks)
    return entries(token_ids, logprobs, ranks, tops)


def entries(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    ranks: Sequence[int] | None,
    tops: Sequence[tuple[Ranked, ...]] | None,
) -> GenerateLogprobs:
    """One entry per token; the token itself is the first of its alternatives."""
    content = []
    for at, (token, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        rank = ranks[at] if ranks is not None else None
        name = f"token_id:{token}"
        top = [GenerateTopLogprob(name, token, logprob, rank)]
        if tops is not None:
            top += [
                GenerateTopLogprob(f"token_id:{t.token_id}", t.token_id, t.logprob, t.rank)
                for t in tops[at]
                if t.token_id != token
            ]
        content.append(GenerateLogprob(name, token, logprob, rank, top))
    return GenerateLogprobs(content)


def experts_field(experts: RoutedExperts | None, form: str) -> ExpertsField | str | None:
    """`raw`: {data, shape, dtype, start}; `npy`: vLLM's base64 string of an .npy file."""
    if experts is None:
        return None
    if form == "npy":
        file = io.BytesIO()
        np.save(file, experts.numpy(), allow_pickle=False)
        return base64.b64encode(file.getbuffer()).decode()
    data = base64.b64encode(experts.data).decode()
    return ExpertsField(data, experts.shape, experts.dtype, experts.start)


def choice_of(completion: Completion, form: Form) -> GenerateChoice:
    """A finished choice of a response."""
    return GenerateChoice(
        index=completion.index,
        finish_reason=completion.finish,
        stop_reason=stop_reason_of(completion),
        token_ids=completion.token_ids,
        routed_experts=experts_field(completion.experts, form.experts),
        sampling_mask=support_field(completion.support, form.support),
        weight_versions=completion.versions,
        stop_tokens=unset_if_none(completion.stop_tokens),
        logprobs=logprobs_field(
            form,
            completion.token_ids,
            completion.logprobs,
            completion.ranks,
            completion.top_logprobs,
        ),
    )


def unset_if_none(value: T | None) -> T | UnsetType:
    """A field that vLLM does not have: left out of responses that do not need it."""
    return UNSET if value is None else value


def stop_reason_of(completion: Completion) -> int | str | None:
    """vLLM's field: the stop token of the request, or the stop string, that ended a choice."""
    return completion.stop_token if completion.stop_reason is None else completion.stop_reason


def generate_response(
    completions: Sequence[Completion],
    *,
    request_id: str,
    model: str,
    created: int,
    form: Form,
) -> bytes:
    """The whole response for the choices of one request, in order of their index."""
    first = completions[0]
    body = GenerateResponse(
        request_id=request_id,
        model=model,
        created=created,
        usage=usage_of(
            len(first.prompt_ids), sum(len(completion.token_ids) for completion in completions)
        ),
        prompt_logprobs=encode_prompt_logprobs(first.prompt_logprobs),
        prompt_token_ids=as_list(first.prompt_ids) if form.prompt_ids else None,
        choices=[choice_of(completion, form) for completion in completions],
        logprob_mode=first.logprob_mode,
        temperature=first.temperature,
        shaping=unset_if_none(first.shaping),
        worker=first.worker,
        adapter=first.adapter,
    )
    return msgspec.json.encode(body)


class GenerateStreamEncoder:
    """Makes the chunks of one streamed response, and counts what its usage must say."""

    def __init__(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        form: Form,
        *,
        logprob_mode: str | None = None,
        worker: str | None = None,
    ) -> None:
        self._request_id = request_id
        self._logprob_mode, self._worker = logprob_mode, worker
        self._spans: dict[int, list[VersionSpan]] = {}
        self._prompt_ids = prompt_ids
        self._form = form
        self._started = False
        self._tokens = 0

    def chunk(
        self,
        index: int,
        token_ids: list[int],
        logprobs: list[float],
        ranks: list[int] | None,
        tops: Sequence[tuple[Ranked, ...]] | None,
        completion: Completion | None,
        version: str | None = None,
    ) -> GenerateChunk:
        """The new tokens of one choice, with its ending when `completion` is its completion.

        The spans so far are sent with the first token of each `version`, so that a stream that is
        cut has told under which weights its tokens were sampled.
        """
        self._tokens += len(token_ids)
        choice = GenerateChoice(
            index=index,
            finish_reason=None if completion is None else completion.finish,
            stop_reason=None if completion is None else stop_reason_of(completion),
            token_ids=token_ids,
            logprobs=logprobs_field(self._form, token_ids, logprobs, ranks, tops),
        )
        first, self._started = not self._started, True
        chunk = GenerateChunk(
            request_id=self._request_id,
            usage=None,
            output_mode="tokens",
            choices=[choice],
            prompt_token_ids=(
                as_list(self._prompt_ids) if first and self._form.prompt_ids else None
            ),
        )
        if first:
            chunk.logprob_mode, chunk.worker = self._logprob_mode, self._worker
        if version is not None and completion is None:
            choice.weight_versions = self._new_spans(index, version, len(token_ids))
        if completion is not None:
            choice.routed_experts = experts_field(completion.experts, self._form.experts)
            choice.sampling_mask = support_field(completion.support, self._form.support)
            choice.weight_versions = completion.versions
            choice.stop_tokens = unset_if_none(completion.stop_tokens)
            chunk.prompt_logprobs = encode_prompt_logprobs(completion.prompt_logprobs)
            chunk.logprob_mode = completion.logprob_mode
            chunk.temperature = completion.temperature
            chunk.shaping = completion.shaping
            chunk.worker = completion.worker
            chunk.adapter = completion.adapter
        return chunk

    def _new_spans(self, index: int, version: str, count: int) -> Sequence[VersionSpan] | None:
        spans = self._spans.setdefault(index, [])
        end = spans[-1].end if spans else 0
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, end + count)
            return None
        spans.append(VersionSpan(version, end, end + count))
        return tuple(spans)

    def usage(self) -> GenerateChunk:
        usage = usage_of(len(self._prompt_ids), self._tokens)
        return GenerateChunk(
            request_id=self._request_id, usage=usage, output_mode="tokens", choices=[]
        )
