"""OpenAI's legacy function calls, converted to tools in requests and back in responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.protocol.openai.chat_request import ChatRequest
from lockstep.tokens.errors import BadRequest


def read_functions(request: ChatRequest) -> None:
    """Convert `functions` and `function_call` to `tools` and `tool_choice`.

    At most one call is sampled, because a legacy response holds only one. Raises BadRequest that
    names the field.
    """
    for field, newer in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(request, field) is not None and getattr(request, newer) is not None:
            raise BadRequest(f"{field} and {newer} are both there: send one of them", param=field)
    for at, function in enumerate(request.functions or ()):
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(
                f"functions[{at}] has no name: expected an object with `name`",
                param=f"functions[{at}]",
            )
    if request.functions:
        request.tools = [
            {"type": "function", "function": definition} for definition in request.functions
        ]
        request.parallel_tool_calls = False
    choice = request.function_call
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    request.tool_choice = choice


def read_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message in its current form; most messages are unchanged.

    Legacy calls have no ids, and none is invented: a session could match it with another call.
    """
    if message.get("role") == "function":
        return {**message, "role": "tool"}
    if isinstance(call := message.get("function_call"), dict):
        rest = {key: value for key, value in message.items() if key != "function_call"}
        return {**rest, "tool_calls": [{"type": "function", "function": dict(call)}]}
    return message


def function_call_of(calls: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the first of these tool calls in the legacy form, which holds only one."""
    function = calls[0]["function"]
    return {"name": function["name"], "arguments": function["arguments"]}
