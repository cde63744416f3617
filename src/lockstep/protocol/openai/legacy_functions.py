"""OpenAI's older way to call functions: read as tools, and written back in its own shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lockstep.protocol.openai.chat_request import ChatRequest
from lockstep.tokens.errors import BadRequest


def read_functions(request: ChatRequest) -> None:
    """Puts `functions` and `function_call` into the places of today.

    One call at most can be written back, so that more are not sampled. Raises BadRequest that
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
    """The message as it is written today; most are as they were.

    Calls had no ids then: none is made up, as a session would take it for another call's.
    """
    if message.get("role") == "function":
        return {**message, "role": "tool"}
    if isinstance(call := message.get("function_call"), dict):
        rest = {key: value for key, value in message.items() if key != "function_call"}
        return {**rest, "tool_calls": [{"type": "function", "function": dict(call)}]}
    return message


def function_call_of(calls: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The first of these tool calls in the older shape, which has room for one."""
    function = calls[0]["function"]
    return {"name": function["name"], "arguments": function["arguments"]}
