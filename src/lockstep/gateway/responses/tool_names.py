"""Tools of the responses dialect as functions of chat, and their calls translated back."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lockstep.protocol.openai.responses_items import ResponseTool, read_tools
from lockstep.render.messages import Plain
from lockstep.tokens.errors import BadRequest, UnsupportedField

HOSTED = ("web_search", "web_search_preview", "image_generation", "code_interpreter", "file_search")
"""Tools that OpenAI's servers run; harnesses always list them, and work without them."""
PLAIN_NAMESPACE = "functions"
"""The namespace whose tools are called by their bare names."""
INPUT = "input"
"""The one argument of the function that stands for a custom tool."""


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The name and kind of a tool in the client's request."""

    name: str
    namespace: str | None = None
    custom: bool = False


def chat_name(name: str, namespace: str | None) -> str:
    """Return the name of the function that stands for a tool."""
    return name if namespace in (None, PLAIN_NAMESPACE) else f"{namespace}.{name}"


class ToolNames:
    """The tools of one request: `specs` for chat, and their names for the client."""

    def __init__(self) -> None:
        self.specs: list[Plain] = []
        self.hosted: list[str] = []
        self._by_chat_name: dict[str, NamedTool] = {}

    def add(self, tools: Iterable[dict[str, Any]], where: str) -> None:
        """Add tools of the request. Raises BadRequest or UnsupportedField."""
        for at, tool in enumerate(read_tools(tools, where)):
            self._add(tool, None, f"{where}[{at}]")

    def _add(self, tool: ResponseTool, namespace: str | None, where: str) -> None:
        if tool.type in HOSTED:
            self.hosted.append(f"tools.{tool.type}")
            return
        if tool.type == "namespace" and namespace is None:
            for at, inner in enumerate(read_tools(tool.tools, f"{where}.tools")):
                self._add(inner, tool.name, f"{where}.tools[{at}]")
            return
        if tool.type not in ("function", "custom"):
            raise UnsupportedField(
                f"{where}.type is {tool.type!r}: only function, custom and namespace can be called "
                "here",
                param=f"{where}.type",
            )
        if not tool.name:
            raise BadRequest(f"{where}.name is missing", param=f"{where}.name")
        custom = tool.type == "custom"
        name = chat_name(tool.name, namespace)
        named = None if namespace == PLAIN_NAMESPACE else namespace
        self._by_chat_name[name] = NamedTool(tool.name, named, custom)
        function: Plain = {"name": name}
        if description := _description(tool):
            function["description"] = description
        function["parameters"] = _free_text() if custom else tool.parameters or {}
        self.specs.append({"type": "function", "function": function})

    def call_item(self, call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
        """Return the output item of a call, in the form of its kind of tool."""
        tool = self._by_chat_name.get(name, NamedTool(name))
        item: dict[str, Any] = {
            "type": "custom_tool_call" if tool.custom else "function_call",
            "id": ("ctc_" if tool.custom else "fc_") + call_id,
            "status": status,
            "call_id": call_id,
            "name": tool.name,
        }
        if tool.namespace is not None:
            item["namespace"] = tool.namespace
        if tool.custom:
            item[INPUT] = free_text(arguments)
        else:
            item["arguments"] = arguments
        return item


def free_text(arguments: str) -> str:
    """Return the input of a custom tool from the arguments of its function."""
    decoded = json.loads(arguments) if arguments else {}
    value = decoded.get(INPUT, "")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _description(tool: ResponseTool) -> str:
    parts = [tool.description or ""]
    if tool.format is not None and isinstance(grammar := tool.format.get("definition"), str):
        parts.append(f"Its input has this grammar ({tool.format.get('syntax')}):\n{grammar}")
    return "\n\n".join(filter(None, parts))


def _free_text() -> dict[str, Any]:
    return {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
