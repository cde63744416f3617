"""A session never loses a token, and says so when it cannot append."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from lockstep.ledger import Ledger, Node
from lockstep.render import Renderer
from lockstep.tokens import RoutedExperts, Sample, Shaping, Support, TrainedSpan
from lockstep.tokens.errors import (
    BadExperts,
    BadRequest,
    BadTokenId,
    Conflict,
    Misaligned,
    PrefixBreak,
)
from tests.ledger.rollouts import TOOLS, completion, finish_turn, say, turn_bytes

CALL = '<tool_call>\n{"name": "calc", "arguments": {"sum": "1 + 2"}}\n</tool_call><|im_end|>'
THOUGHT = "<think>\nOne and two.\n</think>\n\n3<|im_end|>"


def user(text: str = "1 + 2?") -> dict[str, Any]:
    return {"role": "user", "content": text}


def rows(total: int, start: int = 0) -> RoutedExperts:
    ids = np.arange(start * 4, (total - 1) * 4, dtype=np.int64).astype(np.uint8)
    return RoutedExperts(ids.tobytes(), (total - 1 - start, 2, 2), "uint8", start)


class SdkMessage(BaseModel):
    role: str
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    refusal: str | None = None


def test_three_turns_with_a_tool_are_one_sample(renderer: Renderer) -> None:
    ledger = Ledger(renderer)
    messages: list[Any] = [{"role": "system", "content": "Calculate."}, user()]
    sampled: list[int] = []
    _, node, message = say(ledger, messages, CALL, tools=TOOLS)
    sampled += node.sampled
    messages.append(
        {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
    )
    plan, node, _ = say(ledger, messages, THOUGHT, tools=TOOLS)
    sampled += node.sampled
    assert plan.bridged
    messages.append(user("And 2 + 2?"))
    _, node, _ = say(ledger, messages, "4<|im_end|>", tools=TOOLS, version="2", worker="w1")
    sampled += node.sampled

    (sample,) = ledger.samples()
    assert sample.token_ids == node.ids().tolist()
    mask = sample.sampled_mask
    assert [token for token, on in zip(sample.token_ids, mask, strict=True) if on] == sampled
    assert all(on or value == 0.0 for on, value in zip(mask, sample.logprobs, strict=True))
    assert [span.version for span in sample.versions] == ["1", "1", "2"]
    assert sample.workers == ("w0", "w1")
    assert (sample.breaks, sample.aborts) == ((), 0)
    assert not ledger.break_counts


@pytest.mark.failure_mode("F01")
@pytest.mark.parametrize("spelling", ["dict", "nones", "pydantic", "no reasoning", "parts"])
def test_one_history_in_any_spelling_is_bridged(renderer: Renderer, spelling: str) -> None:
    ledger = Ledger(renderer)
    messages: list[Any] = [user()]
    _, node, _ = say(ledger, messages, THOUGHT)
    messages.append(user("And?"))
    spelled: dict[str, Any] = {
        "dict": lambda m: m,
        "nones": lambda m: {**m, "tool_calls": None, "name": None, "refusal": None},
        "pydantic": lambda m: SdkMessage(**m),
        "no reasoning": lambda m: {k: v for k, v in m.items() if k != "reasoning_content"},
        "parts": lambda m: {**m, "content": [{"type": "text", "text": m["content"]}]},
    }
    plan = ledger.plan([spelled[spelling](message) for message in messages])
    assert plan.parent is node
    assert plan.prompt_ids[: node.end] == node.ids().tolist()


@pytest.mark.failure_mode("F02")
@pytest.mark.parametrize("where", ["answer", "question", "system"])
def test_an_edited_history_breaks_and_is_counted_and_logged_once(
    renderer: Renderer, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    messages: list[Any] = [{"role": "system", "content": "Calculate."}, user()]
    strict, fork = Ledger(renderer), Ledger(renderer, breaks="fork")
    for ledger in (strict, fork):
        history = messages[:]
        say(ledger, history, "3<|im_end|>")
    at = {"system": 0, "question": 1, "answer": 2}[where]
    history[at] = {**history[at], "content": "Something else."}
    history.append(user("And?"))

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with pytest.raises(PrefixBreak) as caught:
                strict.plan(history)
            assert caught.value.cause == "edited_history"
    assert strict.break_counts == {"edited_history": 1}
    assert len(caplog.records) == 1
    assert len(strict.nodes) == 1

    plan = fork.plan(history)
    assert (plan.cause, plan.bridged) == ("edited_history", False)
    assert plan.prompt_ids == renderer.render(history)
    finish_turn(fork, plan, history, "5<|im_end|>")
    first, second = fork.samples()
    assert (first.breaks, second.breaks) == ((), ("edited_history",))
    assert sum(second.sampled_mask) == len(renderer.encode("5<|im_end|>"))

    history.append(user("More?"))
    plan = fork.plan(history)
    assert plan.bridged
    assert plan.breaks == ("edited_history",)


@pytest.mark.failure_mode("F02")
def test_changed_tools_break_with_their_own_cause(renderer: Renderer) -> None:
    ledger = Ledger(renderer)
    messages: list[Any] = [user()]
    say(ledger, messages, "3<|im_end|>", tools=TOOLS)
    messages.append(user("And?"))
    with pytest.raises(PrefixBreak) as caught:
        ledger.plan(messages)
    assert caught.value.cause == "tools_changed"
    assert ledger.plan(messages, TOOLS).bridged


def test_another_question_after_the_same_history_is_a_branch_and_no_break(
    renderer: Renderer,
) -> None:
    ledger = Ledger(renderer)
    messages: list[Any] = [user()]
    say(ledger, messages, "3<|im_end|>")
    for text in ("And?", "Or?"):
        plan, _, _ = say(ledger, [*messages, user(text)], "4<|im_end|>")
        assert plan.parent is ledger.nodes[0]
    assert len(ledger.samples()) == 2
    assert not ledger.break_counts


def test_a_second_conversation_is_a_root_of_its_own(renderer: Renderer) -> None:
    ledger = Ledger(renderer)
    examples = [user("2?"), {"role": "assistant", "content": "Two."}]
    for text in ("3?", "4?"):
        plan, _, _ = say(ledger, [*examples, user(text)], "So.<|im_end|>")
        assert (plan.cause, plan.parent) == (None, None)
    say(ledger, [user("Hello.")], "Hi.<|im_end|>")
    assert len(ledger.roots) == 3
    assert not ledger.break_counts


@pytest.mark.failure_mode("F20")
def test_thinking_is_kept_unless_the_template_is_followed(
    renderer: Renderer, template_renderer: Renderer
) -> None:
    for which, cause in ((renderer, None), (template_renderer, "thinking_dropped")):
        ledger = Ledger(which, breaks="fork")
        messages: list[Any] = [user()]
        say(ledger, messages, THOUGHT)
        plan = ledger.plan([*messages, user("And?")])
        assert plan.cause == cause
        assert ("One and two." in which.decode(plan.prompt_ids)) is (cause is None)
    assert ledger.break_counts == {"thinking_dropped": 1}
    ledger.breaks = "strict"
    with pytest.raises(PrefixBreak, match="drops thinking"):
        ledger.plan([*messages, user("And?")])


@pytest.mark.failure_mode("F20")
@pytest.mark.parametrize("sends_back", [True, False])
def test_thinking_within_a_tool_cycle_is_kept_by_the_template_too(
    template_renderer: Renderer, sends_back: bool
) -> None:
    ledger = Ledger(template_renderer)
    messages: list[Any] = [user()]
    _, node, message = say(ledger, messages, f"<think>\nHm.\n</think>\n\n{CALL}", tools=TOOLS)
    if not sends_back:
        del message["reasoning_content"]
    messages.append({"role": "tool", "content": "3"})
    plan = ledger.plan(messages, TOOLS)
    assert plan.parent is node
    assert "Hm." in template_renderer.decode(plan.prompt_ids)


@pytest.mark.failure_mode("F20")
def test_without_thinking_the_template_is_followed_and_nothing_breaks(
    template_renderer: Renderer,
) -> None:
    ledger = Ledger(template_renderer)
    messages: list[Any] = [user()]
    say(ledger, messages, "3<|im_end|>")
    messages.append(user("And?"))
    plan = ledger.plan(messages)
    assert plan.bridged
    assert plan.prompt_ids == template_renderer.render(messages)


@pytest.mark.failure_mode("F21")
@pytest.mark.parametrize("cut", ["The answer is", "<think>\nLet me see", ""])
def test_a_turn_cut_by_length_is_closed_by_tokens_that_nobody_sampled(
    renderer: Renderer, cut: str
) -> None:
    ledger = Ledger(renderer)
    messages: list[Any] = [user()]
    _, node, _ = say(ledger, messages, cut, finish="length")
    messages.append(user("Go on."))
    plan, _, _ = say(ledger, messages, "3<|im_end|>")
    assert plan.prompt_ids[: node.end] == node.ids().tolist()
    closed = renderer.decode(plan.prompt_ids[node.end :])
    expected = "</think><|im_end|>" if "<think>" in cut else "<|im_end|>"
    assert closed.startswith(f"{expected}\n<|im_start|>user")
    (sample,) = ledger.samples()
    assert sum(sample.sampled_mask) == len(node.sampled) + len(renderer.encode("3<|im_end|>"))
    assert not any(sample.sampled_mask[node.end : len(plan.prompt_ids)])


@pytest.mark.failure_mode("F21")
def test_tokens_after_the_close_are_not_cut_away(renderer: Renderer) -> None:
    ledger = Ledger(renderer)
    messages: list[Any] = [user()]
    _, node, _ = say(ledger, messages, "3<|im_end|>\nand more", finish="length")
    plan = ledger.plan([*messages, user("Go on.")])
    assert plan.prompt_ids[: node.end] == node.ids().tolist()
    assert renderer.decode(plan.prompt_ids[node.end :]).startswith("<|im_end|>\n<|im_start|>user")


@pytest.mark.failure_mode("F12")
def test_an_aborted_turn_is_kept_and_not_trained_on(renderer: Renderer) -> None:
    ledger = Ledger(renderer)
    _, node, _ = say(ledger, [user()], "It is", finish="abort")
    (sample,) = ledger.samples()
    assert sample.aborts == 1
    assert not any(sample.sampled_mask)
    assert sample.token_ids == node.ids().tolist()
    (sample,) = ledger.samples(train_aborted=True)
    assert sum(sample.sampled_mask) == len(node.sampled)


@pytest.mark.failure_mode("F12")
def test_an_aborted_turn_goes_on_token_for_token(renderer: Renderer) -> None:
    ledger = Ledger(renderer)
    messages: list[Any] = [user()]
    plan, node, _ = say(ledger, messages, "It i", finish="abort")
    messages.pop()
    for text, finish, version in (("s th", "abort", "1"), ("ree.<|im_end|>", "stop", "2")):
        plan = ledger.continue_(node)
        assert plan.prompt_ids == node.ids().tolist()
        _, node, message = finish_turn(ledger, plan, [], text, finish=finish, version=version)
    assert message["content"] == "It is three."
    (sample,) = ledger.samples()
    assert sample.aborts == 0
    assert [span.version for span in sample.versions] == ["1", "1", "2"]
    ids = renderer.encode("It i") + renderer.encode("s th") + renderer.encode("ree.<|im_end|>")
    assert sample.token_ids[-len(ids) :] == ids
    assert sum(sample.sampled_mask) == len(ids)

    messages += [message, user("And?")]
    plan = ledger.plan(messages)
    assert plan.parent is node
    assert plan.prompt_ids[: node.end] == node.ids().tolist()
    assert [each.role for each in node.messages()] == ["user", "assistant"]
    with pytest.raises(Conflict, match="only 'abort' continues"):
        ledger.continue_(node)


@pytest.mark.failure_mode("F16")
@pytest.mark.failure_mode("F53")
@pytest.mark.parametrize("field", ["logprob_mode", "temperature", "adapter"])
def test_a_branch_that_mixes_what_cannot_be_compared_is_split(
    renderer: Renderer, field: str
) -> None:
    ledger = Ledger(renderer)
    values: dict[str, Any] = {"logprob_mode": "processed", "temperature": 0.7, "adapter": "a"}
    other = {field: values[field]}
    messages: list[Any] = [user()]
    nodes = []
    for text, options in (("3", {}), ("4", other), ("5", {})):
        _, node, _ = say(ledger, messages, f"{text}<|im_end|>", **options)
        nodes.append(node)
        messages.append(user("And?"))
    clean = [user("Another conversation.")]
    say(ledger, clean, "6<|im_end|>")

    usual, odd, last = ledger.samples()
    assert usual.split == odd.split == (field,)
    assert last.split == ()
    assert getattr(odd, field) == values[field] != getattr(usual, field)
    assert usual.token_ids == nodes[2].ids().tolist()
    assert odd.token_ids == nodes[1].ids().tolist()
    trained = [trained_positions(sample) for sample in (usual, odd)]
    assert trained[0] == positions(nodes[0], nodes[2])
    assert trained[1] == positions(nodes[1])
    with pytest.raises(Conflict, match=field):
        ledger.sample(nodes[2])


@pytest.mark.failure_mode("F55")
def test_a_turn_that_branches_share_is_trained_once(renderer: Renderer) -> None:
    ledger = Ledger(renderer)
    messages: list[Any] = [user()]
    _, shared, _ = say(ledger, messages, "3<|im_end|>")
    ends = [
        say(ledger, [*messages, user(text)], "4<|im_end|>")[1] for text in ("And?", "Or?", "No?")
    ]
    first, second, third = ledger.samples()
    assert trained_positions(first) == positions(shared, ends[0])
    assert first.trained_in == ()
    for sample, end in ((second, ends[1]), (third, ends[2])):
        assert trained_positions(sample) == positions(end)
        assert sample.trained_in == (TrainedSpan(0, shared.sampled_start, shared.end),)
        assert sample.token_ids == end.ids().tolist()
    everything = ledger.samples(dedupe=False)
    assert [trained_positions(sample) for sample in everything] == [
        positions(shared, end) for end in ends
    ]
    assert [sample.trained_in for sample in everything] == [(), second.trained_in, third.trained_in]
    assert [Sample.from_json(sample.to_json()) for sample in everything] == everything


@pytest.mark.failure_mode("F55")
def test_an_inner_part_that_is_trained_already_is_not_given_twice(renderer: Renderer) -> None:
    ledger = Ledger(renderer)
    messages: list[Any] = [user()]
    say(ledger, messages, "3<|im_end|>", temperature=0.5)
    for text in ("And?", "Or?"):
        say(ledger, [*messages, user(text)], "4<|im_end|>")
    assert [sample.temperature for sample in ledger.samples()] == [0.5, 1.0, 1.0]
    assert len(ledger.samples(dedupe=False)) == 4


@pytest.mark.failure_mode("F55")
def test_an_aborted_turn_is_trained_in_the_branch_that_continues_it(renderer: Renderer) -> None:
    ledger = Ledger(renderer)
    messages: list[Any] = [user()]
    _, cut, _ = say(ledger, messages, "It i", finish="abort")
    say(ledger, [*messages, user("Go on.")], "4<|im_end|>")
    _, rest, _ = finish_turn(ledger, ledger.continue_(cut), [], "s three.<|im_end|>")
    resumed, left = ledger.samples()
    assert not set(trained_positions(left)) & set(positions(cut))
    assert trained_positions(resumed) == positions(cut, rest)
    assert resumed.trained_in == ()


@pytest.mark.failure_mode("F56")
def test_a_turn_of_ids_is_found_by_ids_only(renderer: Renderer) -> None:
    ledger = Ledger(renderer)
    prompt, sampled = [5, 6, 7], [8, 9]
    unread = {"role": "assistant", "content": ""}
    node = ledger.commit(ledger.plan_ids(prompt), completion(prompt, sampled), unread)
    with pytest.raises(PrefixBreak):
        ledger.plan([unread, user()])
    for more in ([], [10]):
        assert ledger.plan_ids([*prompt, *sampled, *more]).parent is node
    again = ledger.plan_ids(prompt)
    assert (again.parent, again.cause) == (None, None)
    ledger.commit(again, completion(prompt, [11]), unread)
    assert ledger.nodes[1].prompt is node.prompt
    with pytest.raises(PrefixBreak):
        ledger.plan_ids([*prompt, 12])
    with pytest.raises(BadTokenId):
        ledger.plan_ids([2**40])
    turns = [turn_bytes(ledger, each) for each in ledger.nodes]
    restored = Ledger.from_turns(turns, [], renderer)
    assert restored.plan_ids([*prompt, *sampled, 10]).parent is restored.nodes[0]


def positions(*nodes: Node) -> list[int]:
    return [at for node in nodes for at in range(node.sampled_start, node.end)]


def trained_positions(sample: Sample) -> list[int]:
    return [at for at, trained in enumerate(sample.sampled_mask) if trained]


@pytest.mark.failure_mode("F38")
def test_routed_experts_are_joined_over_turns_and_trimmed_once(renderer: Renderer) -> None:
    ledger = Ledger(renderer)
    messages: list[Any] = [user()]
    ids = renderer.encode("3<|im_end|>")
    plan = ledger.plan(messages)
    total = len(plan.prompt_ids) + len(ids)
    whole = completion(plan.prompt_ids, ids, experts=rows(total))
    ledger.commit(plan, whole, {"role": "assistant", "content": "3"})
    messages += [{"role": "assistant", "content": "3"}, user("And?")]
    for start in (0, total - 1):
        plan = ledger.plan(messages)
        end = len(plan.prompt_ids) + len(ids)
        ledger.commit(
            plan,
            completion(plan.prompt_ids, ids, experts=rows(end, start)),
            {"role": "assistant", "content": "3"},
        )
    for sample in ledger.samples():
        assert sample.experts is not None
        assert sample.experts.numpy().tobytes() == rows(end).numpy().tobytes()


@pytest.mark.failure_mode("F100")
def test_supports_reach_the_samples_of_their_turns(renderer: Renderer) -> None:
    """The second turn is truncated without a recorded support, the third is not truncated."""
    ledger = Ledger(renderer)
    messages: list[Any] = [user()]
    ids = renderer.encode("3<|im_end|>")
    sets = [[token, token + 1] for token in ids]
    truncated = Shaping(top_p=0.9)
    turns: list[dict[str, Any]] = [
        {"shaping": truncated, "support": Support.of_ids(sets, 200_000)},
        {"shaping": truncated},
        {},
    ]
    for at, more in enumerate(turns):
        plan = ledger.plan(messages)
        reply = {"role": "assistant", "content": "3"}
        ledger.commit(plan, completion(plan.prompt_ids, ids, **more), reply)
        messages += [reply, user(f"And {at}?")]
        (sample,) = ledger.samples()
        assert sample.support is not None
        first = ledger.nodes[0]
        assert sample.support.slice(first.sampled_start, first.end).lists() == sets
        recorded = np.flatnonzero(sample.support.recorded()).tolist()
        assert recorded == positions(first)
        assert sample.support_absent is (at > 0)
        assert Sample.from_json(sample.to_json()) == sample
    stored = [turn_bytes(ledger, node) for node in ledger.nodes]
    assert Ledger.from_turns(stored, [], renderer).samples() == ledger.samples()


@pytest.mark.failure_mode("F38")
@pytest.mark.parametrize("bad", ["gap", "absent", "layers"])
def test_bad_routed_experts_fail_the_turn_and_nothing_is_stored(
    renderer: Renderer, bad: str
) -> None:
    ledger = Ledger(renderer)
    messages: list[Any] = [user()]
    ids = renderer.encode("3<|im_end|>")
    reply = {"role": "assistant", "content": "3"}
    plan = ledger.plan(messages)
    total = len(plan.prompt_ids) + len(ids)
    ledger.commit(plan, completion(plan.prompt_ids, ids, experts=rows(total)), reply)
    plan = ledger.plan([*messages, reply, user("And?")])
    end = len(plan.prompt_ids) + len(ids)
    experts = {
        "gap": rows(end, total + 1),
        "absent": None,
        "layers": RoutedExperts(bytes((end - 1) * 6), (end - 1, 3, 2), "uint8"),
    }[bad]
    before = [turn_bytes(ledger, node) for node in ledger.nodes]
    with pytest.raises(BadExperts):
        ledger.commit(plan, completion(plan.prompt_ids, ids, experts=experts), reply)
    assert [turn_bytes(ledger, node) for node in ledger.nodes] == before
    assert not ledger.nodes[0].children


def test_a_completion_of_another_prompt_is_refused(renderer: Renderer) -> None:
    ledger = Ledger(renderer)
    plan = ledger.plan([user()])
    other = [*plan.prompt_ids[:-1], 0]
    with pytest.raises(Misaligned, match=f"position {len(other) - 1}"):
        ledger.commit(plan, completion(other, [1]), {"role": "assistant", "content": "x"})
    with pytest.raises(BadRequest, match=r"message\.role is 'user'"):
        ledger.commit(plan, completion(plan.prompt_ids, [1]), user())
    assert not ledger.nodes


def test_a_turn_of_another_session_is_refused(renderer: Renderer) -> None:
    ours, theirs = Ledger(renderer), Ledger(renderer)
    messages: list[Any] = [user()]
    say(theirs, messages, "3<|im_end|>")
    plan = theirs.plan([*messages, user("And?")])
    sampled = completion(plan.prompt_ids, [1])
    with pytest.raises(Conflict, match="not of this session"):
        ours.commit(plan, sampled, {"role": "assistant", "content": "x"})


def test_nothing_new_to_ask_is_an_error(renderer: Renderer) -> None:
    ledger = Ledger(renderer)
    messages: list[Any] = [user()]
    say(ledger, messages, "3<|im_end|>")
    with pytest.raises(BadRequest, match="add nothing new"):
        ledger.plan(messages)


def test_answers_to_one_request_share_what_asked_them(renderer: Renderer) -> None:
    ledger = Ledger(renderer)
    plan = ledger.plan([user("word " * 2000)])
    finish_turn(ledger, plan, [], "3<|im_end|>")
    first = ledger.nbytes
    for text in ("4<|im_end|>", "5<|im_end|>"):
        finish_turn(ledger, plan, [], text)
    one, two, three = ledger.nodes
    assert one.prompt is two.prompt is three.prompt
    assert one.new_messages is two.new_messages is three.new_messages
    assert first > 4 * len(one.prompt)
    assert ledger.nbytes - first < 2 * 2000
    assert len(ledger.samples()) == 3


async def test_planning_off_the_loop_gives_the_same_plan(renderer: Renderer) -> None:
    ledger = Ledger(renderer)
    messages: list[Any] = [user()]
    assert await ledger.plan_async(messages) == ledger.plan(messages)
    say(ledger, messages, "3<|im_end|>")
    messages.append(user("And?"))
    assert await ledger.plan_async(messages) == ledger.plan(messages)
    with pytest.raises(PrefixBreak):
        await ledger.plan_async(messages, TOOLS)
