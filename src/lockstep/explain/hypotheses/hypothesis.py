"""A hypothesis: a cause that can be tried by changing the setting, and how it is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lockstep.explain.band import Band
from lockstep.explain.case import Case, Values
from lockstep.explain.scorer import Scorer
from lockstep.explain.setting import Setting

READING, PASS, SEARCH = 0, 1, 2
"""Costs: other readings of known logits, one forward pass each, and several that depend on each
other."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The numbers of one side, and what a hypothesis needs to explain them.

    `target` are the logprobs to explain, `base` the setting that they should have and `expected`
    its values. `side` is "engine", "trainer", or "server" for what the live server scores now.
    """

    case: Case
    scorer: Scorer
    base: Setting
    expected: Values
    target: Values
    band: Band
    side: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """One substitution and the numbers that follow from it.

    `partial` allows it to hold for some groups of tokens only, as one stale worker of several;
    substitutions with a fitted number must hold for all. `values` may be NaN where the substitution
    has no number. `parameters` counts fitted numbers.
    """

    cause: str
    detail: str
    values: Values
    setting: Setting | None = None
    partial: bool = False
    location: str = ""
    follow_up: Callable[[Trial], Iterator[Candidate]] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A family of causes. `candidates` yields substitutions, `applies` whether there are any."""

    name: str
    cost: int
    applies: Callable[[Trial], bool]
    candidates: Callable[[Trial], Iterator[Candidate]]
    sides: tuple[str, ...] = ("engine", "trainer", "server")
