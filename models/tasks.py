"""The three toy tasks of the bundled models: reverse, calc and guess.

An episode is one conversation to be had. It opens with messages, takes what the assistant says,
answers with the next message or ends, and then has a score. The same episode produces training
text (driven by its own `right` or `wrong` lines) and measures a model (driven by samples).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any, Protocol

from lockstep.train.envs.bundled import CALC_TOOL, evaluate

Message = dict[str, Any]

_TOOL_CALL = re.compile(r"<tool_call>\n(.*)\n</tool_call>", re.DOTALL)


class Episode(Protocol):
    """One conversation of a task, from its opening to its score."""

    opening: list[Message]
    tools: list[dict[str, Any]] | None
    score: float

    def right(self) -> str:
        """Return what a skilled assistant says next."""

    def wrong(self, rng: random.Random) -> str:
        """Return what an assistant with the task's bad habit says next."""

    def reply(self, text: str) -> Message | None:
        """Take the assistant's words; return the next message, or None when the episode ends."""


class Reverse:
    """Give the digits of a string in reverse order, in one turn. The bad habit is to copy."""

    def __init__(self, rng: random.Random) -> None:
        self.digits = "".join(rng.choices("0123456789", k=rng.randint(3, 8)))
        system = [{"role": "system", "content": "You reverse strings."}]
        user = {"role": "user", "content": f"Reverse: {self.digits}"}
        self.opening: list[Message] = [*(system if rng.random() < 0.5 else []), user]
        self.tools: list[dict[str, Any]] | None = None
        self.score = 0.0

    def right(self) -> str:
        return self.digits[::-1]

    def wrong(self, rng: random.Random) -> str:
        return self.digits

    def reply(self, text: str) -> Message | None:
        self.score = float(text == self.digits[::-1])
        return None


class Calc:
    """Answer a sum by calling the calc tool. The bad habit is to guess a number instead."""

    def __init__(self, rng: random.Random, tools: list[dict[str, Any]] | None = None) -> None:
        sign = rng.choice("+-*")
        self.expression = f"{rng.randint(10, 999)} {sign} {rng.randint(10, 999)}"
        self.answer = evaluate(self.expression)
        self.opening: list[Message] = [{"role": "user", "content": f"What is {self.expression}?"}]
        self.tools = tools
        self.called = False
        self.score = 0.0

    def right(self) -> str:
        if self.called:
            return self.answer
        call = {"name": "calc", "arguments": {"expression": self.expression}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    def wrong(self, rng: random.Random) -> str:
        """Guess a number of the right length, sign included, that is not the answer."""
        digits = len(self.answer.lstrip("-"))
        size = rng.randint(10 ** (digits - 1), 10**digits - 1)
        guess = f"{'-' if self.answer.startswith('-') else ''}{size}"
        return guess if guess != self.answer else f"{size + 1}"

    def reply(self, text: str) -> Message | None:
        if not self.called and (call := _TOOL_CALL.fullmatch(text)):
            self.called = True
            return {"role": "tool", "content": run_calc(call[1])}
        self.score = float(self.called and text == self.answer)
        return None


class Guess:
    """Find a number from 0 to 99 in seven guesses. The bad habit is to ignore the hints."""

    TURNS = 7

    def __init__(self, rng: random.Random) -> None:
        self.secret = rng.randint(0, 99)
        self.low, self.high, self.turn = 0, 99, 0
        self.opening: list[Message] = [{"role": "user", "content": "Guess my number from 0 to 99."}]
        self.tools: list[dict[str, Any]] | None = None
        self.score = 0.0

    def right(self) -> str:
        return str((self.low + self.high + 1) // 2)

    def wrong(self, rng: random.Random) -> str:
        return str(rng.randint(0, 99))

    def reply(self, text: str) -> Message | None:
        self.turn += 1
        if not re.fullmatch(r"\d{1,2}", text):
            return None
        guess = int(text)
        self.score = float(guess == self.secret)
        if guess == self.secret or self.turn == self.TURNS:
            return None
        if guess < self.secret:
            self.low = max(self.low, guess + 1)
            return {"role": "user", "content": "higher"}
        self.high = min(self.high, guess - 1)
        return {"role": "user", "content": "lower"}


def run_calc(call: str) -> str:
    """Run the tool on the JSON text of a call; a bad call gives the tool result "error"."""
    try:
        parsed = json.loads(call)
        if parsed["name"] != "calc":
            return "error"
        return evaluate(parsed["arguments"]["expression"])
    except (ValueError, KeyError, TypeError):
        return "error"


def calc_with_tools(rng: random.Random) -> Calc:
    """A calc episode whose prompt carries the tool's schema."""
    return Calc(rng, tools=[CALC_TOOL])


TASKS: dict[str, Callable[[random.Random], Episode]] = {
    "reverse": Reverse,
    "calc": Calc,
    "calc_with_tools": calc_with_tools,
    "guess": Guess,
}
