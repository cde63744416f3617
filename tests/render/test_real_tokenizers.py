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

CONVERSATIONS = 1000
FORMATS = {
    "qwen3": Format(thinking=True),
    "llama3_2": Format(many_calls=False),
    "deepseek_v3": Format(),
    "gemma3": Format(tools=False),
}


@pytest.fixture(scope="module", params=FORMATS)
def model(
    request: pytest.FixtureRequest, real_tokenizer: Callable[[str], Path]
) -> tuple[str, Path]:
    return request.param, real_tokenizer(request.param)


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
    model: tuple[str, Path], thinking: Any
) -> None:
    name, place = model
    renderer = Renderer.load(place, thinking=thinking)
    seen: Counter[str] = Counter()
    rng = random.Random(name)
    # Without thinking both ways are one, so that a few conversations will do for the second.
    alike = thinking == "template" and not FORMATS[name].thinking
    conversations = CONVERSATIONS // 10 if alike else CONVERSATIONS
    for _ in range(conversations):
        converse(renderer, FORMATS[name], rng, seen)
    assert seen["equal"] > conversations // 4
    if thinking == "keep":
        assert set(seen) <= {"equal", "appended"}
    elif FORMATS[name].thinking:
        assert seen["thinking_dropped"] > 0
