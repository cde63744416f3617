"""A stored session is the same session."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lockstep.render import Ledger, Renderer
from lockstep.tokens.errors import BadRequest, PrefixBreak
from tests.render.rollouts import TOOLS, finish_turn, say

USER = {"role": "user", "content": "1 + 2?"}


def busy(renderer: Renderer) -> tuple[Ledger, list[Any]]:
    """A session with branches, a break, an aborted turn and shared prompts."""
    ledger = Ledger(renderer, breaks="fork")
    messages: list[Any] = [USER]
    plan = ledger.plan(messages, TOOLS)
    for text in ("3<|im_end|>", "<think>\nHm.\n</think>\n\nthree<|im_end|>"):
        finish_turn(ledger, plan, [], text, tools=TOOLS)
    messages.append({"role": "assistant", "content": "three"})
    say(ledger, [*messages, USER], "It", finish="abort", tools=TOOLS)
    finish_turn(ledger, ledger.continue_(ledger.nodes[-1]), [], " is.<|im_end|>", tools=TOOLS)
    edited = [USER, {"role": "assistant", "content": "four"}, USER]
    say(ledger, edited, "5<|im_end|>", tools=TOOLS)
    return ledger, [*messages, USER]


def test_a_session_survives_as_bytes(renderer: Renderer) -> None:
    ledger, messages = busy(renderer)
    data = ledger.to_bytes()
    again = Ledger.from_bytes(data, renderer, breaks="fork")
    assert again.samples() == ledger.samples()
    assert again.to_bytes() == data
    assert again.nbytes == ledger.nbytes
    assert again.break_counts == ledger.break_counts == {"edited_history": 1}
    assert again.nodes[0].prompt is again.nodes[1].prompt
    more = {"role": "user", "content": "And?"}
    mine, theirs = (each.plan([*messages, more], TOOLS) for each in (ledger, again))
    assert mine.prompt_ids == theirs.prompt_ids
    assert theirs.parent is again.nodes[1]


def test_a_known_break_is_not_counted_again_after_a_restart(renderer: Renderer) -> None:
    ledger, _ = busy(renderer)
    edited = [USER, {"role": "assistant", "content": "nine"}, USER]
    ledger.plan(edited, TOOLS)
    again = Ledger.from_bytes(ledger.to_bytes(), renderer)
    with pytest.raises(PrefixBreak):
        again.plan(edited, TOOLS)
    assert again.break_counts == {"edited_history": 2}


def test_a_long_session_is_stored_close_to_its_numbers(renderer: Renderer) -> None:
    ledger = Ledger(renderer)
    messages: list[Any] = [USER]
    for _ in range(20):
        say(ledger, messages, "word " * 50 + "<|im_end|>")
        messages.append(USER)
    end = ledger.nodes[-1].end
    assert len(ledger.to_bytes()) < 14 * end + 20 * 800


@pytest.mark.parametrize("data", [b"", b"nonsense", msgspec.msgpack.encode([99, [], {}, []])])
def test_other_bytes_are_refused(renderer: Renderer, data: bytes) -> None:
    with pytest.raises(BadRequest, match="stored session"):
        Ledger.from_bytes(data, renderer)


def test_a_broken_chain_is_refused(renderer: Renderer) -> None:
    ledger, _ = busy(renderer)
    session = msgspec.msgpack.decode(ledger.to_bytes())
    session[1][0][0] = 7
    with pytest.raises(BadRequest, match="parent 7"):
        Ledger.from_bytes(msgspec.msgpack.encode(session), renderer)
