"""A stored session is the same session."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lockstep.ledger import Ledger
from lockstep.render import Renderer
from lockstep.tokens.errors import BadRequest, PrefixBreak
from tests.ledger.rollouts import TOOLS, finish_turn, say, turn_bytes

USER = {"role": "user", "content": "1 + 2?"}


class Stored:
    """What a store keeps of a session: its turns, and the breaks it was told."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.breaks: list[tuple[bytes, str]] = []
        ledger.on_break = self.breaks.append

    @property
    def turns(self) -> list[bytes]:
        return [turn_bytes(self.ledger, node) for node in self.ledger.nodes]

    def again(self) -> Ledger:
        return Ledger.from_turns(self.turns, self.breaks, self.ledger.renderer)


def busy(renderer: Renderer) -> tuple[Stored, list[Any]]:
    """A session with branches, a break, an aborted turn and shared prompts."""
    ledger = Ledger(renderer, breaks="fork")
    stored = Stored(ledger)
    messages: list[Any] = [USER]
    plan = ledger.plan(messages, TOOLS)
    for text in ("3<|im_end|>", "<think>\nHm.\n</think>\n\nthree<|im_end|>"):
        finish_turn(ledger, plan, [], text, tools=TOOLS)
    messages.append({"role": "assistant", "content": "three"})
    say(ledger, [*messages, USER], "It", finish="abort", tools=TOOLS)
    finish_turn(ledger, ledger.continue_(ledger.nodes[-1]), [], " is.<|im_end|>", tools=TOOLS)
    edited = [USER, {"role": "assistant", "content": "four"}, USER]
    say(ledger, edited, "5<|im_end|>", tools=TOOLS)
    return stored, [*messages, USER]


def test_a_session_survives_as_bytes(renderer: Renderer) -> None:
    stored, messages = busy(renderer)
    ledger, again = stored.ledger, stored.again()
    assert again.samples() == ledger.samples()
    assert Stored(again).turns == stored.turns
    assert again.nbytes == ledger.nbytes
    assert again.break_counts == ledger.break_counts == {"edited_history": 1}
    assert again.nodes[0].prompt is again.nodes[1].prompt
    more = {"role": "user", "content": "And?"}
    mine, theirs = (each.plan([*messages, more], TOOLS) for each in (ledger, again))
    assert mine.prompt_ids == theirs.prompt_ids
    assert theirs.parent is again.nodes[1]


def test_a_known_break_is_not_counted_again_after_a_restart(renderer: Renderer) -> None:
    stored, _ = busy(renderer)
    edited = [USER, {"role": "assistant", "content": "nine"}, USER]
    stored.ledger.plan(edited, TOOLS)
    again = stored.again()
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
    assert sum(map(len, Stored(ledger).turns)) < 14 * end + 20 * 800


@pytest.mark.parametrize("data", [b"", b"nonsense", msgspec.msgpack.encode([99, [], {}, []])])
def test_other_bytes_are_refused(renderer: Renderer, data: bytes) -> None:
    with pytest.raises(BadRequest, match="not a stored turn"):
        Ledger.from_turns([data], [], renderer)


def test_a_broken_chain_is_refused(renderer: Renderer) -> None:
    stored, _ = busy(renderer)
    first, *rest = stored.turns
    turn = msgspec.msgpack.decode(first)
    turn[0] = 7
    with pytest.raises(BadRequest, match="parent 7"):
        Ledger.from_turns([msgspec.msgpack.encode(turn), *rest], [], renderer)
