"""OpenAI's chat dialect, POST /v1/chat/completions: responses, whole and streamed.

Ids and logprobs are all those of the engine, whatever was parsed out of the text. Each logprob
entry also has its `token_id`; a token's string is lossless, and its bytes are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from lockstep.protocol.common.prompt_logprobs import PromptField, encode_prompt_logprobs
from lockstep.protocol.common.response import GenerateUsage, usage_of
from lockstep.protocol.common.sampling_mask import SupportField, support_field
from lockstep.protocol.dynamo.nvext import EngineData, NvextResponse, Timing, worker_id
from lockstep.protocol.json.lazy_ids import as_list
from lockstep.protocol.openai.legacy_functions import function_call_of
from lockstep.protocol.vllm.generate_response import ExpertsField, experts_field
from lockstep.tokens import Completion, Finish, PromptLogprob, Ranked, VersionSpan

ID_PREFIX = "chatcmpl-"
MOST_NAMES = 1 << 16
"""Tokens whose spelling is cached, per way to spell them."""


class TokenText(Protocol):
    """A token's bytes, and a string for them."""

    @property
    def data(self) -> bytes: ...
    @property
    def text(self) -> str: ...


class TokenTexts(Protocol):
    """Conversion of token ids to text."""

    def piece(self, token_id: int) -> TokenText: ...
    def __hash__(self) -> int: ...


class ChatTopLogprob(msgspec.Struct, gc=False):
    token: str
    token_id: int
    bytes: msgspec.Raw
    logprob: float


class ChatLogprob(msgspec.Struct, gc=False):
    token: str
    token_id: int
    bytes: msgspec.Raw
    logprob: float
    top_logprobs: list[ChatTopLogprob]


NONE: list[ChatTopLogprob] = []
"""Shared empty list, which is only encoded and never changed."""


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    refusal: None = None


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The assistant's message, or the part of it that a chunk adds."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[Mapping[str, Any]] | UnsetType = UNSET
    function_call: Mapping[str, Any] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    generation_token_ids: list[int] | UnsetType = UNSET
    generation_log_probs: list[float] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AssistantMessage | UnsetType = UNSET
    delta: AssistantMessage | UnsetType = UNSET
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | Literal["function_call"] | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET
    weight_versions: Sequence[VersionSpan] | UnsetType = UNSET
    routed_experts: ExpertsField | str | UnsetType | None = UNSET
    sampling_mask: SupportField | UnsetType = UNSET
    tool_parse_error: str | UnsetType = UNSET


