"""Outcomes of a row (evidence, broken, not applicable) and the comparisons that decide them."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.tokens import Completion


class Broken(Exception):
    """The server broke the contract; the text is the evidence."""


class NotApplicable(Exception):
    """The row does not apply to this server; the text is the reason."""


def require(condition: bool, evidence: str) -> None:
    """Raise Broken with the evidence unless the contract was kept."""
    if not condition:
        raise Broken(evidence)


def difference(first: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest difference of two rows of numbers; infinite if their lengths differ."""
    if len(first) != len(other):
        return float("inf")
    return max((abs(a - b) for a, b in zip(first, other, strict=True)), default=0.0)


def largest_difference(first: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """Return the largest difference over several rows."""
    if len(first) != len(other):
        return float("inf")
    return max((difference(a, b) for a, b in zip(first, other, strict=True)), default=0.0)


def describe(off: float) -> str:
    """Return a difference in the words of the evidence."""
    return "bit for bit" if off == 0 else f"max difference {off:.2g}"


def require_same(first: Completion, other: Completion, tolerance: float, what: str) -> str:
    """Return the evidence that two completions are equal. Raises Broken where they differ."""
    pairs = zip(first.token_ids, other.token_ids, strict=False)
    lengths = (len(first.token_ids), len(other.token_ids))
    at = next((at for at, (a, b) in enumerate(pairs) if a != b), min(lengths))
    if first.token_ids != other.token_ids:
        before = difference(first.logprobs[:at], other.logprobs[:at])
        ends = [f"{completion.token_ids[at : at + 3]}..." for completion in (first, other)]
        require(
            False,
            f"{what}: {lengths[0]} and {lengths[1]} ids that part at token {at} ({ends[0]} and "
            f"{ends[1]}); logprobs before that: {describe(before)}",
        )
    off = difference(first.logprobs, other.logprobs)
    require(
        off <= tolerance,
        f"{what}: the same {lengths[0]} ids, but logprobs differ by up to {off:.2g} "
        f"(tolerance {tolerance:g})",
    )
    require(first.finish == other.finish, f"{what}: finish {first.finish!r} and {other.finish!r}")
    return f"{what}: the same {lengths[0]} ids, logprobs {describe(off)}"
