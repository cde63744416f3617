"""How a row ends: with evidence, or as broken or not applicable; and comparisons that decide it."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.tokens import Completion


class Broken(Exception):
    """The server broke the contract; the text is the evidence."""


class NotApplicable(Exception):
    """The row makes no sense for this server; the text says why."""


def require(kept: bool, evidence: str) -> None:
    """Raises Broken with the evidence unless the contract was kept."""
    if not kept:
        raise Broken(evidence)


def difference(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference of two rows of numbers; infinite when their lengths differ."""
    if len(one) != len(other):
        return float("inf")
    return max((abs(a - b) for a, b in zip(one, other, strict=True)), default=0.0)


def largest_difference(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """The largest difference over several rows."""
    if len(one) != len(other):
        return float("inf")
    return max((difference(a, b) for a, b in zip(one, other, strict=True)), default=0.0)


def describe(off: float) -> str:
    """A difference in the words of the evidence."""
    return "bit for bit" if off == 0 else f"max difference {off:.2g}"


def require_same(one: Completion, other: Completion, tolerance: float, what: str) -> str:
    """The evidence that two completions are one. Raises Broken, naming where they part."""
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    lengths = (len(one.token_ids), len(other.token_ids))
    at = next((at for at, (a, b) in enumerate(pairs) if a != b), min(lengths))
    if one.token_ids != other.token_ids:
        before = difference(one.logprobs[:at], other.logprobs[:at])
        ends = [f"{completion.token_ids[at : at + 3]}..." for completion in (one, other)]
        require(
            False,
            f"{what}: {lengths[0]} and {lengths[1]} ids that part at token {at} ({ends[0]} and "
            f"{ends[1]}); logprobs before that: {describe(before)}",
        )
    off = difference(one.logprobs, other.logprobs)
    require(
        off <= tolerance,
        f"{what}: the same {lengths[0]} ids, but logprobs differ by up to {off:.2g} "
        f"(tolerance {tolerance:g})",
    )
    require(one.finish == other.finish, f"{what}: finish {one.finish!r} and {other.finish!r}")
    return f"{what}: the same {lengths[0]} ids, logprobs {describe(off)}"
