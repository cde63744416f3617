"""Tool calls of Mistral's models, read as they write them, whole and streamed; nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.render import Renderer
from lockstep.render.parsed_message import ParsedMessage
from lockstep.render.streaming_parser import StreamingParser

QUESTION = {"role": "user", "content": "Which?"}
LOOK = '{"name": "look_up", "arguments": {"word": "x"}'
NOPE = '{"name": "nope", "arguments": {}}'


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"word": {"type": "string"}}}
    return {
        "type": "function",
        "function": {"name": name, "description": "d", "parameters": parameters},
    }


TOOLS = [tool("look_up"), tool("\u00e9tat")]


@pytest.fixture(scope="module")
def mistral(real_tokenizer: Callable[[str], Path]) -> Renderer:
    return Renderer.load(real_tokenizer("mistral_nemo"))


def read(renderer: Renderer, text: str) -> ParsedMessage:
    """The message of a completion, which streams say alike, token by token."""
    ids = [*renderer.encode(text), *renderer.stop_token_ids]
    prompt_ids = renderer.render([QUESTION], TOOLS)
    message = renderer.parse(ids, TOOLS, prompt_ids=prompt_ids)
    stream = StreamingParser(renderer, TOOLS, prompt_ids)
    parts = [stream.feed([token]) for token in ids]
    ended, last = stream.finish(ids)
    assert ended == message
    assert "".join(part.content for part in (*parts, last)) == message.content
    assert tuple(call for part in (*parts, last) for call in part.calls) == message.tool_calls
    return message


def test_what_the_template_writes_of_calls_is_read_back(mistral: Renderer) -> None:
    calls = [
        {"id": f"abcdefgh{at}", "type": "function", "function": {"name": name, "arguments": value}}
        for at, (name, value) in enumerate(
            [("look_up", {"word": "a ]} b"}), ("\u00e9tat", {"word": "\u6d77"})]
        )
    ]
    reply = {"role": "assistant", "content": "", "tool_calls": calls}
    prompt = mistral.render([QUESTION], TOOLS)
    whole = mistral.render([QUESTION, reply], TOOLS, add_generation_prompt=False)
    message = read(mistral, mistral.decode(whole[len(prompt) : -1]))
    assert message.content == ""
    assert [(call.id, call.name, call.arguments) for call in message.tool_calls] == [
        ("abcdefgh0", "look_up", '{"word": "a ]} b"}'),
        ("abcdefgh1", "\u00e9tat", '{"word": "\u6d77"}'),
    ]


@pytest.mark.failure_mode("F54")
@pytest.mark.parametrize(
    ("text", "content", "problem", "calls"),
    [
        (f"Well. [TOOL_CALLS][{LOOK}}}] so", "Well.  so", None, 1),
        (f"[TOOL_CALLS][{LOOK}", f"[TOOL_CALLS][{LOOK}", "unclosed_block", 0),
        ("[TOOL_CALLS] look it up", "[TOOL_CALLS] look it up", "invalid_json", 0),
        ("[TOOL_CALLS][3]", "[TOOL_CALLS][3]", "malformed_structure", 0),
        (f"[TOOL_CALLS][{NOPE}, {LOOK}}}]", f"[TOOL_CALLS][{NOPE},", "unknown_tool", 1),
        (f"[TOOL_CALLS][{LOOK}}}, {NOPE}]", f"{NOPE}]", "unknown_tool", 1),
    ],
)
def test_what_is_no_call_stays_in_the_content(
    mistral: Renderer, text: str, content: str, problem: str | None, calls: int
) -> None:
    message = read(mistral, text)
    assert message.content == content
    assert (message.tool_parse_error or "").partition(":")[0] == (problem or "")
    assert len(message.tool_calls) == calls


def test_ids_that_a_model_repeats_do_not_name_two_calls(mistral: Renderer) -> None:
    twice = ", ".join([f'{LOOK}, "id": "abcdefgh0"}}'] * 2)
    first, second = read(mistral, f"[TOOL_CALLS][{twice}]").tool_calls
    assert first.id == "abcdefgh0"
    assert second.id != first.id
