"""Grammar of tool calls in a model's own format, derived from its chat template.

Two calls are rendered, and the text around their names and arguments is the format. It is expressed
as a structural tag, which vLLM, SGLang and the embedded engine all accept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lockstep.protocol.common.structured_outputs import with_whitespace
from lockstep.render.messages import Plain
from lockstep.render.renderer import Renderer
from lockstep.render.thought import format_of, tagged
from lockstep.tokens.errors import BadRequest, UnsupportedField
from lockstep.tokens.grammar import Grammar

NAME = "look_up"
ARGUMENTS = ('{"word": "AAA"}', '{"word": "BBB"}')
TOOL: Plain = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Finds a word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
THOUGHT = re.compile(r"<think>\s*</think>\s*")
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls: `opening` (call (`separator` call)*)? `closing`, where a call is
    `begin` name `middle` arguments `end`. `separator` is None if it can make only one.
    """

    opening: str
    begin: str
    middle: str
    end: str
    separator: str | None
    closing: str


def tool_grammar(
    renderer: Renderer,
    tools: Sequence[Json] | None,
    choice: str | Json | None,
    *,
    parallel: bool,
    content: Grammar | None = None,
    whitespace: Json | None = None,
) -> Grammar | None:
    """Return the grammar of a turn with these tools; `content` if no call is required.

    `choice` is OpenAI's tool_choice, with valid names. `content` is the grammar of turns without a
    call; `whitespace` is that of JSON arguments. Raises UnsupportedField for a format without a
    grammar.
    """
    named = isinstance(choice, dict) and choice["type"] == "function"
    allowed = choice["allowed_tools"] if isinstance(choice, dict) and not named else None
    demanded = (
        named or choice == "required" or (allowed is not None and allowed["mode"] == "required")
    )
    held = demanded or allowed is not None or content is not None or not parallel
    if not tools or choice == "none" or not held:
        return content
    form = tool_format(renderer)
    if form is None:
        chosen = demanded or allowed is not None
        field = "tool_choice" if chosen else "response_format" if content else None
        raise UnsupportedField(
            "this model's chat template writes tool calls in a form that cannot be held to a "
            "grammar here: leave tool_choice at 'auto', parallel_tool_calls out, and "
            "response_format without tools",
            param=field or "parallel_tool_calls",
        )
    if isinstance(choice, dict):
        chosen_tools = [choice] if allowed is None else allowed["tools"]
        names = {tool["function"]["name"] for tool in chosen_tools}
        tools = [tool for tool in tools if tool["function"]["name"] in names]
    if whitespace:
        tools = [_spaced(tool, whitespace) for tool in tools]
    single = named or not parallel or form.separator is None
    if demanded:
        format_ = _calls(form, tools, single)
    elif content is not None:
        format_ = {"type": "or", "elements": [_format_of(content), _calls(form, tools, single)]}
    else:
        format_ = _text_and_calls(form, tools, single=not parallel)
    return tagged(format_)


@lru_cache(maxsize=64)
def tool_format(renderer: Renderer) -> ToolFormat | None:
    """Return how the renderer's model writes tool calls; None if no grammar can express it."""
    single = _turn(renderer, 1)
    if single is None or (parts := _split(single, 1)) is None:
        return None
    several = _turn(renderer, 2)
    two = None if several is None else _split(several, 2)
    # Templates put empty thinking before turns without any: it is not part of the call.
    thought = THOUGHT.match(parts[0])
    before = parts[0][thought.end() :] if thought else parts[0]
    if two is None:
        if not before or _has_id(before + parts[2]):
            return None
        return ToolFormat("", before, parts[1], parts[2], None, "")
    between, tail = two[2], two[3]
    begin = _common(before[::-1], between[::-1])[::-1]
    after = between[: len(between) - len(begin)]
    end = _common(after, tail)
    if not begin or _has_id(between + tail):
        return None
    opening = before[: len(before) - len(begin)]
    return ToolFormat(opening, begin, two[1], end, after[len(end) :], tail[len(end) :])


def _common(first: str, other: str) -> str:
    """Return the common prefix."""
    at = 0
    while at < min(len(first), len(other)) and first[at] == other[at]:
        at += 1
    return first[:at]


