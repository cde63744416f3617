"""Items of the responses dialect as chat messages: the one translation in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.gateway.responses.tool_names import INPUT, ToolNames, chat_name
from lockstep.protocol.common.thinking_seal import is_broken
from lockstep.protocol.openai.chat_request import ChatRequest
from lockstep.protocol.openai.responses_items import (
    AdditionalToolsItem,
    AgentMessageItem,
    CustomCallItem,
    CustomOutputItem,
    FunctionCallItem,
    FunctionOutputItem,
    MessageItem,
    ReasoningItem,
    ResponseItem,
    read_items,
    text_of,
)
from lockstep.protocol.openai.responses_request import ResponsesRequest
from lockstep.render.messages import Plain
from lockstep.tokens.errors import BadRequest


@dataclass(frozen=True, slots=True)
class TranslatedResponses:
    """A request as chat. `items` are its messages without instructions, which are stored."""

    chat: ChatRequest
    tools: ToolNames
    items: list[Plain]
    accepted: list[str]


def translate(
    request: ResponsesRequest, before: Sequence[Plain], *, inner_system: bool
) -> TranslatedResponses:
    """Translate a request to chat, after the messages of the previous response.

    `inner_system` says whether the chat template accepts a system message after the first message;
    without it such messages get the role user. Raises BadRequest and UnsupportedField.
    """
    tools = ToolNames()
    tools.add(request.tools or (), "tools")
    # Messages first: their items may add tools.
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


class _Conversation:
    """Builds messages of items, in order; the items of one assistant turn become one message.

    A request repeats its whole history, so each item is examined once, by its exact type: a chain
    of isinstance checks costs more than everything else that is done with it.
    """

    __slots__ = ("_calls", "_open", "_texts", "_thoughts", "messages")

    def __init__(self) -> None:
        self.messages: list[Plain] = []
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[Plain] = []
        self._open = False

    def add(self, item: ResponseItem, at: int) -> None:
        """Add an item. Raises BadRequest or UnsupportedField for one that cannot be rendered."""
        if type(item) is ReasoningItem:
            self._thoughts.append(_thought(item, at))
        elif type(item) is FunctionCallItem:
            self._calls.append(_call(item, item.arguments))
        elif type(item) is CustomCallItem:
            self._calls.append(_call(item, {INPUT: item.input}))
        elif type(item) is MessageItem and item.role == "assistant":
            text = text_of(item.content, at, "content", joint="")
            if text.strip():
                self._texts.append(text)
        else:
            self.close()
            self.messages.append(_message(item, at))
            return
        self._open = True

    def close(self) -> None:
        """End the assistant turn, if one is open, and append its message."""
        if not self._open:
            return
        reply: Plain = {"role": "assistant", "content": "\n".join(self._texts)}
        if thought := "\n".join(filter(None, self._thoughts)):
            reply["reasoning_content"] = thought
        if self._calls:
            reply["tool_calls"] = self._calls
        self.messages.append(reply)
        self._texts, self._thoughts, self._calls, self._open = [], [], [], False


def _messages(request: ResponsesRequest, tools: ToolNames) -> list[Plain]:
    if isinstance(request.input, str):
        return [{"role": "user", "content": request.input}] if request.input else []
    conversation = _Conversation()
    for at, item in enumerate(read_items(request.input)):
        if type(item) is AdditionalToolsItem:
            tools.add(item.tools, f"input[{at}].tools")
        else:
            conversation.add(item, at)
    conversation.close()
    return conversation.messages


def _message(item: ResponseItem, at: int) -> Plain:
    if type(item) is FunctionOutputItem or type(item) is CustomOutputItem:
        output = text_of(item.output, at, "output", joint="")
        return {"role": "tool", "tool_call_id": item.call_id, "content": output}
    if type(item) is MessageItem:
        role = "system" if item.role == "developer" else item.role
        return {"role": role, "content": text_of(item.content, at, "content")}
    if type(item) is AgentMessageItem:
        return {"role": "user", "content": text_of(item.content, at, "content", joint="")}
    raise BadRequest(f"input[{at}] is not allowed here", param=f"input[{at}]")


def _thought(item: ReasoningItem, at: int) -> str:
    parts = item.content or item.summary
    text = text_of(parts, at, "summary").strip()
    if is_broken(text, item.encrypted_content or ""):
        raise BadRequest(
            f"input[{at}]: encrypted_content is of another reasoning than the summary: send both "
            "as they came, or leave the item out",
            param=f"input[{at}].encrypted_content",
        )
    return text


def _call(item: FunctionCallItem | CustomCallItem, arguments: Any) -> Plain:
    function = {"name": chat_name(item.name, item.namespace), "arguments": arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _leading_system(instructions: str | None, items: Sequence[Plain]) -> list[Plain]:
    """Return the messages with all leading system text in one, which every template accepts."""
    count = next((at for at, item in enumerate(items) if item["role"] != "system"), len(items))
    texts = [instructions or "", *(item["content"] for item in items[:count])]
    opening = "\n\n".join(filter(None, texts))
    system: Iterable[Plain] = [{"role": "system", "content": opening}] if opening else []
    return [*system, *items[count:]]


def without_instructions(messages: list[Plain], instructions: str | None) -> list[Plain]:
    """Return the messages of a turn without the instructions that `_leading_system` prepended."""
    first = messages[0]
    if not instructions or first["role"] != "system":
        return messages
    rest = first["content"].removeprefix(instructions).removeprefix("\n\n")
    return [*([{**first, "content": rest}] if rest else []), *messages[1:]]


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        return {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": choice.get("mode"),
                "tools": [_choice(tool) for tool in tools] if isinstance(tools, list) else tools,
            },
        }
    if choice.get("type") not in ("function", "custom") or not isinstance(choice.get("name"), str):
        raise BadRequest(
            f"tool_choice.type is {choice.get('type')!r}: expected a function or a custom tool, "
            "with its name, or allowed_tools",
            param="tool_choice",
        )
    return {"type": "function", "function": {"name": choice["name"]}}


def _format(request: ResponsesRequest) -> dict[str, Any] | None:
    spec = None if request.text is None else request.text.format
    if spec is None or spec.get("type") in ("text", "json_object"):
        return spec
    schema = {key: value for key, value in spec.items() if key != "type"}
    return {"type": spec.get("type"), "json_schema": schema}
