"""Every branch of a session has a kind, a parent and the evidence for both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from lockstep.ledger import Ledger, Node, Reply
from lockstep.ledger.branch_sample import left_out
from lockstep.ledger.lineage import Branch, find_branches
from lockstep.ledger.origin import Origin
from lockstep.render import Renderer
from lockstep.tokens import Sample
from lockstep.tokens.errors import BadRequest, PrefixBreak
from lockstep.tokens.lineage import KINDS
from tests.ledger.rollouts import TOOLS, completion, turn_bytes

CODEX = Origin(harness="codex", agent="root", window="root:0")
CHILD = Origin(harness="codex", agent="child", parent="root", window="child:0")
QWEN = Origin(harness="qwen-code")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Talk:
    """A session in which each turn has an origin."""

    def __init__(self, renderer: Renderer) -> None:
        self.ledger = Ledger(renderer, breaks="fork")
        self.requests = 0

    def turn(
        self,
        messages: list[Any],
        text: str,
        origin: Origin | None,
        *,
        tools: Any = TOOLS,
        calls: Sequence[dict[str, Any]] = (),
        request_id: str | None = None,
        **more: Any,
    ) -> list[Any]:
        """Says the text; the conversation with it."""
        self.requests += 1
        ledger = self.ledger
        plan = ledger.plan(messages, tools)
        ids = ledger.renderer.encode(text + "<|im_end|>")
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = list(calls)
        name = request_id or f"r{self.requests}"
        sampled = completion(list(plan.prompt_ids), ids, request_id=name, **more)
        ledger.commit(plan, sampled, Reply(message, origin=origin))
        return [*messages, message]

    def branches(self) -> dict[int, Branch]:
        return {branch.number: branch for branch in find_branches(self.ledger.nodes)}

    def kinds(self) -> dict[int, tuple[str, int | None]]:
        return {number: (each.kind, each.parent) for number, each in self.branches().items()}

    def samples(self, **options: Any) -> list[Sample]:
        return self.ledger.samples(**options)


@pytest.fixture
def talk(renderer: Renderer) -> Talk:
    return Talk(renderer)


def call(name: str, **arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"call_{name}", "type": "function", "function": function}


def trained(sample: Sample) -> int:
    return sum(sample.sampled_mask)


def size(*nodes: Node) -> int:
    return sum(len(node.sampled) for node in nodes)


@pytest.mark.failure_mode("F59")
def test_a_retry_is_one_turn_of_which_the_attempt_that_was_used_is_trained(talk: Talk) -> None:
    opened = talk.turn([user("a")], "one", CODEX)
    question = [*opened, user("b")]
    talk.turn(question, "thrown away, and long", CODEX)
    used = talk.turn(question, "used", CODEX)
    talk.turn([*used, user("c")], "end", CODEX)
    assert talk.kinds() == {0: ("main", None), 1: ("retry", 0)}
    nodes = talk.ledger.nodes
    main, retry = talk.samples()
    assert (main.kind, trained(main)) == ("main", size(nodes[0], nodes[2], nodes[3]))
    assert (retry.kind, trained(retry)) == ("retry", 0)
    (named,) = talk.samples(kinds=["retry"])
    assert trained(named) == size(nodes[1])


@pytest.mark.failure_mode("F59")
def test_of_attempts_that_nothing_follows_the_last_is_trained(talk: Talk) -> None:
    for text in ("first", "second", "third"):
        talk.turn([user("a")], text, CODEX)
    assert talk.kinds() == {2: ("main", None), 0: ("retry", 2), 1: ("retry", 2)}
    assert [trained(each) for each in talk.samples()] == [size(talk.ledger.nodes[2]), 0, 0]


@pytest.mark.failure_mode("F59")
def test_a_branch_ends_with_the_last_attempt_at_its_last_turn(talk: Talk) -> None:
    opened = talk.turn([user("a")], "one", CODEX)
    for text in ("first", "second"):
        talk.turn([*opened, user("b")], text, CODEX)
    assert talk.kinds() == {0: ("main", None), 1: ("retry", 0)}
    main, _ = talk.samples()
    assert (main.turn_index, trained(main)) == (2, size(talk.ledger.nodes[0], talk.ledger.nodes[2]))


@pytest.mark.parametrize(
    "origin", [None, Origin(harness="OpenAI/Python"), Origin(harness="OpenAI/Python", retries=1)]
)
def test_an_equal_prompt_is_a_retry_only_with_evidence(talk: Talk, origin: Origin | None) -> None:
    for text in ("first", "second"):
        talk.turn([user("a")], text, origin)
    kinds = [kind for kind, _ in talk.kinds().values()]
    retried = origin is not None and origin.retries > 0
    assert kinds == (["main", "retry"] if retried else ["main", "unknown"])
    assert sum(map(trained, talk.samples())) == size(*talk.ledger.nodes[1 if retried else 0 :])


def test_choices_of_one_request_are_no_attempts(talk: Talk) -> None:
    opened = talk.turn([user("a")], "one", CODEX)
    for text in ("left", "right"):
        talk.turn([*opened, user("b")], text, CODEX, request_id="same")
    assert talk.kinds() == {0: ("main", None), 2: ("fork", 0)}
    assert sum(map(trained, talk.samples())) == size(*talk.ledger.nodes)


@pytest.mark.failure_mode("F59")
def test_what_shares_a_history_trains_only_its_own_turns(talk: Talk) -> None:
    opened = talk.turn([user("a")], "one", CODEX)
    talk.turn([*opened, user("sum up")], "summary", msgspec.structs.replace(CODEX, side="other"))
    child = msgspec.structs.replace(CHILD, window="root:0")
    talk.turn([*opened, user("you are a child")], "child", child)
    talk.turn([*opened, user("b")], "two", CODEX)
    assert talk.kinds() == {0: ("main", None), 1: ("auxiliary", 0), 2: ("subagent", 0)}
    nodes = talk.ledger.nodes
    by_kind = {each.kind: each for each in talk.samples()}
    assert trained(by_kind["main"]) == size(nodes[0], nodes[3])
    assert trained(by_kind["subagent"]) == size(nodes[2])
    assert trained(by_kind["auxiliary"]) == size(nodes[1])
    for kind in ("main", "subagent", "auxiliary"):
        (alone,) = talk.samples(kinds=[kind])
        assert alone.sampled_mask == by_kind[kind].sampled_mask
    assert [each.kind for each in talk.samples(kinds=("main", "subagent"))] == ["main", "subagent"]


@pytest.mark.failure_mode("F59")
def test_a_branch_that_only_a_side_call_follows_has_a_sample_of_its_own(talk: Talk) -> None:
    opened = talk.turn([user("a")], "one", CODEX)
    talk.turn([*opened, user("title?")], "title", msgspec.structs.replace(CODEX, side="other"))
    main, side = talk.samples()
    assert (main.kind, main.turn_index, side.kind, side.turn_index) == ("main", 0, "auxiliary", 1)
    assert trained(main) == size(talk.ledger.nodes[0])


@pytest.mark.failure_mode("F58")
def test_a_compaction_replaces_the_branch_of_the_agent_that_was_summed_up(talk: Talk) -> None:
    talk.turn([user("a")], "one", CODEX)
    talk.turn([user("task")], "working", CHILD)
    summing = msgspec.structs.replace(CHILD, side="compaction", side_evidence="request_kind")
    talk.turn([user("task"), user("sum up")], "summary", summing, tools=None)
    later = msgspec.structs.replace(CHILD, window="child:1")
    behind = talk.turn([user("task so far: summary")], "more", later)
    talk.turn([*behind, user("on")], "done", later)
    assert talk.kinds() == {
        0: ("main", None),
        1: ("subagent", 0),
        2: ("auxiliary", 1),
        3: ("compaction", 1),
    }
    assert [branch.depth for branch in talk.branches().values()] == [0, 1, 2, 2]
    assert talk.branches()[3].evidence == "header x-codex-window-id"


@pytest.mark.failure_mode("F58")
def test_without_ids_a_compaction_is_what_follows_a_summary(talk: Talk) -> None:
    opened = talk.turn([user("a")], "one", QWEN, calls=[call("calc", sum="1")])
    summing = msgspec.structs.replace(QWEN, side="compaction", side_evidence="its words")
    talk.turn([*opened, user("sum up")], "summary", summing, tools=None)
    talk.turn([user("summary")], "on", QWEN)
    talk.turn([user("something else")], "what?", QWEN)
    assert talk.kinds() == {
        0: ("main", None),
        1: ("auxiliary", 0),
        2: ("compaction", 0),
        3: ("unknown", None),
    }


@pytest.mark.failure_mode("F59")
@pytest.mark.parametrize(
    ("task", "question", "kind"),
    [
        ("read calc.py and report", "Notes.\nread calc.py and report", "subagent"),
        ("calc.py", "calc.py", "subagent"),
        ("calc.py", "What is in calc.py", "unknown"),
        ("read calc.py and report", "Write a poem", "unknown"),
    ],
)
def test_without_ids_a_sub_agent_is_known_by_its_task(
    talk: Talk, task: str, question: str, kind: str
) -> None:
    talk.turn([user("a")], "", QWEN, calls=[call("agent", prompt=task)])
    talk.turn([{"role": "system", "content": "You help."}, user(question)], "ok", QWEN)
    assert talk.kinds()[1] == (kind, 0 if kind == "subagent" else None)


def test_an_edited_history_is_a_fork_of_the_branch_whose_calls_it_holds(talk: Talk) -> None:
    opened = talk.turn([user("a")], "one", QWEN, calls=[call("calc", sum="1")])
    edited = [*opened[:-1], {**opened[-1], "content": "never said"}, user("b")]
    talk.turn(edited, "two", QWEN)
    assert talk.kinds()[1] == ("fork", 0)
    assert talk.branches()[1].evidence == "prefix break: edited_history"


def test_ids_that_name_each_other_as_parents_end(talk: Talk) -> None:
    talk.turn([user("a")], "one", Origin(harness="codex", agent="x", parent="y"))
    talk.turn([user("b")], "two", Origin(harness="codex", agent="y", parent="x"))
    talk.turn([user("c")], "self", Origin(harness="codex", agent="z", parent="z"))
    assert talk.kinds() == {0: ("subagent", None), 1: ("subagent", 0), 2: ("subagent", None)}


def test_samples_name_their_harness_and_survive_as_json(talk: Talk) -> None:
    talk.turn([user("a")], "one", CODEX)
    talk.turn([user("b")], "two", CHILD)
    main, child = talk.samples(weights="session")
    assert (main.harness, main.branch, main.parent, main.depth) == ("codex", 0, None, 0)
    assert (child.kind, child.parent, child.depth, child.turn_index) == ("subagent", 0, 1, 1)
    assert child.evidence == "header x-codex-parent-thread-id"
    assert [Sample.from_json(each.to_json()) for each in (main, child)] == [main, child]


def test_origins_survive_a_restart_and_turns_without_one_are_read(talk: Talk) -> None:
    talk.turn([user("a")], "one", CODEX)
    talk.turn([user("b")], "two", CHILD)
    ledger = talk.ledger
    rows = [turn_bytes(ledger, node) for node in ledger.nodes]
    again = Ledger.from_turns(rows, [], ledger.renderer)
    assert [node.origin for node in again.nodes] == [CODEX, CHILD]
    assert again.samples() == ledger.samples()
    older = [msgspec.msgpack.encode(msgspec.msgpack.decode(row)[:-3]) for row in rows]
    assert [each.kind for each in Ledger.from_turns(older, [], ledger.renderer).samples()] == [
        "main",
        "unknown",
    ]


def test_weights_count_a_session_or_a_token_once(talk: Talk) -> None:
    opened = talk.turn([user("a")], "a long first answer", CODEX)
    talk.turn([*opened, user("b")], "two", CODEX)
    talk.turn([user("c")], "child", CHILD)
    assert [each.weight for each in talk.samples()] == [1.0, 1.0]
    by_session, by_token = talk.samples(weights="session"), talk.samples(weights="token")
    assert sum(each.weight for each in by_session) == pytest.approx(1.0)
    for session, token in zip(by_session, by_token, strict=True):
        assert token.weight == trained(token)
        assert session.weight == pytest.approx(trained(session) / size(*talk.ledger.nodes))
    (alone,) = talk.samples(weights="session", kinds=["main"])
    assert alone.weight == 1.0


def test_kinds_and_weights_that_there_are_not_are_refused(talk: Talk) -> None:
    with pytest.raises(BadRequest, match="'title': expected main, subagent"):
        talk.samples(kinds=["main", "title"])
    with pytest.raises(BadRequest, match="'turn': expected session or token"):
        talk.samples(weights="turn")
    assert len(KINDS) == 7


CLAUDE = Origin(harness="claude-code", agent="session")
AIDER = Origin(harness="litellm")
SYSTEM = {"role": "system", "content": "Edit files."}


def test_a_run_after_an_empty_first_answer_is_the_main_line(talk: Talk) -> None:
    talk.turn([user("Do it.")], "", CLAUDE)
    history = talk.turn([user("Do it.\n[Your previous response had no text.]")], "ok", CLAUDE)
    talk.turn([*history, user("Thanks")], "done", CLAUDE)
    assert talk.kinds() == {1: ("main", None), 0: ("retry", 1)}
    assert "no answer" in talk.branches()[0].evidence
    (main,) = talk.samples(kinds=["main", "subagent", "compaction"])
    assert sum(main.sampled_mask) == sum(len(node.sampled) for node in talk.ledger.nodes[1:])


def test_an_empty_answer_stays_main_without_a_second_attempt(talk: Talk) -> None:
    talk.turn([user("Do it.")], "", CLAUDE)
    talk.turn([user("Another task.")], "ok", CLAUDE)
    assert talk.kinds()[0] == ("main", None)


def test_a_history_that_its_program_rewrote_is_the_main_line_after_a_break(talk: Talk) -> None:
    talk.turn([SYSTEM, user("a")], "one", AIDER)
    rewritten = [SYSTEM, user("a (shortened)"), {"role": "assistant", "content": "Ok."}, user("b")]
    talk.turn(rewritten, "two", AIDER)
    assert talk.kinds() == {0: ("main", None), 1: ("main", 0)}
    assert "edited_history" in talk.branches()[1].evidence
    assert talk.ledger.break_counts == {"edited_history": 1}


def test_an_edited_history_of_another_agent_is_a_fork(talk: Talk) -> None:
    history = talk.turn([SYSTEM, user("a")], "one", AIDER)
    edited = [SYSTEM, user("a"), {"role": "assistant", "content": "1"}, user("b")]
    talk.turn(edited, "two", AIDER)
    # The first line goes on as well: the other one is no continuation of it.
    talk.turn([*history, user("b")], "three", AIDER)
    assert talk.kinds() == {0: ("main", None), 1: ("fork", 0)}
    other = [{"role": "system", "content": "Review."}, *edited[1:]]
    talk.turn(other, "four", AIDER)
    assert talk.kinds()[3] == ("fork", 0)


def test_a_dropped_first_reply_is_a_break(talk: Talk) -> None:
    talk.turn([SYSTEM, user("a")], "No call.", AIDER)
    continued = [SYSTEM, user("a"), user("Call a tool.")]
    with pytest.raises(PrefixBreak, match="leaves out the reply") as raised:
        Ledger.from_turns(
            [turn_bytes(talk.ledger, node) for node in talk.ledger.nodes], [], talk.ledger.renderer
        ).plan(continued, TOOLS)
    assert raised.value.cause == "reply_dropped"
    talk.turn(continued, "ok", AIDER)
    assert talk.ledger.break_counts == {"reply_dropped": 1}
    assert talk.kinds() == {0: ("main", None), 1: ("main", 0)}


def test_a_selection_of_kinds_says_what_it_leaves_out(talk: Talk) -> None:
    history = talk.turn([user("a")], "one", CODEX)
    talk.turn([user("b")], "two", CHILD)
    talk.turn([*history, user("c")], "three", CODEX)
    nodes = talk.ledger.nodes
    assert left_out(nodes, ["main"]) == {"subagent": len(nodes[1].sampled)}
    assert left_out(nodes, ["main", "subagent"]) == left_out(nodes, None) == {}
