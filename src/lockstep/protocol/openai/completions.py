"""OpenAI's legacy dialect, POST /v1/completions, with vLLM's extras: requests and responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from lockstep.protocol.common import sampling_fields
from lockstep.protocol.common.prompt_logprobs import PromptField
from lockstep.protocol.common.response import GenerateUsage
from lockstep.protocol.common.sampling_fields import SamplingFields, read_sampling
from lockstep.protocol.common.sampling_mask import SupportField
from lockstep.protocol.json.strict import decode, refuse_unless_neutral
from lockstep.protocol.vllm.generate_request import StreamOptions
from lockstep.protocol.vllm.generate_response import ExpertsField
from lockstep.tokens import Sampling, VersionSpan
from lockstep.tokens.errors import BadRequest, BadTokenId, UnsupportedField
from lockstep.tokens.ids import check_ids
from lockstep.tokens.sampling import MAX_LOGPROBS

ID_PREFIX = "cmpl-"
DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024
PLACES = 2**31
"""Upper bound of token ids here; the engine checks them against its vocabulary."""

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **sampling_fields.NEUTRAL,
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "prompt_embeds": (),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "vllm_xargs": ({},),
}


class CompletionRequest(SamplingFields, kw_only=True):
    """The request body: fields of OpenAI, vLLM and Lockstep; last, those rejected unless neutral.

    `prompt` is a text, its token ids, or a list of either. `max_tokens` 0 scores the prompt and
    needs `echo`; null leaves the length to the model.
    """

    prompt: str | list[str | int | list[int]]
    model: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    n: int | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None

    return_routed_experts: bool | None = None
    routed_experts_format: Literal["raw", "npy"] = "raw"
    return_sampling_mask: bool | None = None
    weight_version: str | None = None
    min_weight_version: str | None = None

    suffix: str | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    prompt_embeds: Any = None
    response_format: dict[str, Any] | None = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    vllm_xargs: dict[str, Any] | None = None

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def scores(self) -> bool:
        """Whether only the prompt is scored: no sampled token is returned."""
        return self.max_tokens == 0

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def prompt_tops(self) -> int | None:
        """Alternatives to request beside prompt tokens; None when no logprobs are needed."""
        counts = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in counts if count is not None), default=None)

    @property
    def experts_start(self) -> int | None:
        """The first row of routed experts to return, or None when they were not requested."""
        return (self.routed_experts_prompt_start or 0) if self.return_routed_experts else None

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each a text or ids. Raises BadRequest or BadTokenId that names the
        first invalid one.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        kinds = {type(item) for item in prompt}
        if kinds == {int}:
            ids: list[int] = prompt  # type: ignore[assignment]
            check_ids(ids, PLACES, "prompt")
            return [ids]
        if len(kinds) > 1:
            kind = type(prompt[0])
            at = next(at for at, item in enumerate(prompt) if type(item) is not kind)
            raise BadRequest(
                f"prompt[{at}] is a {type(prompt[at]).__name__}, but prompt[0] a {kind.__name__}: "
                "prompts of one request are all texts, or all lists of ids",
                param=f"prompt[{at}]",
            )
        if not 1 <= len(prompt) <= MAX_PROMPTS:
            raise BadTokenId(
                f"prompt has {len(prompt)} entries: expected 1 to {MAX_PROMPTS}", param="prompt"
            )
        for at, item in enumerate(prompt):
            if isinstance(item, list):
                check_ids(item, PLACES, f"prompt[{at}]")
        return list(prompt)  # type: ignore[arg-type]

    def sampling(self) -> Sampling:
        """Return the sampling options. Raises BadRequest that names the field."""
        return read_sampling(
            self,
            n=self.choices,
            logprobs=self.logprobs or 0,
            prompt_logprobs=self.prompt_tops,
            # Engines sample at least one token; that of a scoring request is not returned.
            max_tokens=1 if self.scores else self.max_tokens,
        )


class LegacyLogprobs(msgspec.Struct):
    """Logprobs with one entry per token. The first token of a prompt has none: nothing precedes
    it.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One choice, or the part of it that a chunk adds. The last block is Lockstep's own.

    `weight_versions` cover the sampled tokens; `scored_version` is that of a prompt only scored.
    """

    index: int
    text: str
    logprobs: LegacyLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: PromptField | None = None
    prompt_token_ids: list[int] | None = None

    routed_experts: ExpertsField | str | None = None
    sampling_mask: SupportField = None
    weight_versions: Sequence[VersionSpan] | None = None
    scored_version: str | None = None
    logprob_mode: str | None = None
    temperature: float | None = None
    worker: str | None = None
    adapter: str | None = None


class CompletionResponse(msgspec.Struct, kw_only=True):
    """The response, or one chunk of it. Choices of prompt p start at index p * n."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: GenerateUsage | None = None
    service_tier: None = None
    system_fingerprint: None = None


DECODER = msgspec.json.Decoder(CompletionRequest)


def decode_completion(body: bytes) -> CompletionRequest:
    """Return the request in `body`. Raises BadRequest, UnknownField or UnsupportedField."""
    request = decode(DECODER, body)
    refuse_unless_neutral(request, NEUTRAL)
    if request.best_of not in (None, request.choices):
        raise UnsupportedField(
            f"best_of is {request.best_of}, but n is {request.choices}: choices are not ranked "
            "here; get all of them with n",
            param="best_of",
        )
    for field in ("logprobs", "prompt_logprobs"):
        value = getattr(request, field)
        if value is not None and not 0 <= value <= MAX_LOGPROBS:
            raise BadRequest(f"{field} is {value}: expected 0 to {MAX_LOGPROBS}", param=field)
    _check_scoring(request)
    return request


def _check_scoring(request: CompletionRequest) -> None:
    if not request.scores:
        return
    if not request.echo:
        raise BadRequest(
            "max_tokens is 0: that requests nothing, unless echo is true to score the prompt",
            param="max_tokens",
        )
    neutral = {"n": 1, "min_tokens": 0, "return_routed_experts": False,
               "routed_experts_prompt_start": None}  # fmt: skip
    for field, allowed in neutral.items():
        if getattr(request, field) not in (None, allowed):
            raise BadRequest(
                f"{field} is {getattr(request, field)}, but max_tokens 0 only scores the prompt: "
                f"leave {field} out",
                param=field,
            )
