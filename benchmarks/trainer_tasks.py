"""The tasks on which trainers are measured: the same prompts, limits and rewards for all of them.

`short` is the bundled reverse task: answers of about 7 tokens. `long` is the same with up to 13
digits, of which the bundled model has learnt 8, at temperature 1.5: what it knows it answers in as
many tokens as there are digits, and beyond it wanders off until it happens to stop. Half of the
answers have 8 tokens or fewer, one in ten more than 36, one in twenty goes on to the limit of 512.
`calc` takes two turns: a call of the calculator, whose schema is in the prompt, and an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

GROUPS, GROUP_SIZE = 16, 8
LEARNING_RATE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerTask:
    """An environment and its limits. `turn_tokens` bounds a turn; `tokens` a whole completion in
    TRL, which counts what the tool says too. The first `warm` steps are not measured."""

    env: str
    options: Mapping[str, Any] = field(default_factory=dict)
    temperature: float = 1.0
    turn_tokens: int = 48
    tokens: int = 48
    steps: int = 12
    warm: int = 3


TASKS = {
    "short": TrainerTask(env="reverse"),
    "long": TrainerTask(
        env="reverse", options={"max_digits": 13}, temperature=1.5, turn_tokens=512, tokens=512,
        steps=4, warm=1,
    ),
    "calc": TrainerTask(
        env="calc", options={"schema": True}, turn_tokens=64, tokens=160, steps=8, warm=2
    ),
}  # fmt: skip


def reverse_reward(text: str, right: str) -> float:
    """1 for the right digits, else half of the share that is in its place: as the environment."""
    if text == right:
        return 1.0
    in_place = sum(sampled == digit for sampled, digit in zip(text, right, strict=False))
    return 0.5 * in_place / max(len(right), len(text))
