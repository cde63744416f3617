"""Items of the responses dialect as chat messages: the one translation on the way in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.gateway.responses.tool_names import INPUT, ToolNames, chat_name
from lockstep.protocol.common.thinking_seal import is_broken
from lockstep.protocol.openai.chat_request import ChatRequest
from lockstep.protocol.openai.responses_items import (
    AdditionalToolsItem,
    AgentMessageItem,
    CustomCallItem,
    FunctionCallItem,
    MessageItem,
    ReasoningItem,
    ResponseItem,
    read_items,
    text_of,
)
from lockstep.protocol.openai.responses_request import ResponsesRequest
from lockstep.render.messages import Plain
from lockstep.tokens.errors import BadRequest

IN_REPLY = (ReasoningItem, FunctionCallItem, CustomCallItem)
"""Items of an assistant turn. A tuple: each use of a union would build it anew."""


@dataclass(frozen=True, slots=True)
class TranslatedResponses:
    """A request as chat. `items` are its messages without instructions, to be gone on from."""

    chat: ChatRequest
    tools: ToolNames
    items: list[Plain]
    accepted: list[str]


def translate(
    request: ResponsesRequest, before: Sequence[Plain], *, inner_system: bool
) -> TranslatedResponses:
    """The request as chat, after the messages of the response before it.

    `inner_system` says whether the chat template takes a system message after the first message;
    otherwise the user says it. Raises BadRequest and UnsupportedField.
    """
    tools = ToolNames()
    tools.add(request.tools or (), "tools")
    items = [*before, *_messages(request, tools)]
    messages = _leading_system(request.instructions, items)
    if not inner_system:
        messages = [
            {**message, "role": "user"} if at and message["role"] == "system" else message
            for at, message in enumerate(messages)
        ]
    chat = ChatRequest(
        model=request.model,
        messages=messages,
        tools=tools.specs or None,
        tool_choice=_choice(request.tool_choice),
        stream=request.stream,
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        response_format=_format(request),
    )
    return TranslatedResponses(chat, tools, items, [*request.accepted(), *tools.hosted])


@dataclass(slots=True)
class _Reply:
    """The items of one assistant turn, on their way to be one message."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[Plain] = field(default_factory=list)

    def message(self) -> Plain:
        reply: Plain = {"role": "assistant", "content": "\n".join(self.texts)}
        if any(self.thoughts):
            reply["reasoning_content"] = "\n".join(filter(None, self.thoughts))
        if self.calls:
            reply["tool_calls"] = self.calls
        return reply


def _messages(request: ResponsesRequest, tools: ToolNames) -> list[Plain]:
    if isinstance(request.input, str):
        return [{"role": "user", "content": request.input}] if request.input else []
    messages: list[Plain] = []
    reply: _Reply | None = None
    for at, item in enumerate(read_items(request.input)):
        place = f"input[{at}]"
        if isinstance(item, AdditionalToolsItem):
            tools.add(item.tools, f"{place}.tools")
        elif isinstance(item, IN_REPLY) or (
            isinstance(item, MessageItem) and item.role == "assistant"
        ):
            reply = reply or _Reply()
            _take(reply, item, place)
        else:
            if reply is not None:
                messages.append(reply.message())
                reply = None
            messages.append(_message(item, place))
    if reply is not None:
        messages.append(reply.message())
    return messages


def _take(reply: _Reply, item: ResponseItem, where: str) -> None:
    if isinstance(item, ReasoningItem):
        reply.thoughts.append(_thought(item, where))
    elif isinstance(item, MessageItem):
        text = text_of(item.content, f"{where}.content", joint="")
        if text.strip():
            reply.texts.append(text)
    elif isinstance(item, CustomCallItem):
        arguments: Any = {INPUT: item.input}
        reply.calls.append(_call(item.call_id, item.name, item.namespace, arguments))
    elif isinstance(item, FunctionCallItem):
        reply.calls.append(_call(item.call_id, item.name, item.namespace, item.arguments))


def _message(item: ResponseItem, where: str) -> Plain:
    if isinstance(item, MessageItem):
        role = "system" if item.role == "developer" else item.role
        return {"role": role, "content": text_of(item.content, f"{where}.content")}
    if isinstance(item, AgentMessageItem):
        text = text_of(item.content, f"{where}.content", joint="")
        return {"role": "user", "content": text}
    if isinstance(item, (*IN_REPLY, AdditionalToolsItem)):
        raise BadRequest(f"{where} cannot stand here", param=where)
    output = text_of(item.output, f"{where}.output", joint="")
    return {"role": "tool", "tool_call_id": item.call_id, "content": output}


def _thought(item: ReasoningItem, where: str) -> str:
    written = item.content or item.summary
    text = text_of(written, f"{where}.summary").strip()
    if is_broken(text, item.encrypted_content or ""):
        raise BadRequest(
            f"{where}: encrypted_content is of another reasoning than the summary: send both as "
            "they came, or leave the item out",
            param=f"{where}.encrypted_content",
        )
    return text


def _call(call_id: str, name: str, namespace: str | None, arguments: Any) -> Plain:
    function = {"name": chat_name(name, namespace), "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _leading_system(instructions: str | None, items: Sequence[Plain]) -> list[Plain]:
    """The messages with all that opens them as system in one, as every chat template takes it."""
    count = next((at for at, each in enumerate(items) if each["role"] != "system"), len(items))
    texts = [instructions or "", *(each["content"] for each in items[:count])]
    opening = "\n\n".join(filter(None, texts))
    system: Iterable[Plain] = [{"role": "system", "content": opening}] if opening else []
    return [*system, *items[count:]]


def without_instructions(messages: list[Plain], instructions: str | None) -> list[Plain]:
    """Messages of a turn without the instructions that `_leading_system` put in front of them."""
    first = messages[0]
    if not instructions or first["role"] != "system":
        return messages
    rest = first["content"].removeprefix(instructions).removeprefix("\n\n")
    return [*([{**first, "content": rest}] if rest else []), *messages[1:]]


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") not in ("function", "custom") or not isinstance(choice.get("name"), str):
        raise BadRequest(
            f"tool_choice.type is {choice.get('type')!r}: expected a function or a custom tool, "
            "with its name",
            param="tool_choice",
        )
    return {"type": "function", "function": {"name": choice["name"]}}


def _format(request: ResponsesRequest) -> dict[str, Any] | None:
    wanted = None if request.text is None else request.text.format
    if wanted is None or wanted.get("type") in ("text", "json_object"):
        return wanted
    named = {key: value for key, value in wanted.items() if key != "type"}
    return {"type": wanted.get("type"), "json_schema": named}
