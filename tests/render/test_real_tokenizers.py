"""On real tokenizers: bridged is what the template renders, wherever the template appends."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.ledger import Ledger
from lockstep.render import Renderer
from lockstep.tokens.errors import BadRequest
from tests import tokenizers
from tests.ledger.rollouts import (
    TOOLS,
    Format,
    assistant_message,
    completion,
    opening,
    raw_twin,
    reply,
    sampled_as,
)

CONVERSATIONS = 250
TABLE = Path(__file__).parents[2] / "docs" / "client.md"
BREAKS = {"chatglm3": "after `</s>`: its template closes a turn with the mark of the next one"}
"""Tokenizers whose conversations cannot go on, and why."""


@pytest.fixture(scope="module", params=tokenizers.CHAT)
def model(
    request: pytest.FixtureRequest,
    real_tokenizer: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Any]:
    """A name, and its tokenizer, loaded once."""
    place = real_tokenizer(request.param)
    if "auto_map" in (place / "tokenizer_config.json").read_text():
        place = tokenizers.without_own_code(place, tmp_path_factory.mktemp("own") / request.param)
    return request.param, Renderer.load(place).tokenizer


def format_of(renderer: Renderer) -> Format:
    """What the chat template writes out of what it is given."""
    question = {"role": "user", "content": "Question."}
    system = {"role": "system", "content": "Be brief."}
    answer = {"role": "assistant", "content": "Yes.", "reasoning_content": "Thought."}
    calls = [
        {"id": f"call0000{at}", "type": "function", "function": function}
        for at, function in enumerate([{"name": "calc", "arguments": {"sum": "value"}}] * 2)
    ]

    def writes(messages: list[Any], tools: Any, text: str, times: int = 1) -> bool:
        try:
            rendered = renderer.decode(
                renderer.render(messages, tools, add_generation_prompt=False)
            )
        except BadRequest:
            return False
        return rendered.count(text) >= times

    calling = {"role": "assistant", "content": "", "tool_calls": calls[:1]}
    return Format(
        system=writes([system, question], None, "Be brief."),
        tools=writes([question, calling], TOOLS, "value"),
        many_calls=writes([question, {**calling, "tool_calls": calls}], TOOLS, "value", 2),
        thinking=writes([question, answer], None, "Thought."),
    )


def converse(renderer: Renderer, can: Format, rng: random.Random, seen: Counter[str]) -> None:
    ledger = Ledger(renderer, breaks="fork")
    tools = TOOLS if can.tools and rng.random() < 0.6 else None
    messages: list[Any] = opening(rng, can)
    plan = ledger.plan(messages, tools)
    assert plan.prompt_ids == renderer.render(messages, tools)
    for _ in range(rng.randint(1, 4)):
        message = assistant_message(rng, can, tools)
        new = reply(rng, message)
        after = [] if "reasoning_content" in message or rng.random() < 0.3 else new
        ids = sampled_as(renderer, plan.prompt_ids, messages, message, after, tools)
        finish = "stop"
        if rng.random() < 0.1:
            ids, finish = ids[: rng.randrange(1, len(ids) + 1)], "length"
            message = renderer.parse(ids, prompt_ids=plan.prompt_ids).message()
            ends = [renderer.decode([end]) for end in renderer.stop_token_ids]
            assert not any(end in message["content"] for end in ends)
            new = reply(rng, message)
        sampled = completion(plan.prompt_ids, ids, finish=finish)
        node = ledger.commit(plan, sampled, message)
        messages += [message, *new]

        before = node.ids().tolist()
        full = renderer.render(messages, tools)
        plan = ledger.plan(messages, tools)
        raw = raw_twin(ledger, plan, messages, tools)
        assert renderer.parse(ids, tools, prompt_ids=raw.prompt_ids) == renderer.parse(
            ids, tools, prompt_ids=plan.prompt_ids
        )
        if full[: len(before)] == before:
            assert plan.prompt_ids == full
            assert plan.bridged
            seen["equal"] += 1
        elif plan.bridged:
            assert plan.prompt_ids[: len(before)] == before
            assert ends_like(full, plan.prompt_ids[len(before) :], renderer)
            seen["appended"] += 1
        else:
            assert plan.cause is not None
            assert plan.prompt_ids == full
            assert ledger.break_counts[plan.cause] > 0
            seen[plan.cause] += 1


def ends_like(full: list[int], extension: list[int], renderer: Renderer) -> bool:
    """Whether the extension, less the close of a cut turn, is how the full render ends."""
    closes = {*renderer.stop_token_ids, *renderer.encode("</think>")}
    while extension[0] in closes:
        extension = extension[1:]
    return full[-len(extension) :] == extension


@pytest.mark.failure_mode("F20")
@pytest.mark.parametrize("thinking", ["keep", "template"])
def test_bridged_prompt_is_the_full_render_or_a_break_is_recorded(
    model: tuple[str, Any], thinking: Any
) -> None:
    name, tokenizer = model
    renderer = Renderer(tokenizer, thinking=thinking)
    can = format_of(renderer)
    seen: Counter[str] = Counter()
    rng = random.Random(name)
    # Without thinking both ways are one, so that a few conversations will do for the second.
    alike = thinking == "template" and not can.thinking
    conversations = CONVERSATIONS // 10 if alike else CONVERSATIONS
    for _ in range(conversations):
        converse(renderer, can, rng, seen)
    if name in BREAKS:
        assert set(seen) <= {"equal", "no_bridge", "truncated"}
    elif thinking == "keep":
        assert set(seen) <= {"equal", "appended"}
    elif can.thinking:
        assert seen["thinking_dropped"] > 0
    if thinking == "keep":
        assert table_row(name, renderer, can) in TABLE.read_text().splitlines()


def table_row(name: str, renderer: Renderer, can: Format) -> str:
    """The row of docs/client.md about this tokenizer."""
    by = {"family": f"`renderers`: {renderer.family}", "template": "template", None: "nothing"}
    writes = {
        "system": can.system,
        "tool calls": can.tools and can.many_calls,
        "one tool call a turn": can.tools and not can.many_calls,
        "thinking": can.thinking,
    }
    written = ", ".join(what for what, is_so in writes.items() if is_so) or "user and assistant"
    return f"| {name} | {by[renderer.bridge]} | {written} | {BREAKS.get(name, 'none')} |"
