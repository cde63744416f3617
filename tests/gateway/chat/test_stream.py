"""The parts of a streamed message add up to the whole one, wherever they are cut."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.render import Renderer
from lockstep.render.streaming_parser import StreamingParser
from lockstep.tokens.errors import ContractError
from lockstep.tokens.stop_strings import StopMatcher

TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}]
CALL = '{"name": "calc", "arguments": {"x": "1"}}'
FRAGMENTS = [
    "Hello", " world", "\n", "\n\n", "  ", "<", ">", "<b>", "</", "think", "<think>", "</think>",
    "<tool_call>", "</tool_call>", CALL, f"<tool_call>\n{CALL}\n</tool_call>", '{"name":', "}",
    "é", "😀", "你好", ".", " ,", "<|im_end|>", "<|im_start|>",
]  # fmt: skip
OPENINGS = ["", "<think>\n", "<think>\n\n</think>\n\n"]


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer.load("tiny")


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.integers(0, 511)), max_size=12),
    opening=st.sampled_from(OPENINGS),
    with_tools=st.booleans(),
    verbatim=st.booleans(),
    seed=st.integers(0, 999),
)
@pytest.mark.failure_mode("F19")
@pytest.mark.failure_mode("F40")
def test_parts_add_up_to_the_whole(
    renderer: Renderer,
    parts: list[str | int],
    opening: str,
    with_tools: bool,
    verbatim: bool,
    seed: int,
) -> None:
    ids: list[int] = []
    for part in parts:
        ids += [part] if isinstance(part, int) else renderer.encode(part)
    prompt = renderer.render([{"role": "user", "content": "x"}]) + renderer.encode(opening)
    tools = TOOLS if with_tools else None
    whole = renderer.parse(ids, tools, prompt_ids=prompt, verbatim=verbatim)
    parser = StreamingParser(renderer, tools, prompt, verbatim=verbatim)
    content, reasoning, calls, at = "", "", [], 0
    cut = random.Random(seed)
    while at < len(ids):
        size = cut.randint(1, 3)
        part = parser.feed(ids[at : at + size])
        at += size
        content, reasoning = content + part.content, reasoning + part.reasoning
        calls += part.calls
    parsed, rest = parser.finish(ids)
    assert parsed == whole
    assert content + rest.content == whole.message()["content"]
    assert reasoning + rest.reasoning == (whole.reasoning or "")
    assert (*calls, *rest.calls) == whole.tool_calls


STOPS = ["world", "\n\n", "lo wo", "</tool_call>", "é😀", "<", "name"]


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    stop=st.sampled_from(STOPS),
    with_tools=st.booleans(),
    include=st.booleans(),
    verbatim=st.booleans(),
)
@pytest.mark.failure_mode("F66")
def test_text_ends_at_a_stop_string_and_nothing_of_it_is_streamed(
    renderer: Renderer,
    parts: list[str],
    stop: str,
    with_tools: bool,
    include: bool,
    verbatim: bool,
) -> None:
    matcher = StopMatcher([stop])
    ids: list[int] = []
    match = None
    text = "".join(parts).replace("<|im_end|>", "").replace("<|im_start|>", "")
    for token in renderer.encode(text):
        ids.append(token)
        if (match := matcher.feed(renderer.pieces.data(token))) is not None:
            break
    ended = None if match is None else stop
    prompt = renderer.render([{"role": "user", "content": "x"}])
    tools = TOOLS if with_tools else None
    options: dict[str, Any] = {"verbatim": verbatim}
    whole = renderer.parse(
        ids, tools, prompt_ids=prompt, stop=ended, include_stop=include, **options
    )
    parser = StreamingParser(renderer, tools, prompt, stops=[stop], include_stop=include, **options)
    streamed = [parser.feed([token]) for token in ids]
    parsed, rest = parser.finish(ids, ended)
    assert parsed == whole
    assert "".join(part.content for part in (*streamed, rest)) == whole.content
    assert "".join(part.reasoning for part in (*streamed, rest)) == (whole.reasoning or "")
    if verbatim:
        text = renderer.decode(ids)
        end = len(text) if ended is None else text.rindex(stop) + len(stop) * include
        assert whole.content == text[:end]
    elif ended is not None and not include and stop != "</tool_call>":
        assert stop not in whole.content


def test_text_flows_and_a_call_is_held_until_it_is_whole(renderer: Renderer) -> None:
    parser = StreamingParser(renderer, TOOLS, renderer.render([{"role": "user", "content": "x"}]))
    assert parser.feed(renderer.encode("Let me see")).content == "Let me see"
    opened = parser.feed(renderer.encode(f"<tool_call>\n{CALL}"))
    assert not opened
    closed = parser.feed(renderer.encode("\n</tool_call>"))
    assert [call.name for call in closed.calls] == ["calc"]


def test_streamed_text_cannot_be_taken_back(renderer: Renderer) -> None:
    parser = StreamingParser(renderer, None, renderer.render([{"role": "user", "content": "x"}]))
    parser.feed(renderer.encode("one"))
    with pytest.raises(ContractError, match="no beginning"):
        parser.finish(renderer.encode("two"))
