"""OpenAI's chat dialect, POST /v1/chat/completions: answers, whole and streamed.

Ids and logprobs are those of the engine, all of them, whatever was parsed out of the text. Each
logprob entry also carries its `token_id`; a token's string is lossless, and its bytes are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from lockstep.tokens import Completion, Finish, PromptLogprob, Ranked, VersionSpan
from lockstep.protocol.vllm.generate_response import (
    Experts,
    PromptEntry,
    PromptLogprobs,
    Usage,
    experts_field,
    usage_of,
)
from lockstep.protocol.common.lazy_ids import as_list
from lockstep.protocol.dynamo.nvext import EngineData, Extension, Timing, worker_id

MOST_NAMES = 1 << 16
"""Tokens whose spelling is kept, per way to spell them."""


class Spelt(Protocol):
    """A token's bytes, and a string for them."""

    @property
    def data(self) -> bytes: ...
    @property
    def text(self) -> str: ...


class Spelling(Protocol):
    """How token ids are written as text."""

    def piece(self, token_id: int) -> Spelt: ...
    def __hash__(self) -> int: ...


class Alternative(msgspec.Struct, gc=False):
    token: str
    token_id: int
    bytes: msgspec.Raw
    logprob: float


class Entry(msgspec.Struct, gc=False):
    token: str
    token_id: int
    bytes: msgspec.Raw
    logprob: float
    top_logprobs: list[Alternative]


NONE: list[Alternative] = []
"""Shared: it is only ever written out."""


class Logprobs(msgspec.Struct):
    content: list[Entry]
    refusal: None = None


class Message(msgspec.Struct, kw_only=True):
    """The assistant's message, or what a chunk adds to it."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[Mapping[str, Any]] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    generation_token_ids: list[int] | UnsetType = UNSET
    generation_log_probs: list[float] | UnsetType = UNSET


class Choice(msgspec.Struct, kw_only=True):
    index: int
    message: Message | UnsetType = UNSET
    delta: Message | UnsetType = UNSET
    logprobs: Logprobs | None = None
    finish_reason: Finish | None = None
    stop_reason: int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET
    weight_versions: Sequence[VersionSpan] | UnsetType = UNSET
    routed_experts: Experts | str | UnsetType | None = UNSET


class Body(msgspec.Struct, kw_only=True):
    """The whole answer, or one streamed chunk of it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | UnsetType = UNSET
    system_fingerprint: str | UnsetType | None = UNSET
    service_tier: UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    nvext: Extension | UnsetType = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What an answer has to show, as its request asked."""

    id: str
    model: str
    created: int
    spelling: Spelling
    logprobs: bool = False
    top: int = 0
    tokens_as_ids: bool = False
    token_ids: bool = False
    ids_on_message: bool = False
    reasoning: bool = True
    experts: bool = False
    prompt_logprobs: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    wanted: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One finished choice: what the engine sampled, and the message it was read as."""

    completion: Completion
    message: Mapping[str, Any]
    finish: Finish


def entries(
    shape: Shape,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    tops: Sequence[tuple[Ranked, ...]] | None = None,
) -> Logprobs:
    named = _names(shape.spelling, shape.tokens_as_ids)
    if not shape.top or tops is None:
        content = [
            Entry(*named[token], logprob, NONE)
            for token, logprob in zip(token_ids, logprobs, strict=True)
        ]
        return Logprobs(content)
    content = []
    for token, logprob, others in zip(token_ids, logprobs, tops, strict=True):
        top = [Alternative(*named[one.token_id], one.logprob) for one in others[: shape.top]]
        content.append(Entry(*named[token], logprob, top))
    return Logprobs(content)


def message_of(shape: Shape, said: Said) -> Message:
    """The whole message. Its content is null beside tool calls when nothing else was said."""
    given, done = said.message, said.completion
    reasoning = given.get("reasoning_content") if shape.reasoning else None
    calls = given.get("tool_calls")
    message = Message(
        role="assistant",
        content=given["content"] or (None if calls else ""),
        refusal=None,
        reasoning=reasoning,
        reasoning_content=reasoning,
    )
    if calls:
        message.tool_calls = list(calls)
    return _with_ids(message, shape, done)


