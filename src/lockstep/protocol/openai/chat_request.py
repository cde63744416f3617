"""OpenAI's chat dialect, POST /v1/chat/completions: requests, with the extras of vLLM and others.

The struct has all fields of OpenAI, vLLM, Dynamo and NeMo; chat_decode rejects some of them.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from lockstep.protocol.common.sampling_fields import SamplingFields, read_sampling
from lockstep.protocol.dynamo.nvext import NvExt
from lockstep.tokens import Sampling

RECORDED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention",
)  # fmt: skip
"""Fields that are stored with the turn of a session and have no effect."""
WITHOUT_EFFECT = ("skip_special_tokens", "spaces_between_special_tokens")
"""Fields about text that chat responses never contain."""


class ChatStreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Options of a stream. `include_obfuscation` is OpenAI's padding against eavesdroppers."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str


class AllowedTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Field `allowed_tools` of a `tool_choice` of that type: the tools that may be called."""

    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class ChatRequest(SamplingFields, kw_only=True):
    """The request body: fields of OpenAI, vLLM, NeMo and Lockstep; last, those rejected unless
    neutral.

    The fields in `RECORDED` have no effect on the response: a session stores them with the turn.
    """

    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    model: str | None = None
    stream: bool | None = None
    stream_options: ChatStreamOptions | None = None
    n: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None
    session_id: str | None = None
    tokens: list[int] | None = None

    nvext: NvExt | None = None
    required_prefix_token_ids: list[int] | None = None
    return_token_id_information: bool | None = None
    return_routed_experts: bool | None = None
    return_sampling_mask: bool | None = None
    weight_version: str | None = None
    min_weight_version: str | None = None

    response_format: dict[str, Any] | None = None
    audio: Any = None
    modalities: list[str] | None = None
    prediction: Any = None
    moderation: Any = None
    web_search_options: Any = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    documents: list[Any] | None = None
    chat_template: str | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    return_token_offsets: bool | None = None
    return_prompt_text: bool | None = None
    return_mm_kwargs: bool | None = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    vllm_xargs: dict[str, Any] | None = None

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def extra_fields(self) -> frozenset[str]:
        """The fields of nvext that the response must have."""
        return frozenset() if self.nvext is None else self.nvext.requested_fields

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def sets_template_variables(self) -> bool:
        """Whether the prompt needs a renderer with other variables than the model's own."""
        return bool(
            self.chat_template_kwargs
            or self.reasoning_effort is not None
            or self.verbosity is not None
        )

    @property
    def notes(self) -> dict[str, Any]:
        """The client's annotations of the turn, which have no effect on it."""
        values = {name: getattr(self, name) for name in RECORDED}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def continues(self) -> bool:
        return bool(self.continue_final_message)

    @property
    def salt(self) -> str | None:
        if self.cache_salt is not None or self.nvext is None:
            return self.cache_salt
        return self.nvext.cache_salt

    @property
    def rank(self) -> int:
        """The priority from either place, in vLLM's sign: lower is sooner."""
        priority = self.priority
        if priority is None and self.nvext is not None:
            priority = self.nvext.priority
        return 0 if priority is None else priority

    @property
    def experts_start(self) -> int | None:
        """The first row of routed experts to return, or None when they were not requested."""
        returned = self.return_routed_experts or "routed_experts" in self.extra_fields
        return (self.routed_experts_prompt_start or 0) if returned else None

    def prompt_ids(self) -> tuple[str, list[int]] | None:
        """The field that brings the whole prompt as ids, and the ids; None for messages."""
        if self.tokens is not None:
            return "tokens", self.tokens
        if self.nvext is not None and self.nvext.token_data is not None:
            return "nvext.token_data", self.nvext.token_data
        return None

    def sampling(self, stop_token_ids: tuple[int, ...]) -> Sampling:
        """Return the sampling options; `stop_token_ids` end a turn of this model, unless
        ignore_eos.

        Raises BadRequest that names the field.
        """
        own = tuple(self.stop_token_ids or ())
        limit = self.max_completion_tokens
        prompt_logprobs = self.prompt_logprobs
        if prompt_logprobs is None and "prompt_logprobs" in self.extra_fields:
            prompt_logprobs = 0
        return read_sampling(
            self,
            n=self.choices,
            logprobs=self.top_logprobs or 0,
            prompt_logprobs=prompt_logprobs,
            max_tokens=self.max_tokens if limit is None else limit,
            stop_token_ids=own if self.ignore_eos else tuple(dict.fromkeys(own + stop_token_ids)),
        )
