"""A history that comes again as it was is not read again, and one that differs is."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from lockstep.ledger import Ledger, PromptPlan
from lockstep.ledger import matching as matching_module
from lockstep.ledger.turn_cache import CHARACTERS
from lockstep.render import Renderer
from lockstep.render.messages import plain_messages
from lockstep.tokens.errors import BadRequest
from tests.ledger.rollouts import TOOLS, finish_turn

CALL = '<tool_call>\n{"name": "calc", "arguments": {"sum": 1}}\n</tool_call><|im_end|>'


def planned(ledger: Ledger, messages: list[dict[str, Any]]) -> PromptPlan:
    """A plan of a gateway, whose messages are decoded from JSON each time."""
    decoded = msgspec.json.decode(msgspec.json.encode(messages))
    return asyncio.run(ledger.plan_async(decoded, TOOLS, lazy=True))


def called(ledger: Ledger) -> list[dict[str, Any]]:
    """A session with one call, whose arguments are a dict, and its result."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "1?"}]
    _, _, message = finish_turn(ledger, planned(ledger, messages), messages, CALL, tools=TOOLS)
    (call,) = message["tool_calls"]
    call["function"]["arguments"] = {"sum": 1}
    return [*messages, {"role": "tool", "tool_call_id": call["id"], "content": "1"}]


def test_only_the_messages_that_are_new_are_read(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(renderer)
    messages = called(ledger)
    known: list[int] = []

    def counting(read: Any, before: Any = ()) -> Any:
        known.append(len(before))
        return plain_messages(read, before)

    monkeypatch.setattr(matching_module, "plain_messages", counting)
    assert planned(ledger, messages) == ledger.plan(messages, TOOLS)
    more = [*messages, {"role": "user", "content": "And?"}]
    assert planned(ledger, more) == ledger.plan(more, TOOLS)
    assert known == [1, 0, 3, 0]
    assert ledger.read_history.nbytes == len(msgspec.json.encode(more)) - 1


@pytest.mark.parametrize(
    ("at", "change"),
    [
        (0, {"content": "2?"}),
        (0, {"role": "system"}),
        (1, {"tool_calls": [{"function": {"name": "calc", "arguments": {"sum": True}}}]}),
    ],
    ids=["a text", "a role", "a number that Python takes for equal"],
)
def test_an_edit_is_seen_after_the_history_was_read(
    renderer: Renderer, at: int, change: dict[str, Any]
) -> None:
    ledger = Ledger(renderer, breaks="fork")
    messages = called(ledger)
    assert planned(ledger, messages).cause is None
    edited = [{**each, **change} if index == at else each for index, each in enumerate(messages)]
    assert planned(ledger, edited).cause == "edited_history"
    assert planned(ledger, messages).cause is None


def test_the_beginning_of_a_message_is_not_that_message(renderer: Renderer) -> None:
    """Numbers stand for messages: where one is the beginning of another, it is not known."""
    ledger = Ledger(renderer)
    ledger.read_history.keep(b"[1,2", [{}, {}], ())
    assert len(ledger.read_history.known([1, 2]).plain) == 2
    assert len(ledger.read_history.known([1, 2, 3]).plain) == 2
    assert not ledger.read_history.known([1, 23]).plain


def test_an_error_counts_the_messages_that_were_known(renderer: Renderer) -> None:
    ledger = Ledger(renderer)
    messages = called(ledger)
    planned(ledger, messages)
    with pytest.raises(BadRequest, match=r"messages\[3\]\.role"):
        planned(ledger, [*messages, {"role": "nobody", "content": ""}])


def test_more_text_than_is_written_in_a_moment_is_read_each_time(renderer: Renderer) -> None:
    ledger = Ledger(renderer)
    planned(ledger, [{"role": "user", "content": "x "}])
    assert ledger.read_history.nbytes
    assert not ledger.read_history.known([{"role": "user", "content": "x" * (CHARACTERS + 1)}]).json