def answer(
    shape: Shape, choices: Sequence[Said], *, worker: str | None, timing: Timing | None
) -> bytes:
    """The whole answer for the choices of one request, in order of their index."""
    first = choices[0].completion
    body = Body(
        id=shape.id,
        object="chat.completion",
        created=shape.created,
        model=shape.model,
        choices=[_choice(shape, said) for said in choices],
        usage=usage_of(
            len(first.prompt_ids), sum(len(said.completion.token_ids) for said in choices)
        ),
        system_fingerprint=fingerprint(first),
        service_tier=None,
        prompt_logprobs=(
            prompt_entries(shape, first.prompt_logprobs) if shape.prompt_logprobs else None
        ),
        prompt_token_ids=as_list(first.prompt_ids) if shape.token_ids else None,
    )
    if shape.wanted:
        body.nvext = extension(shape, first, first.token_ids, worker=worker, timing=timing)
    return msgspec.json.encode(body)


def extension(
    shape: Shape,
    done: Completion,
    new_ids: list[int],
    *,
    worker: str | None,
    timing: Timing | None,
) -> Extension:
    """What was asked for under nvext; `new_ids` are those since the chunk before."""
    wanted = shape.wanted
    return Extension(
        worker_id=worker_id(worker) if "worker_id" in wanted else None,
        completion_token_ids=new_ids if "completion_token_ids" in wanted else None,
        prompt_token_ids=as_list(done.prompt_ids) if "prompt_token_ids" in wanted else None,
        prompt_logprobs=(
            prompt_entries(shape, done.prompt_logprobs) if "prompt_logprobs" in wanted else None
        ),
        timing=timing if "timing" in wanted else None,
        routed_experts=(experts_field(done.experts, "raw") if "routed_experts" in wanted else None),
        engine_data=EngineData.of(done) if "engine_data" in wanted else None,
    )


def ending(shape: Shape, choice: Choice, said: Said) -> None:
    """Puts on a choice what is known when it has ended."""
    done = said.completion
    choice.finish_reason = said.finish
    choice.stop_reason = done.stop_token if done.stop_token in shape.stop_token_ids else None
    choice.weight_versions = done.versions
    if shape.experts:
        choice.routed_experts = experts_field(done.experts, "raw")
    if choice.delta is not UNSET:
        _with_ids(choice.delta, shape, done)


def prompt_entries(
    shape: Shape, prompt: list[PromptLogprob | None] | None
) -> PromptLogprobs | None:
    """vLLM's form: per prompt token a dict by id, the token itself first, null for the first."""
    if prompt is None:
        return None
    result: PromptLogprobs = []
    for entry in prompt:
        if entry is None:
            result.append(None)
            continue
        found: dict[str, PromptEntry] = {}
        every: tuple[PromptLogprob | Ranked, ...] = (entry, *entry.top)
        for one in every:
            text = shape.spelling.piece(one.token_id).text
            found.setdefault(str(one.token_id), PromptEntry(one.logprob, one.rank, text))
        result.append(found)
    return result


def fingerprint(done: Completion) -> str | None:
    """Names the weights that made the answer; null when there is no token to name them by."""
    return f"lockstep-{done.versions[-1].version}" if done.versions else None


def _choice(shape: Shape, said: Said) -> Choice:
    done = said.completion
    choice = Choice(
        index=done.index,
        message=message_of(shape, said),
        logprobs=(
            entries(shape, done.token_ids, done.logprobs, done.top_logprobs)
            if shape.logprobs
            else None
        ),
        token_ids=done.token_ids if shape.token_ids else None,
    )
    ending(shape, choice, said)
    return choice


def _with_ids(message: Message, shape: Shape, done: Completion) -> Message:
    if shape.ids_on_message:
        message.prompt_token_ids = as_list(done.prompt_ids)
        message.generation_token_ids = done.token_ids
        message.generation_log_probs = done.logprobs
    return message


class _Names(dict[int, tuple[str, int, msgspec.Raw]]):
    """A token's string, its id and its bytes, by id; each is made once."""

    def __init__(self, spelling: Spelling, as_id: bool) -> None:
        self._spelling, self._as_id = spelling, as_id

    def __missing__(self, token: int) -> tuple[str, int, msgspec.Raw]:
        if len(self) >= MOST_NAMES:
            self.clear()
        piece = self._spelling.piece(token)
        text = f"token_id:{token}" if self._as_id else piece.text
        made = self[token] = text, token, msgspec.Raw(msgspec.json.encode(list(piece.data)))
        return made


@lru_cache(maxsize=32)
def _names(spelling: Spelling, as_id: bool) -> _Names:
    return _Names(spelling, as_id)
