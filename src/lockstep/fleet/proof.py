"""Proof that workers hold the weights they say: they reproduce logprobs that others know.

With a probe from the trainer, each worker must reproduce its numbers. Without one, all workers
must agree with each other on built-in sequences, and differ from what they said before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lockstep.fleet.desired import Operation, Reference
from lockstep.fleet.member import Failures, Member, each
from lockstep.tokens.errors import ContractError
from lockstep.wire.probe import Probe, builtin, compare

Scores = tuple[tuple[float, ...], ...]
CLOSE = 1e-4
"""How far workers may be apart on the built-in probe: kernels differ in the last bits."""
BUILTIN = builtin(256, 160)
"""Sequences of ids that every vocabulary has."""


class Disproved(ContractError):
    """A worker answered other numbers than the weights it claims to hold would give."""

    code = "disproved"


def reference_of(probe: Probe | None) -> Reference | None:
    """What a trainer's probe demands, if it gave one."""
    if probe is None:
        return None
    return Reference(probe.sequences, probe.logprobs, probe.tolerance)


class Proof:
    """What a transaction asks before and after. `probe` is the trainer's, if it gave one."""

    def __init__(
        self,
        probe: Reference | None = None,
        *,
        sequences: Sequence[Sequence[int]] = BUILTIN,
        tolerance: float = CLOSE,
        same: bool = False,
    ) -> None:
        """`same` says that the new weights are known to be the old ones, byte for byte."""
        self._same = same
        self._probe = probe
        self._sequences = probe.sequences if probe else tuple(tuple(s) for s in sequences)
        self._tolerance = probe.tolerance if probe else tolerance
        self._before: dict[Member, Scores] = {}

    async def before(self, members: list[Member], seconds: float, operation: Operation) -> None:
        """Asks what the live weights answer. Members that cannot say are judged without it."""
        self._before, _ = await ask("ask", members, self._sequences, None, seconds, operation)

    async def after(
        self, members: list[Member], seconds: float, operation: Operation
    ) -> tuple[Reference | None, list[Member], Failures]:
        """Who holds the new weights: the reference they share, those that proved it, the others."""
        scores, failed = await ask("prove", members, self._sequences, None, seconds, operation)
        if self._probe is not None:
            reference: Reference | None = self._probe
        else:
            reference = self._common(scores)
            if reference is None and scores:
                failed |= {m: Disproved("its answer is the same as before") for m in scores}
        good: list[Member] = []
        for member, said in scores.items():
            if member in failed:
                continue
            error = None if reference is None else differs(said, reference)
            if error is None and reference is not None:
                good.append(member)
            elif error is not None:
                failed[member] = error
        return reference, good, failed

    async def unchanged(
        self, members: list[Member], seconds: float, operation: Operation
    ) -> tuple[list[Member], Failures]:
        """Who answers again what it answered before."""
        scores, failed = await ask("prove", members, self._sequences, None, seconds, operation)
        good: list[Member] = []
        for member, said in scores.items():
            before = self._before.get(member)
            expected = None if before is None else Reference(self._sequences, before, CLOSE)
            error = None if expected is None else differs(said, expected)
            if error is None:
                good.append(member)
            else:
                failed[member] = error
        return good, failed

    def _common(self, scores: dict[Member, Scores]) -> Reference | None:
        """What most of them say, unless it is what they said before."""
        votes: Counter[Scores] = Counter(
            next((known for known in scores.values() if self._near(known, said)), said)
            for said in scores.values()
        )
        changed = [
            said
            for said, _ in votes.most_common()
            if self._same or not any(self._near(said, old) for old in self._before.values())
        ]
        if not changed:
            return None
        return Reference(self._sequences, changed[0], self._tolerance)

    def _near(self, one: Scores, other: Scores) -> bool:
        return differs(one, Reference(self._sequences, other, self._tolerance)) is None


async def ask(
    phase: str,
    members: list[Member],
    sequences: tuple[tuple[int, ...], ...],
    adapter: str | None,
    seconds: float,
    operation: Operation,
) -> tuple[dict[Member, Scores], Failures]:
    """What each member answers, and the errors of those that cannot."""
    scores: dict[Member, Scores] = {}

    async def one(member: Member) -> None:
        scores[member] = await scores_of(member, sequences, adapter)

    _, failed = await each(phase, members, one, seconds, operation)
    return {m: s for m, s in scores.items() if m not in failed}, failed


async def scores_of(
    member: Member, sequences: tuple[tuple[int, ...], ...], adapter: str | None = None
) -> Scores:
    return tuple(tuple(row) for row in await member.admin.probe(sequences, adapter=adapter))


def differs(scores: Scores, reference: Reference) -> Disproved | None:
    """Why these scores are not those of the reference, or None. NaN never passes."""
    verdict = compare(reference.logprobs, scores, reference.tolerance)
    if verdict.passed:
        return None
    return Disproved(
        f"its logprobs are off by up to {verdict.max_difference:.3g}, allowed is "
        f"{reference.tolerance:g}: {verdict.where}"
    )
