"""A turn that was cut is that turn when the agent continues from it, whole or in part."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.ledger import Ledger, Node
from lockstep.ledger.cut_turns import sampled_once
from lockstep.render import Renderer
from lockstep.tokens import Sample
from lockstep.tokens.errors import BadRequest
from tests.ledger.rollouts import TOOLS, completion, finish_turn, say, turn_bytes

pytestmark = pytest.mark.failure_mode("F98")
CALL = '<tool_call>\n{"name": "calc", "arguments": {"sum": "1 + 2"}}\n</tool_call>'
SECOND = '\n<tool_call>\n{"name": "calc", "arguments": {"sum": "3 + 4"}}\n</tool_call>'
TEXT = f"<think>\nOne and two.\n</think>\n\nI add them.\n{CALL}{SECOND}\n<tool_call>\n{{"
QUESTION: dict[str, Any] = {"role": "user", "content": "1 + 2?"}
AGAIN: dict[str, Any] = {"role": "user", "content": "Go on."}
BLANK: dict[str, Any] = {"role": "assistant", "content": ""}
THOUGHT = "One and two."


def call(sum: str = "1 + 2") -> dict[str, Any]:
    return {"type": "function", "function": {"name": "calc", "arguments": {"sum": sum}}}


def assistant(content: str = "", *calls: dict[str, Any], thought: str = "") -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = list(calls)
    return message


def cut(renderer: Renderer, text: str = TEXT) -> tuple[Ledger, Node]:
    ledger = Ledger(renderer, breaks="fork")
    _, node, _ = say(ledger, [QUESTION], text, finish="abort", tools=TOOLS, request_id="cut")
    return ledger, node


def go_on(ledger: Ledger, *messages: dict[str, Any]) -> tuple[Node, list[Sample]]:
    plan = ledger.plan([QUESTION, *messages], TOOLS)
    _, node, _ = finish_turn(ledger, plan, [], "3<|im_end|>", tools=TOOLS, request_id="next")
    return node, ledger.samples()


KEPT = {
    "thinking": (assistant(thought=THOUGHT), "<think>\nOne and two.\n</think>"),
    "text": (assistant("I add them.", thought=THOUGHT), TEXT.partition("\n<tool")[0]),
    "half of the text": (assistant("I add", thought=THOUGHT), TEXT.partition(" them")[0]),
    "text without thinking": (assistant("I add them."), TEXT.partition("\n<tool")[0]),
    "one call": (assistant("I add them.", call()), TEXT.partition(SECOND)[0]),
    "both calls": (
        assistant("I add them.", call(), call("3 + 4")),
        TEXT.partition("\n<tool_call>\n{{")[0],
    ),
}


@pytest.mark.parametrize("kept", KEPT)
def test_a_turn_is_trained_up_to_where_the_agent_continued(renderer: Renderer, kept: str) -> None:
    message, text = KEPT[kept]
    if kept == "both calls":
        text = TEXT.removesuffix("\n<tool_call>\n{")
    ledger, node = cut(renderer)
    new = {"role": "tool", "content": "3"} if message.get("tool_calls") else AGAIN
    last, (main, rest) = go_on(ledger, message, new)
    part = last.parent
    assert part is not None
    assert part.kept_of == node.index
    assert renderer.decode(part.sampled) == text
    assert last.ids()[: part.end] == node.ids()[: part.end]
    assert (main.kind, main.breaks, main.aborts) == ("main", (), 0)
    assert sum(main.sampled_mask) == len(part.sampled) + len(last.sampled)
    assert main.logprobs[part.sampled_start : part.end] == list(node.logprobs[: len(part.sampled)])
    assert main.versions[0].end - main.versions[0].start == len(part.sampled)
    assert (rest.kind, any(rest.sampled_mask)) == ("retry", False)
    assert str(len(part.sampled)) in (rest.evidence or "")
    (span,) = rest.trained_in
    assert (span.sample, span.end - span.start) == (0, len(part.sampled))
    assert not ledger.break_counts
    counts = sampled_once(ledger.nodes)
    assert sum(counts.values()) == len(node.sampled) + len(last.sampled)


def test_a_turn_that_was_kept_whole_is_that_turn(renderer: Renderer) -> None:
    ledger, node = cut(renderer, "Half an answ")
    last, (main,) = go_on(ledger, assistant("Half an answ"), AGAIN)
    assert last.parent is node
    assert sum(main.sampled_mask) == len(node.sampled) + len(last.sampled)
    assert not ledger.break_counts


@pytest.mark.parametrize(
    "messages",
    [[AGAIN], [BLANK, AGAIN], [BLANK, BLANK, AGAIN], [assistant("  \n"), AGAIN]],
    ids=["dropped", "blank", "two blanks", "spaces"],
)
def test_a_cut_turn_that_was_dropped_stays_masked(
    renderer: Renderer, messages: list[dict[str, Any]]
) -> None:
    ledger, node = cut(renderer)
    last, (main, rest) = go_on(ledger, *messages)
    assert last.parent is None
    assert (main.kind, sum(main.sampled_mask)) == ("main", len(last.sampled))
    assert (rest.kind, any(rest.sampled_mask)) == ("retry", False)
    assert "cut" in (rest.evidence or "")
    assert rest.token_ids == node.ids().tolist()
    assert not ledger.break_counts
    again = ledger.plan([QUESTION, *messages, assistant("3"), AGAIN], TOOLS)
    assert again.parent is last


def test_a_blank_message_after_the_kept_part_is_not_an_edit(renderer: Renderer) -> None:
    ledger, _ = cut(renderer)
    message = assistant("I add them.", thought=THOUGHT)
    last, _ = go_on(ledger, message, BLANK, AGAIN)
    assert not ledger.break_counts
    again = ledger.plan([QUESTION, message, BLANK, AGAIN, assistant("3"), AGAIN], TOOLS)
    assert again.parent is last


def test_a_history_that_ends_with_the_kept_part_opens_the_next_turn(renderer: Renderer) -> None:
    ledger, node = cut(renderer, "Half an answer")
    for message in (assistant("Half an"), assistant("Half an answer")):
        plan = ledger.plan([QUESTION, message], TOOLS)
        assert plan.parent is node
        text = renderer.decode(plan.prompt_ids)
        assert text.endswith(f"{message['content']}<|im_end|>\n<|im_start|>assistant\n")
    assert not ledger.break_counts


@pytest.mark.parametrize(
    "message",
    [
        assistant("I subtract them."),
        assistant("I add them.", call("5 + 6")),
        assistant("I add them. Yes."),
    ],
    ids=["other text", "another call", "more text"],
)
def test_another_message_in_the_place_of_a_cut_turn_is_an_edit(
    renderer: Renderer, message: dict[str, Any]
) -> None:
    ledger, _ = cut(renderer)
    go_on(ledger, message, AGAIN)
    assert ledger.break_counts == {"edited_history": 1}


def test_a_whole_turn_is_never_continued_in_part(renderer: Renderer) -> None:
    ledger = Ledger(renderer, breaks="fork")
    say(ledger, [QUESTION], "I add them.<|im_end|>", tools=TOOLS)
    go_on(ledger, assistant("I add"), AGAIN)
    assert ledger.break_counts == {"edited_history": 1}
    with pytest.raises(BadRequest, match="add nothing new"):
        ledger.plan([QUESTION, assistant("I add them.")], TOOLS)


def test_tokens_that_two_branches_continue_from_are_trained_once(renderer: Renderer) -> None:
    ledger, node = cut(renderer)
    go_on(ledger, assistant("I add them.", call()), {"role": "tool", "content": "3"})
    _, samples = go_on(ledger, assistant("I add"), AGAIN)
    trained = [
        at
        for sample in samples
        for at in range(node.sampled_start, min(node.end, len(sample.token_ids)))
        if sample.sampled_mask[at] and sample.token_ids[at] == node.ids()[at]
    ]
    assert len(trained) == len(set(trained))
    counts = sampled_once(ledger.nodes)
    assert sum(counts.values()) == len(node.sampled) + sum(
        len(each.sampled) for each in ledger.nodes if each.finish == "stop"
    )


def test_the_kept_part_is_stored_once_and_read_again(renderer: Renderer) -> None:
    ledger, node = cut(renderer)
    message = assistant("I add them.", call())
    result = {"role": "tool", "content": "3"}
    go_on(ledger, message, result)
    go_on(ledger, message, result)
    parts = [each for each in ledger.nodes if each.kept_of is not None]
    assert [each.kept_of for each in parts] == [node.index]
    rows = [turn_bytes(ledger, each) for each in ledger.nodes]
    again = Ledger.from_turns(rows, [], renderer)
    assert again.samples() == ledger.samples()
    assert [each.kept_of for each in again.nodes] == [each.kept_of for each in ledger.nodes]


def test_two_plans_of_one_continuation_share_the_kept_part(renderer: Renderer) -> None:
    ledger, _ = cut(renderer)
    history = [QUESTION, assistant("I add them.", call()), {"role": "tool", "content": "3"}]
    plans = [ledger.plan(history, TOOLS) for _ in range(2)]
    made: list[Any] = []
    for plan in plans:
        sampled = completion(list(plan.prompt_ids), renderer.encode("3<|im_end|>"))
        made += ledger.make_turns(plan, [(sampled, assistant("3"))], before=made)
    ledger.add_turns(made)
    assert sum(node.kept_of is not None for node in ledger.nodes) == 1
    assert ledger.nodes[2].parent is ledger.nodes[3].parent is ledger.nodes[1]


def test_the_replies_around_a_cut_are_one_turn_of_the_agent_too(renderer: Renderer) -> None:
    ledger, _ = cut(renderer, "<think>\nOne and two.\n</think>\n\nI a")
    plan = ledger.plan([QUESTION, assistant(thought=THOUGHT)], TOOLS)
    finish_turn(ledger, plan, [], f"<think>\nAgain.\n</think>\n\n{CALL}<|im_end|>", tools=TOOLS)
    result = {"role": "tool", "content": "3"}
    one = [assistant("", call(), thought=f"{THOUGHT}\nAgain.")]
    two = [assistant(thought=THOUGHT), assistant("", call(), thought="Again.")]
    for replies in (one, two):
        plan = ledger.plan([QUESTION, *replies, result], TOOLS)
        assert plan.parent is ledger.nodes[-1]
    assert not ledger.break_counts