class ChatCompletionBody(msgspec.Struct, kw_only=True):
    """The whole response, or one streamed chunk of it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: GenerateUsage | UnsetType = UNSET
    system_fingerprint: str | UnsetType | None = UNSET
    service_tier: UnsetType | None = UNSET
    prompt_logprobs: PromptField | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    nvext: NvextResponse | UnsetType = UNSET
    logprob_mode: str | UnsetType = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatResponseShape:
    """Fields that a response must have, as requested."""

    id: str
    model: str
    created: int
    spelling: TokenTexts
    logprobs: bool = False
    top: int = 0
    tokens_as_ids: bool = False
    token_ids: bool = False
    ids_on_message: bool = False
    reasoning: bool = True
    experts: bool = False
    support: bool = False
    prompt_logprobs: bool = False
    functions: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    extra_fields: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """One finished choice: the engine's completion, and the message parsed from it.

    `tool_parse_error` says what is wrong with a tool call that stayed text.
    """

    completion: Completion
    message: Mapping[str, Any]
    finish: Finish
    tool_parse_error: str | None = None


def entries(
    shape: ChatResponseShape,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    tops: Sequence[tuple[Ranked, ...]] | None = None,
) -> ChatLogprobs:
    """Return the logprob entries of some tokens, with alternatives where the request wants them."""
    named = _names(shape.spelling, shape.tokens_as_ids)
    if not shape.top or tops is None:
        content = [
            ChatLogprob(*named[token], logprob, NONE)
            for token, logprob in zip(token_ids, logprobs, strict=True)
        ]
        return ChatLogprobs(content)
    content = []
    for token, logprob, others in zip(token_ids, logprobs, tops, strict=True):
        top = [
            ChatTopLogprob(*named[other.token_id], other.logprob) for other in others[: shape.top]
        ]
        content.append(ChatLogprob(*named[token], logprob, top))
    return ChatLogprobs(content)


def message_of(shape: ChatResponseShape, reply: ChatReply) -> AssistantMessage:
    """Return the whole message. Its content is null beside tool calls when there is nothing
    else.
    """
    parsed, completion = reply.message, reply.completion
    reasoning = parsed.get("reasoning_content") if shape.reasoning else None
    calls = parsed.get("tool_calls")
    message = AssistantMessage(
        role="assistant",
        content=parsed["content"] or (None if calls else ""),
        refusal=None,
        reasoning=reasoning,
        reasoning_content=reasoning,
    )
    if calls:
        put_calls(shape, message, list(calls))
    return _with_ids(message, shape, completion)


def put_calls(
    shape: ChatResponseShape, message: AssistantMessage, calls: list[Mapping[str, Any]]
) -> None:
    """Add tool calls to a message, in the legacy form if the request uses it."""
    if shape.functions:
        message.function_call = function_call_of(calls)
    else:
        message.tool_calls = calls


def chat_response(
    shape: ChatResponseShape,
    choices: Sequence[ChatReply],
    *,
    worker: str | None,
    timing: Timing | None,
) -> bytes:
    """Return the whole response for the choices of one request, in order of their index."""
    first = choices[0].completion
    body = ChatCompletionBody(
        id=shape.id,
        object="chat.completion",
        created=shape.created,
        model=shape.model,
        choices=[_choice(shape, reply) for reply in choices],
        usage=usage_of(
            len(first.prompt_ids), sum(len(reply.completion.token_ids) for reply in choices)
        ),
        system_fingerprint=fingerprint(first),
        service_tier=None,
        prompt_logprobs=(
            prompt_entries(shape, first.prompt_logprobs) if shape.prompt_logprobs else None
        ),
        prompt_token_ids=as_list(first.prompt_ids) if shape.token_ids else None,
        logprob_mode=first.logprob_mode,
    )
    if shape.extra_fields:
        body.nvext = extension(shape, first, first.token_ids, worker=worker, timing=timing)
    return msgspec.json.encode(body)


def extension(
    shape: ChatResponseShape,
    completion: Completion,
    new_ids: list[int],
    *,
    worker: str | None,
    timing: Timing | None,
) -> NvextResponse:
    """Return the fields requested under nvext; `new_ids` are those since the previous chunk."""
    fields = shape.extra_fields
    return NvextResponse(
        worker_id=worker_id(worker) if "worker_id" in fields else None,
        completion_token_ids=new_ids if "completion_token_ids" in fields else None,
        prompt_token_ids=as_list(completion.prompt_ids) if "prompt_token_ids" in fields else None,
        prompt_logprobs=(
            prompt_entries(shape, completion.prompt_logprobs)
            if "prompt_logprobs" in fields
            else None
        ),
        timing=timing if "timing" in fields else None,
        routed_experts=(
            experts_field(completion.experts, "raw") if "routed_experts" in fields else None
        ),
        engine_data=EngineData.of(completion) if "engine_data" in fields else None,
    )


def ending(shape: ChatResponseShape, choice: ChatChoice, reply: ChatReply) -> None:
    """Add to a choice the fields that are known once it has ended."""
    completion = reply.completion
    choice.finish_reason = reply.finish
    if shape.functions and reply.finish == "tool_calls":
        choice.finish_reason = "function_call"
    choice.stop_reason = completion.stop_reason
    if completion.stop_token in shape.stop_token_ids:
        choice.stop_reason = completion.stop_token
    choice.weight_versions = completion.versions
    if reply.tool_parse_error is not None:
        choice.tool_parse_error = reply.tool_parse_error
    if shape.experts:
        choice.routed_experts = experts_field(completion.experts, "raw")
    if shape.support:
        choice.sampling_mask = support_field(completion.support, "lists")
    if choice.delta is not UNSET:
        _with_ids(choice.delta, shape, completion)


def prompt_entries(
    shape: ChatResponseShape, prompt: list[PromptLogprob | None] | None
) -> PromptField | None:
    """Return the prompt's logprobs with the text of every token."""
    return encode_prompt_logprobs(prompt, lambda token: shape.spelling.piece(token).text)


def fingerprint(completion: Completion) -> str | None:
    """Return the version of the weights that made the response; null for a response without
    tokens.
    """
    return f"lockstep-{completion.versions[-1].version}" if completion.versions else None


def _choice(shape: ChatResponseShape, reply: ChatReply) -> ChatChoice:
    completion = reply.completion
    choice = ChatChoice(
        index=completion.index,
        message=message_of(shape, reply),
        logprobs=(
            entries(shape, completion.token_ids, completion.logprobs, completion.top_logprobs)
            if shape.logprobs
            else None
        ),
        token_ids=completion.token_ids if shape.token_ids else None,
    )
    ending(shape, choice, reply)
    return choice


def _with_ids(
    message: AssistantMessage, shape: ChatResponseShape, completion: Completion
) -> AssistantMessage:
    if shape.ids_on_message:
        message.prompt_token_ids = as_list(completion.prompt_ids)
        message.generation_token_ids = completion.token_ids
        message.generation_log_probs = completion.logprobs
    return message


class _Names(dict[int, tuple[str, int, msgspec.Raw]]):
    """Cache of token strings, ids and bytes, by id."""

    def __init__(self, spelling: TokenTexts, as_id: bool) -> None:
        self._spelling, self._as_id = spelling, as_id

    def __missing__(self, token: int) -> tuple[str, int, msgspec.Raw]:
        if len(self) >= MOST_NAMES:
            self.clear()
        piece = self._spelling.piece(token)
        text = f"token_id:{token}" if self._as_id else piece.text
        made = self[token] = text, token, msgspec.Raw(msgspec.json.encode(list(piece.data)))
        return made


@lru_cache(maxsize=32)
def _names(spelling: TokenTexts, as_id: bool) -> _Names:
    return _Names(spelling, as_id)
