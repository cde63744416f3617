"""Proof that workers hold the weights they say: they reproduce logprobs that others know.

With a probe from the trainer, each worker must reproduce its numbers. Without one, all workers
must agree with each other on built-in sequences, and differ from what they said before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from lockstep.backends.admin import ProbesStaged
from lockstep.fleet.desired import Reference
from lockstep.fleet.member import Failures, Member, each
from lockstep.tokens.errors import Disproved
from lockstep.tokens.operation import Operation
from lockstep.wire.probe import Probe, builtin, compare

Scores = tuple[tuple[float, ...], ...]
CLOSE = 1e-4
"""How far workers may be apart on the built-in probe: kernels differ in the last bits."""
BUILTIN = builtin(256, 160)
"""Sequences of ids that every vocabulary has."""


def reference_of(probe: Probe | None) -> Reference | None:
    """What a trainer's probe demands, if it gave one."""
    if probe is None:
        return None
    return Reference(probe.sequences, probe.logprobs, probe.tolerance)


class Proof:
    """What a transaction asks before and after. `probe` is the trainer's, if it gave one.

    Workers that can prove the new weights while they are still staged do so `ahead`, and then
    commit those very weights or nothing: they are not asked again. The others prove them `after`.
    """

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
        self._reference: Reference | None = probe
        self._ahead: dict[Member, tuple[ProbesStaged, str]] = {}

    async def before(self, members: list[Member], seconds: float, operation: Operation) -> None:
        """Asks what the live weights answer. Members that cannot say are judged without it."""
        self._before, _ = await ask("ask", members, self._sequences, None, seconds, operation)

    async def ahead(
        self, members: list[Member], seconds: float, operation: Operation
    ) -> tuple[list[Member], Failures]:
        """Who may be given the staged weights: all but those that disproved them, and why.

        Without a trainer's probe nobody can be judged before all can answer.
        """
        able = {m: m.admin for m in members if isinstance(m.admin, ProbesStaged)}
        proofs: dict[Member, str] = {}

        async def staged(member: Member) -> Scores:
            said = await able[member].probe_staged(self._sequences)
            proofs[member] = said.proof
            return _frozen(said.logprobs)

        if not able or (self._probe is None and len(able) < len(members)):
            return members, {}
        scores, failed = await _asked("prove", list(able), staged, seconds, operation)
        proved, wrong = self._judge(scores)
        self._ahead = {member: (able[member], proofs[member]) for member in proved}
        failed |= wrong
        return [member for member in members if member not in failed], failed

    async def commit(self, member: Member, version: str) -> None:
        """Swaps the member's weights: for those it proved ahead, where it did."""
        if member in self._ahead:
            driver, proof = self._ahead[member]
            await driver.commit_proved(version, proof)
        else:
            await member.admin.commit(version)

    async def resume(self, member: Member) -> None:
        """Lets the member generate: for those it proved ahead, where it did."""
        if member in self._ahead:
            driver, proof = self._ahead[member]
            await driver.resume_proved(proof)
        else:
            await member.admin.resume()

    async def after(
        self, members: list[Member], seconds: float, operation: Operation
    ) -> tuple[Reference | None, list[Member], Failures]:
        """Who holds the new weights: the reference they share, those that proved it, the others.

        Of `members`, which have all committed, nobody is asked who proved it ahead.
        """
        early = [member for member in members if member in self._ahead]
        late = [member for member in members if member not in self._ahead]
        if not late:
            return self._reference, early, {}
        scores, failed = await ask("prove", late, self._sequences, None, seconds, operation)
        proved, wrong = self._judge(scores)
        return self._reference, early + proved, failed | wrong

    def _judge(self, scores: dict[Member, Scores]) -> tuple[list[Member], Failures]:
        """Who said what the new weights say. Without a trainer's probe most of them decide that."""
        if self._reference is None:
            self._reference = self._common(scores)
        if self._reference is None:
            why = "most workers must agree on a new answer, and it differ from the one before"
            return [], {member: Disproved(why) for member in scores}
        # Most say the same to the bit: in a large fleet it is judged once.
        verdicts = {said: differs(said, self._reference) for said in set(scores.values())}
        wrong: Failures = {}
        wrong |= {m: error for m, said in scores.items() if (error := verdicts[said]) is not None}
        return [member for member in scores if member not in wrong], wrong

    async def unchanged(
        self, members: list[Member], seconds: float, operation: Operation
    ) -> tuple[list[Member], Failures]:
        """Who answers again what it answered before."""
        scores, failed = await ask("prove", members, self._sequences, None, seconds, operation)
        good: list[Member] = []
        for member, said in scores.items():
            before = self._before.get(member)
            if before is None:
                failed[member] = Disproved("what it answered before is not known")
            elif (error := differs(said, Reference(self._sequences, before, CLOSE))) is None:
                good.append(member)
            else:
                failed[member] = error
        return good, failed

    def _common(self, scores: dict[Member, Scores]) -> Reference | None:
        """What most of them say, unless it is what they said before."""
        found = majority(scores, self._sequences, self._tolerance)
        if found is None or self._same:
            return found
        stale = any(differs(old, found) is None for old in set(self._before.values()))
        return None if stale else found


def majority(
    scores: dict[Member, Scores], sequences: tuple[tuple[int, ...], ...], tolerance: float
) -> Reference | None:
    """What more than half of them say: with fewer, nobody knows who is right."""
    votes: dict[Reference, int] = {}
    for said, count in Counter(scores.values()).items():
        near = (one for one in votes if differs(said, one) is None)
        one = next(near, Reference(sequences, said, tolerance))
        votes[one] = votes.get(one, 0) + count
    best = max(votes, key=votes.__getitem__, default=None)
    return None if best is None or votes[best] * 2 <= len(scores) else best


async def ask(
    phase: str,
    members: list[Member],
    sequences: tuple[tuple[int, ...], ...],
    adapter: str | None,
    seconds: float,
    operation: Operation,
) -> tuple[dict[Member, Scores], Failures]:
    """What each member answers, and the errors of those that cannot."""

    async def one(member: Member) -> Scores:
        return await scores_of(member, sequences, adapter)

    return await _asked(phase, members, one, seconds, operation)


async def _asked(
    phase: str,
    members: list[Member],
    call: Callable[[Member], Awaitable[Scores]],
    seconds: float,
    operation: Operation,
) -> tuple[dict[Member, Scores], Failures]:
    scores: dict[Member, Scores] = {}

    async def one(member: Member) -> None:
        scores[member] = await call(member)

    _, failed = await each(phase, members, one, seconds, operation)
    return {m: s for m, s in scores.items() if m not in failed}, failed


async def scores_of(
    member: Member, sequences: tuple[tuple[int, ...], ...], adapter: str | None = None
) -> Scores:
    return _frozen(await member.admin.probe(sequences, adapter=adapter))


def _frozen(scores: list[list[float]]) -> Scores:
    return tuple(map(tuple, scores))


def differs(scores: Scores, reference: Reference) -> Disproved | None:
    """Why these scores are not those of the reference, or None. NaN never passes."""
    verdict = compare(reference.logprobs, scores, reference.tolerance)
    if verdict.passed:
        return None
    return Disproved(
        f"its logprobs are off by up to {verdict.max_difference:.3g}, allowed is "
        f"{reference.tolerance:g}: {verdict.where}"
    )
