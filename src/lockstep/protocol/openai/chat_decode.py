"""Strict decoding of chat requests, with errors that name the field.

A field that cannot be honoured is accepted at its neutral value and rejected otherwise, so that
stock clients work and no field is ignored silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from lockstep.protocol.common import sampling_fields
from lockstep.protocol.common.request_id import check_request_id
from lockstep.protocol.dynamo.nvext import NvExt, check_nvext
from lockstep.protocol.json.strict import decode, refuse_unless_neutral
from lockstep.protocol.openai.chat_request import AllowedTools, ChatRequest
from lockstep.protocol.openai.legacy_functions import read_functions, read_message
from lockstep.tokens.errors import BadRequest, UnsupportedField
from lockstep.tokens.ids import check_ids
from lockstep.tokens.sampling import MAX_LOGPROBS

PLACES = 2**31
"""Upper bound of token ids here; the engine checks them against its vocabulary."""

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **sampling_fields.NEUTRAL,
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "moderation": (),
    "web_search_options": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "echo": (False,),
    "add_special_tokens": (False,),
    "documents": ([],),
    "chat_template": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "return_mm_kwargs": (True, False),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "vllm_xargs": ({},),
}
MESSAGE_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "role": ((str,), "text"),
    "content": ((str, list), "text or a list of parts"),
    "tool_calls": ((list,), "a list of calls"),
    "tool_call_id": ((str,), "text"),
    "name": ((str,), "text"),
    "reasoning": ((str,), "text"),
    "reasoning_content": ((str,), "text"),
}
"""Types of the keys of a message; templates may use further keys."""
ROLES = ("user", "assistant", "tool", "system")
NEUTRAL_STREAM: dict[str, tuple[object, ...]] = {
    "continuous_usage_stats": (False,),
    "include_obfuscation": (False,),
}
DECODER = msgspec.json.Decoder(ChatRequest)


def decode_chat(body: bytes) -> ChatRequest:
    """Return the request in `body`. Raises BadRequest, UnknownField or UnsupportedField."""
    request = decode(DECODER, body)
    if request.functions is not None or request.function_call is not None:
        read_functions(request)
    _read_messages(request.messages)
    return check_chat(request)


def check_chat(request: ChatRequest) -> ChatRequest:
    """Check a request whose messages were checked, or translated from another dialect, and return
    it.

    Raises BadRequest or UnsupportedField.
    """
    refuse_unless_neutral(request, NEUTRAL)
    if request.nvext is not None:
        check_nvext(request.nvext, request.choices)
    if request.request_id is not None:
        check_request_id(request.request_id)
    _check_stream(request)
    _check_lengths_and_logprobs(request)
    _check_tools(request)
    _check_prompt(request)
    if request.nvext is not None:
        _check_places(request, request.nvext)
    return request


def _check_places(request: ChatRequest, nvext: NvExt) -> None:
    """Raise BadRequest for a value that vLLM's field and Dynamo's field set differently."""
    salt, hints = nvext.cache_salt, nvext.agent_hints
    if request.cache_salt is not None and salt is not None and salt != request.cache_salt:
        raise BadRequest(
            f"nvext.cache_salt is {salt!r}, but cache_salt is {request.cache_salt!r}: give it in "
            "one place",
            param="nvext.cache_salt",
        )
    hinted = None if hints is None else hints.priority
    if request.priority is not None and hinted is not None and hinted != -request.priority:
        raise BadRequest(
            f"nvext.agent_hints.priority is {hinted} (higher is sooner), but priority is "
            f"{request.priority} (lower is sooner): give it in one place",
            param="nvext.agent_hints.priority",
        )


def _check_stream(request: ChatRequest) -> None:
    if request.stream_options is None:
        return
    if not request.stream:
        raise BadRequest(
            "stream_options is set, but stream is not true: set it too", param="stream_options"
        )
    refuse_unless_neutral(request.stream_options, NEUTRAL_STREAM, "stream_options.")


def _check_lengths_and_logprobs(request: ChatRequest) -> None:
    both = (request.max_tokens, request.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise BadRequest(
            f"max_tokens is {both[0]}, but max_completion_tokens is {both[1]}: give one of them",
            param="max_tokens",
        )
    for field in ("max_completion_tokens", "max_tokens"):
        if (value := getattr(request, field)) is not None and value < 1:
            raise BadRequest(f"{field} is {value}: expected at least 1", param=field)
    top = request.top_logprobs
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise BadRequest(
            f"top_logprobs is {top}: expected 0 to {MAX_LOGPROBS}", param="top_logprobs"
        )
    if top and not request.logprobs:
        raise BadRequest(
            f"top_logprobs is {top}, but logprobs is not true: set it too", param="top_logprobs"
        )


def _read_messages(messages: list[dict[str, Any]]) -> None:
    """Convert messages in older forms to the current one. Raises BadRequest for a message with
    invalid content.
    """
    for at, message in enumerate(messages):
        # Every turn sends the whole history, so most messages get only this cheap check.
        if message.get("role") not in ROLES or "function_call" in message:
            messages[at] = message = read_message(message)
        for key, value in message.items():
            kinds = MESSAGE_KINDS.get(key)
            if kinds is not None and value is not None and type(value) not in kinds[0]:
                raise BadRequest(
                    f"messages[{at}].{key} is a {type(value).__name__}: expected {kinds[1]}",
                    param=f"messages[{at}].{key}",
                )


def _check_tools(request: ChatRequest) -> None:
    for at, tool in enumerate(request.tools or ()):
        function = tool.get("function")
        if tool.get("type") != "function":
            raise UnsupportedField(
                f"tools[{at}].type is {tool.get('type')!r}: only functions can be called here",
                param=f"tools[{at}].type",
            )
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(
                f"tools[{at}].function has no name: expected an object with `name`",
                param=f"tools[{at}].function",
            )
    _check_choice(request)


def _check_choice(request: ChatRequest) -> None:
    choice = request.tool_choice
    if choice in (None, "auto", "none"):
        return
    if isinstance(choice, str) and choice != "required":
        raise UnsupportedField(
            f"tool_choice is {choice!r}: expected none, auto, required or a function's name",
            param="tool_choice",
        )
    names = [tool["function"]["name"] for tool in request.tools or ()]
    if not names:
        raise BadRequest(
            "tool_choice demands a call, but there are no tools: send them in tools",
            param="tool_choice",
        )
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        _check_allowed(choice, names)
    elif isinstance(choice, dict):
        function = choice.get("function")
        if choice.get("type") != "function" or not isinstance(function, dict):
            raise UnsupportedField(
                f"tool_choice is {msgspec.json.encode(choice).decode()}: expected "
                '{"type": "function", "function": {"name": ...}}, or one of type allowed_tools',
                param="tool_choice",
            )
        if function.get("name") not in names:
            raise BadRequest(
                f"tool_choice names {function.get('name')!r}: tools has {', '.join(names)}",
                param="tool_choice",
            )


def _check_allowed(choice: dict[str, Any], names: list[str]) -> None:
    """Raise BadRequest unless `allowed_tools` is a mode with some of the tools."""
    where = "tool_choice.allowed_tools"
    try:
        allowed = msgspec.convert(choice.get("allowed_tools"), AllowedTools)
    except msgspec.ValidationError as error:
        raise BadRequest(
            f"{where}: {error}; expected mode (auto or required), and tools, each with type "
            "function and the name of one",
            param=where,
        ) from None
    if not allowed.tools:
        raise BadRequest(f"{where}.tools is empty: send tool_choice 'none'", param=where)
    for tool in allowed.tools:
        if tool.function.name not in names:
            raise BadRequest(
                f"{where}.tools names {tool.function.name!r}: tools has {', '.join(names)}",
                param=where,
            )


def _check_prompt(request: ChatRequest) -> None:
    if request.continues and request.add_generation_prompt is not False:
        raise BadRequest(
            "continue_final_message needs add_generation_prompt=false: either the last message "
            "goes on, or a new one is opened",
            param="continue_final_message",
        )
    ids = {
        "tokens": request.tokens,
        "nvext.token_data": None if request.nvext is None else request.nvext.token_data,
        "required_prefix_token_ids": request.required_prefix_token_ids,
    }
    prompts = {field: value for field, value in ids.items() if value is not None}
    for field, value in prompts.items():
        check_ids(value, PLACES, field)
    if len(prompts) > 1:
        raise BadRequest(
            f"the prompt is there twice, in {' and in '.join(prompts)}: send one of them",
            param=next(iter(prompts)),
        )
    if not request.messages and request.prompt_ids() is None:
        raise BadRequest("messages is empty: expected at least one message", param="messages")
