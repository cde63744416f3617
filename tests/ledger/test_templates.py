"""Chat templates that no family writes: bridged where they append, a cause where they do not."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from lockstep.ledger import Ledger
from lockstep.models import bundled
from lockstep.render import Renderer
from lockstep.tokens.errors import PrefixBreak
from tests.ledger.rollouts import TOOLS, say

BARE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
KEEPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = {"role": "user", "content": "1 + 2?"}
NEXT = {"role": "user", "content": "And?"}


def renderer_of(template: str | None, **options: Any) -> Renderer:
    """The bundled tokenizer with another template; None for a renamed copy of its own."""
    tokenizer = AutoTokenizer.from_pretrained(bundled("tiny"))
    tokenizer.chat_template = template or tokenizer.chat_template.replace("# Tools", "# My tools")
    made = Renderer(tokenizer, **options)
    assert made.family is None
    return made


@pytest.mark.parametrize(("finish", "cause"), [("stop", "no_bridge"), ("length", "truncated")])
def test_a_template_without_a_bridge_breaks_and_says_so(finish: str, cause: str) -> None:
    ledger = Ledger(renderer_of(BARE))
    messages: list[Any] = [USER]
    say(ledger, messages, "3<|im_end|>", finish=finish)
    with pytest.raises(PrefixBreak) as caught:
        ledger.plan([*messages, NEXT])
    assert caught.value.cause == cause
    assert ledger.break_counts == {cause: 1}


def test_a_template_without_a_bridge_goes_on_where_its_whole_render_appends() -> None:
    ledger = Ledger(renderer_of(BARE))
    messages: list[Any] = [USER]
    _, node, _ = say(ledger, messages, "3")
    plan = ledger.plan([*messages, NEXT])
    assert plan.parent is node
    assert ledger.renderer.decode(plan.prompt_ids[node.end :]) == "\nuser: And?\nassistant: "


@pytest.mark.failure_mode("F21")
@pytest.mark.parametrize(
    ("text", "closed"),
    [
        ("<think>\nLet me", "</think><|im_end|>"),
        ("<think>\nHm.\n</think>\n\nIt", "<|im_end|>"),
        ("It", "<|im_end|>"),
        ("3<|im_end|>", ""),
        ("3<|endoftext|>", "<|im_end|>"),
    ],
)
def test_the_template_bridge_closes_what_was_left_open(text: str, closed: str) -> None:
    renderer = renderer_of(None)
    ledger = Ledger(renderer)
    messages: list[Any] = [USER]
    _, node, _ = say(ledger, messages, text, finish="length")
    plan = ledger.plan([*messages, NEXT])
    assert plan.prompt_ids[: node.end] == node.ids().tolist()
    added = renderer.decode(plan.prompt_ids[node.end :])
    assert added == f"{closed}\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"


def test_the_template_bridge_is_what_a_family_writes(renderer: Renderer) -> None:
    other = renderer_of(None)
    call = '<tool_call>\n{"name": "calc", "arguments": {"sum": "1"}}\n</tool_call><|im_end|>'
    results = [{"role": "tool", "content": "é"}, {"role": "tool", "content": "4"}]
    for text, new in ((call, results), ("3<|im_end|>", [NEXT]), (call, [*results, NEXT])):
        ends = []
        for each in (renderer, other):
            ledger = Ledger(each)
            messages: list[Any] = [USER]
            _, node, _ = say(ledger, messages, text, tools=TOOLS)
            plan = ledger.plan([*messages, *new], TOOLS)
            ends.append(plan.prompt_ids[node.end :])
        assert ends[0] == ends[1]


@pytest.mark.failure_mode("F20")
@pytest.mark.parametrize("sends_back", [True, False])
def test_a_template_that_keeps_thinking_is_followed_without_a_break(sends_back: bool) -> None:
    renderer = renderer_of(KEEPS, thinking="template")
    ledger = Ledger(renderer)
    messages: list[Any] = [USER]
    _, node, message = say(ledger, messages, "<think>Hm.</think>3<|im_end|>")
    assert message["reasoning_content"] == "Hm."
    whole = renderer.render([*messages, NEXT])
    if not sends_back:
        del message["reasoning_content"]
    plan = ledger.plan([*messages, NEXT])
    assert plan.parent is node
    assert plan.prompt_ids == whole


@pytest.mark.failure_mode("F02")
def test_the_same_edit_under_another_question_is_a_break_again(renderer: Renderer) -> None:
    ledger = Ledger(renderer, breaks="fork")
    messages: list[Any] = [USER]
    say(ledger, messages, "3<|im_end|>")
    edit = {"role": "assistant", "content": "4"}
    for text in ("And?", "Or?"):
        question = {"role": "user", "content": text}
        plan, _, _ = say(ledger, [USER, edit, question], "5<|im_end|>")
        assert plan.breaks == ("edited_history",)
    assert ledger.break_counts == {"edited_history": 2}
