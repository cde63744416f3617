"""The bundled environments: reverse digits, a calculator tool in two turns, a guessing game.

The bundled models were trained on these prompts. Rewards give partial credit, so that a group whose
rollouts all fail still has a gradient.
"""

from __future__ import annotations

import json
import operator
import random
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from lockstep.train.envs.environment import Environment, Reward, RolloutContext, Split, Task

HELD_OUT = 5
"""One task in HELD_OUT is held out for evaluation, chosen by a checksum of its contents."""
CALC_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}
_EXPRESSION = re.compile(r"(\d{1,6}) ([-+*]) (\d{1,6})")


def held_out(contents: str) -> bool:
    """Whether a task with these contents is for evaluation only."""
    return zlib.crc32(contents.encode()) % HELD_OUT == 0


def _draw(
    split: Split, seed: int, name: str, draw: Callable[[random.Random], str]
) -> Iterator[str]:
    rng = random.Random(f"{name} {split} {seed}")
    while True:
        contents = draw(rng)
        if held_out(contents) == (split == "eval"):
            yield contents


class Reverse:
    """Reverse the digits of a string. Up to half of the reward is for digits in place."""

    deterministic = True

    def __init__(self, min_digits: int = 3, max_digits: int = 8) -> None:
        self._lengths = min_digits, max_digits

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        def draw(rng: random.Random) -> str:
            return "".join(rng.choices("0123456789", k=rng.randint(*self._lengths)))

        for digits in _draw(split, seed, "reverse", draw):
            message = {"role": "user", "content": f"Reverse: {digits}"}
            yield Task((message,), facts={"answer": digits[::-1]})

    async def rollout(self, task: Task, context: RolloutContext) -> Reward:
        turn = await context.chat(task).send(list(task.messages))
        right = task.facts["answer"]
        solved = turn.finish == "stop" and turn.text == right
        pairs = zip(turn.text, right, strict=False)
        in_place = sum(sampled == digit for sampled, digit in pairs) / max(
            len(right), len(turn.text)
        )
        return Reward(1.0 if solved else 0.5 * in_place, solved, {"response": turn.text})


class Calc:
    """Answer a calculation by calling the calc tool, in two turns; solved only with a tool call.

    0.2 of the reward is for a call, another 0.2 for the right expression. `schema` puts the tool's
    schema into the prompt.
    """

    deterministic = True

    def __init__(self, schema: bool = False) -> None:
        self._tools = (CALC_TOOL,) if schema else ()

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        def draw(rng: random.Random) -> str:
            return f"{rng.randint(10, 999)} {rng.choice('+-*')} {rng.randint(10, 999)}"

        for expression in _draw(split, seed, "calc", draw):
            message = {"role": "user", "content": f"What is {expression}?"}
            facts = {"expression": expression, "answer": evaluate(expression)}
            yield Task((message,), self._tools, facts)

    async def rollout(self, task: Task, context: RolloutContext) -> Reward:
        chat = context.chat(task, call_tools=[CALC_TOOL])
        turn = await chat.send(list(task.messages))
        calls = turn.tool_calls
        if len(calls) != 1 or calls[0].name != "calc":
            return Reward(0.0, False, {"called": False, "response": turn.text})
        result, expression = run_calc(calls[0].arguments)
        right = expression == task.facts["expression"]
        turn = await chat.send_tool_results([result])
        solved = turn.finish == "stop" and turn.text == task.facts["answer"]
        value = 1.0 if solved else 0.2 + 0.2 * right
        return Reward(value, solved, {"called": True, "right_call": right, "response": turn.text})


class Guess:
    """Find a number from 0 to 99 in seven guesses; up to half of the reward is for using hints."""

    deterministic = True

    TURNS = 7

    def tasks(self, split: Split, seed: int) -> Iterator[Task]:
        message = {"role": "user", "content": "Guess my number from 0 to 99."}
        for secret in _draw(split, seed, "guess", lambda rng: str(rng.randint(0, 99))):
            yield Task((message,), facts={"secret": int(secret)})

    async def rollout(self, task: Task, context: RolloutContext) -> Reward:
        chat, secret = context.chat(task), task.facts["secret"]
        low, high, heeded = 0, 99, 0
        turn = await chat.send(list(task.messages))
        for count in range(1, self.TURNS + 1):
            if turn.finish != "stop" or not re.fullmatch(r"\d{1,2}", turn.text):
                return Reward(
                    0.5 * heeded / self.TURNS, False, {"turns": count, "response": turn.text}
                )
            guess = int(turn.text)
            if guess == secret:
                return Reward(1.0, True, {"turns": count})
            heeded += low <= guess <= high
            if guess < secret:
                low, hint = max(low, guess + 1), "higher"
            else:
                high, hint = min(high, guess - 1), "lower"
            if count < self.TURNS:
                turn = await chat.send(hint)
        return Reward(0.5 * heeded / self.TURNS, False, {"turns": self.TURNS})


BUNDLED: dict[str, Callable[..., Environment]] = {"reverse": Reverse, "calc": Calc, "guess": Guess}


def evaluate(expression: str) -> str:
    """Return the value of "a + b", "a - b" or "a * b" as text. Raises ValueError otherwise."""
    match = _EXPRESSION.fullmatch(expression)
    if match is None:
        raise ValueError(f"not an expression of two numbers: {expression!r}")
    return str(_OPERATORS[match[2]](int(match[1]), int(match[3])))


def run_calc(arguments: Any) -> tuple[str, str | None]:
    """Return the tool's result and the expression of the call; "error" and None for a bad call."""
    try:
        call = json.loads(arguments) if isinstance(arguments, str) else arguments
        return evaluate(call["expression"]), call["expression"]
    except (ValueError, KeyError, TypeError):
        return "error", None