def _has_id(text: str) -> bool:
    """Return whether the text contains the id of a call, which a model would have to invent."""
    return _id(0)[:-1] in text


def _id(at: int) -> str:
    return f"a1b2c3d4{at}"


def _turn(renderer: Renderer, count: int) -> str | None:
    """Return the template's text of an assistant turn with some calls, up to its end."""
    user: Plain = {"role": "user", "content": "Hi"}
    calls = [
        {"id": _id(at), "type": "function",
         "function": {"name": NAME, "arguments": json.loads(ARGUMENTS[at])}}
        for at in range(count)
    ]  # fmt: skip
    reply: Plain = {"role": "assistant", "content": "", "tool_calls": calls}
    decode = renderer.pieces.decode
    try:
        opened = decode(renderer.render([user], [TOOL]))
        whole = decode(renderer.render([user, reply], [TOOL], add_generation_prompt=False))
    except BadRequest:
        return None
    if not whole.startswith(opened):
        return None
    ends = [decode([token]) for token in renderer.stop_token_ids]
    places = [at for end in ends if end and (at := whole.find(end, len(opened))) >= 0]
    return whole[len(opened) : min(places, default=len(whole))]


def _split(turn: str, count: int) -> list[str] | None:
    """Return the text before, within, between and after the calls; None for another form."""
    parts: list[str] = []
    at = 0
    for arguments in ARGUMENTS[:count]:
        name = turn.find(NAME, at)
        value = turn.find(arguments, name)
        if name < 0 or value < 0:
            return None
        parts += [turn[at:name], turn[name + len(NAME) : value]]
        at = value + len(arguments)
    return [*parts[:3], turn[at:]] if count == 2 else [*parts, turn[at:]]


def _calls(form: ToolFormat, tools: Sequence[Json], single: bool) -> Json:
    """Return the format of one call or several."""
    if single:
        tags = [_tag(form, tool, form.opening, form.closing) for tool in tools]
        return {"type": "tags_with_separator", "tags": tags, "separator": "",
                "at_least_one": True, "stop_after_first": True}  # fmt: skip
    several = {
        "type": "tags_with_separator",
        "tags": [_tag(form, tool) for tool in tools],
        "separator": form.separator,
        "at_least_one": True,
        "stop_after_first": False,
    }
    return _sequence(_text(form.opening), several, _text(form.closing))


def _text_and_calls(form: ToolFormat, tools: Sequence[Json], single: bool) -> Json:
    """Return the format of text with calls of these tools: at most one if `single`."""
    opening = form.opening + form.begin
    return {
        "type": "triggered_tags",
        # Up to the end of its line: the text after that belongs to the call.
        "triggers": [opening.partition("\n")[0] or opening],
        "tags": [_tag(form, tool, form.opening, form.closing) for tool in tools],
        "at_least_one": False,
        "stop_after_first": single,
    }


def _spaced(tool: Json, whitespace: Json) -> Json:
    function = tool["function"]
    schema = with_whitespace(function.get("parameters") or {"type": "object"}, whitespace)
    return {**tool, "function": {**function, "parameters": schema}}


def _tag(form: ToolFormat, tool: Json, opening: str = "", closing: str = "") -> Json:
    function = tool["function"]
    schema = function.get("parameters") or {"type": "object"}
    return {
        "type": "tag",
        "begin": f"{opening}{form.begin}{function['name']}{form.middle}",
        "content": {"type": "json_schema", "json_schema": schema},
        "end": form.end + closing,
    }


def _format_of(content: Grammar) -> Json:
    """Return the format of turns without a call. Raises UnsupportedField if it has none."""
    if (form := format_of(content)) is not None:
        return form
    raise UnsupportedField(
        f"a grammar of kind {content.kind} does not go with tools: send tool_choice 'none', or "
        "a JSON schema",
        param="structured_outputs",
    )


def _text(value: str) -> Json:
    return {"type": "const_string", "value": value}


def _sequence(*elements: Json) -> Json:
    parts = [element for element in elements if element.get("value") != ""]
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": parts}
