"""Anthropic's messages as chat messages: the one translation in.

One history always becomes the same messages, whatever a harness varies between two requests without
changing the meaning: content as a string or as blocks, cache markers, blank text, tool results in
one message or in several, a billing header in the system prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.protocol.anthropic.messages_request import (
    AnthropicTool,
    AnthropicToolChoice,
    Block,
    DocumentBlock,
    ImageBlock,
    InputMessage,
    MessagesRequest,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from lockstep.protocol.common.thinking_seal import is_broken
from lockstep.protocol.openai.chat_request import ChatRequest
from lockstep.render.messages import Plain
from lockstep.tokens.errors import BadRequest, UnsupportedField

BILLING_HEADER = "x-anthropic-billing-header:"
"""Start of a block of Claude Code's system prompt that is meant for Anthropic's servers. It holds a
digest of the first message and a sub-agent flag, and changes within a conversation."""


@dataclass(frozen=True, slots=True)
class TranslatedMessages:
    """A request as chat.

    `found_tools` are tools that a tool search has found: the messages describe them where it did,
    not the prompt's beginning, which would change it. `accepted` names fields without an effect.
    """

    chat: ChatRequest
    found_tools: list[Plain]
    accepted: list[str]
    inner_system: int | None
    """Index of a system message among the others, which not every chat template accepts."""


def translate(request: MessagesRequest) -> TranslatedMessages:
    """Translate a request to chat. Raises BadRequest, and UnsupportedField for images and
    documents."""
    tools = {tool.name: _tool(tool) for tool in request.tools or ()}
    deferred = {tool.name for tool in request.tools or () if tool.defer_loading}
    accepted = request.accepted()
    messages: list[Plain] = []
    if request.system is not None:
        text, billed = _system(request.system)
        accepted += ["system.billing_header"] * billed
        if text:
            messages.append({"role": "system", "content": text})
    inner: int | None = None
    for at, message in enumerate(request.messages):
        if message.role == "system":
            inner = at if inner is None else inner
        messages += _chat_messages(message, f"messages.{at}", tools)
    listed = [spec for name, spec in tools.items() if name not in deferred]
    chat = ChatRequest(
        model=request.model,
        messages=messages,
        tools=listed or None,
        stream=request.stream,
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=request.stop_sequences,
        response_format=_format(request),
    )
    if (choice := request.tool_choice) is not None:
        chat.tool_choice = _choice(choice)
        if choice.disable_parallel_tool_use:
            chat.parallel_tool_calls = False
    # Deferred tools stay out of the prompt's beginning until a tool search has found them.
    referred = _referred_tools(request.messages)
    searched = [spec for name, spec in tools.items() if name in deferred & referred]
    return TranslatedMessages(chat, searched, accepted, inner)


def _chat_messages(message: InputMessage, where: str, tools: Mapping[str, Plain]) -> list[Plain]:
    blocks: Sequence[Block] = (
        [TextBlock(text=message.content)] if isinstance(message.content, str) else message.content
    )
    if message.role == "assistant":
        return [_assistant(blocks, where)]
    messages: list[Plain] = []
    texts: list[str] = []
    for at, block in enumerate(blocks):
        place = f"{where}.content.{at}"
        if isinstance(block, ToolResultBlock) and message.role == "user":
            if texts:
                messages.append({"role": "user", "content": "\n".join(texts)})
                texts = []
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": block.tool_use_id,
                    "content": _result(block, place, tools),
                }
            )
        else:
            texts.append(_text(block, place, tools))
    if texts or not messages:
        messages.append({"role": message.role, "content": "\n".join(texts)})
    return messages


def _assistant(blocks: Sequence[Block], where: str) -> Plain:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Plain] = []
    for at, block in enumerate(blocks):
        place = f"{where}.content.{at}"
        if isinstance(block, ThinkingBlock):
            if is_broken(block.thinking, block.signature):
                raise BadRequest(
                    f"{place}: Invalid `signature` in `thinking` block: the thinking was changed",
                    param=place,
                )
            thoughts.append(block.thinking.strip())
        elif isinstance(block, ToolUseBlock):
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, RedactedThinkingBlock):
            continue  # only its server can read it; our own turns are matched without it
        elif (text := _text(block, place, {})).strip():
            texts.append(text)
    reply: Plain = {"role": "assistant", "content": "\n".join(texts)}
    if any(thoughts):
        reply["reasoning_content"] = "\n".join(filter(None, thoughts))
    if calls:
        reply["tool_calls"] = calls
    return reply


def _result(block: ToolResultBlock, where: str, tools: Mapping[str, Plain]) -> str:
    if isinstance(block.content, str):
        return block.content
    parts = enumerate(block.content)
    return "\n".join(_text(part, f"{where}.content.{at}", tools) for at, part in parts)


def _text(block: Block, where: str, tools: Mapping[str, Plain]) -> str:
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, ToolReferenceBlock):
        spec = tools.get(block.tool_name)
        return block.tool_name if spec is None else json.dumps(spec, ensure_ascii=False)
    kind = type(block).__struct_config__.tag
    if isinstance(block, ImageBlock | DocumentBlock):
        raise UnsupportedField(
            f"{where}: a block of type {kind!r} cannot be rendered to tokens by this model, which "
            "reads text only",
            param=where,
        )
    raise BadRequest(f"{where}: a block of type {kind!r} is not allowed here", param=where)


def _system(system: str | list[TextBlock]) -> tuple[str, bool]:
    """Return the system prompt without its billing header, and whether it had one."""
    texts = [system] if isinstance(system, str) else [block.text for block in system]
    prompt = [text for text in texts if not text.startswith(BILLING_HEADER)]
    return "\n".join(prompt), len(prompt) < len(texts)


def _tool(tool: AnthropicTool) -> Plain:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema or {}}
    if tool.description:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _choice(choice: AnthropicToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name or ""}}
    return {"any": "required"}.get(choice.type, choice.type)


def _format(request: MessagesRequest) -> dict[str, Any] | None:
    spec = None if request.output_config is None else request.output_config.format
    if spec is None:
        return None
    if spec.get("type") != "json_schema" or not isinstance(spec.get("schema"), dict):
        raise BadRequest(
            "output_config.format: expected type 'json_schema' with a schema",
            param="output_config.format",
        )
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": spec["schema"]}}


def _referred_tools(messages: Sequence[InputMessage]) -> set[str]:
    return {
        part.tool_name
        for message in messages
        if not isinstance(message.content, str)
        for block in message.content
        if isinstance(block, ToolResultBlock) and not isinstance(block.content, str)
        for part in block.content
        if isinstance(part, ToolReferenceBlock)
    }
