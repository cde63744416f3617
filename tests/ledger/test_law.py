"""The law: whatever happens in a conversation, a prompt appends or a break is recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.ledger import Ledger
from lockstep.render import Renderer
from lockstep.tokens.errors import PrefixBreak
from tests.ledger.rollouts import TOOLS, completion, raw_twin, turn_bytes

TEXT = st.one_of(
    st.sampled_from(["Hi.", "1 + 2?", "\n", " x ", "<think>", "</think>", "<|im_end|>", "é🙂"]),
    st.text(max_size=12),
)
ANSWER = st.sampled_from(
    [
        "3<|im_end|>",
        "<think>\nHm.\n</think>\n\n3<|im_end|>",
        "<think>\n\n</think>\n\n3<|im_end|>",
        "<think>\nopen<|im_end|>",
        '<tool_call>\n{"name": "calc", "arguments": {"sum": "1"}}\n</tool_call><|im_end|>',
        '<think>a</think><tool_call>\n{"name": "calc"}\n</tool_call>\n<tool_call>\n{<|im_end|>',
        "3<|im_end|>\nafter the close",
        "3<|endoftext|>",
        "",
    ]
)
TURN = st.fixed_dictionaries(
    {
        "answer": st.one_of(ANSWER, TEXT.map(lambda text: f"{text}<|im_end|>")),
        "cut": st.one_of(st.none(), st.integers(0, 20)),
        "end": st.sampled_from(["length", "abort", "stop"]),
        "continue": st.booleans(),
        "next": st.lists(
            st.tuples(st.sampled_from(["user", "user", "tool", "system"]), TEXT),
            min_size=1,
            max_size=3,
        ),
        "edit": st.sampled_from(
            ["", "", "", "reasoning", "strip", "answer", "question", "tools", "drop", "insert"]
        ),
    }
)


def play(renderer: Renderer, breaks: Any, turns: list[dict[str, Any]]) -> None:
    ledger = Ledger(renderer, breaks=breaks)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "1 + 2?"}]
    tools: Any = TOOLS
    plan = ledger.plan(messages, tools)
    for turn in turns:
        ids = renderer.encode(turn["answer"])
        finish = "stop"
        if turn["cut"] is not None:
            ids, finish = ids[: turn["cut"]], turn["end"]
        parsed = renderer.parse([*plan.partial, *ids], tools, prompt_ids=plan.prompt_ids)
        node = ledger.commit(
            plan, completion(plan.prompt_ids, ids, finish=finish), parsed.message()
        )
        if finish == "abort" and turn["continue"]:
            plan = ledger.continue_(node)
            assert plan.prompt_ids == node.ids().tolist()
            continue
        messages = [*messages, parsed.message()]
        messages += [{"role": role, "content": text} for role, text in turn["next"]]
        messages, tools = edited(messages, tools, turn["edit"])
        before = sum(ledger.break_counts.values())
        try:
            plan = ledger.plan(messages, tools)
        except PrefixBreak:
            assert breaks == "strict"
            assert sum(ledger.break_counts.values()) == before + 1
            break
        # Turns are planned, parsed and stored on either form of the ids.
        listed, plan = plan, raw_twin(ledger, plan, messages, tools)
        for text in ("3<|im_end|>", "<think>\nHm.\n</think>\n\n3", "Hm.</think>3"):
            ids = renderer.encode(text)
            assert renderer.parse(ids, tools, prompt_ids=plan.prompt_ids) == renderer.parse(
                ids, tools, prompt_ids=listed.prompt_ids
            )
        if plan.bridged:
            assert plan.parent is not None
            stored = plan.parent.ids().tolist()
            assert plan.prompt_ids[: len(stored)] == stored
            assert len(plan.prompt_ids) > len(stored)
        elif any(message["role"] == "assistant" for message in messages):
            assert plan.cause is not None
            assert plan.breaks[-1] == plan.cause
            assert ledger.break_counts[plan.cause] > 0
        if turn["edit"] in ("", "reasoning") and renderer.thinking == "keep":
            assert plan.bridged, (turn, plan.cause)
    sampled = sum(len(node.sampled) for node in ledger.nodes)
    samples = ledger.samples(train_aborted=True)
    assert all(sum(sample.sampled_mask) <= sampled for sample in samples)
    turns = [turn_bytes(ledger, node) for node in ledger.nodes]
    assert Ledger.from_turns(turns, [], renderer).samples(train_aborted=True) == samples


def edited(messages: list[dict[str, Any]], tools: Any, edit: str) -> tuple[list[Any], Any]:
    """What clients do to a history before they send it back."""
    assistants = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    changed = [dict(message) for message in messages]
    if edit == "reasoning":
        for at in assistants:
            changed[at].pop("reasoning_content", None)
    elif edit == "strip":
        for at in assistants:
            changed[at]["content"] = changed[at]["content"].strip()
    elif edit == "answer":
        changed[assistants[0]]["content"] += "!"
    elif edit == "question":
        changed[0]["content"] += "!"
    elif edit == "drop":
        del changed[assistants[-1]]
    elif edit == "insert":
        changed.insert(assistants[0], {"role": "assistant", "content": "Inserted."})
    elif edit == "tools":
        tools = None if tools else TOOLS
    return changed, tools


SLOW = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow)


@pytest.mark.failure_mode("F02")
@pytest.mark.failure_mode("F21")
@given(turns=st.lists(TURN, min_size=1, max_size=5), breaks=st.sampled_from(["strict", "fork"]))
@settings(max_examples=250, deadline=None, suppress_health_check=SLOW)
def test_a_prompt_appends_or_a_break_is_recorded(
    renderer: Renderer, turns: list[dict[str, Any]], breaks: str
) -> None:
    play(renderer, breaks, turns)


@pytest.mark.failure_mode("F20")
@given(turns=st.lists(TURN, min_size=1, max_size=4), breaks=st.sampled_from(["strict", "fork"]))
@settings(max_examples=120, deadline=None, suppress_health_check=SLOW)
def test_the_law_holds_where_the_template_drops_thinking(
    template_renderer: Renderer, turns: list[dict[str, Any]], breaks: str
) -> None:
    play(template_renderer, breaks, turns)


@pytest.mark.parametrize("name", ["qwen3", "llama3_2"])
def test_the_law_holds_on_real_tokenizers(name: str, real_tokenizer: Callable[[str], Path]) -> None:
    renderer = Renderer.load(real_tokenizer(name))

    @given(turns=st.lists(TURN, min_size=1, max_size=4))
    @settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
    def law(turns: list[dict[str, Any]]) -> None:
        play(renderer, "fork", turns)

    law()
