"""Proof that workers hold the weights they say: they reproduce logprobs that others know.

With a probe from the trainer, each worker must reproduce its numbers, and what it says must tell
new weights from old (see `judgement`). Without one, all workers must agree with each other on
built-in sequences, and differ from what they said before. A worker that can tell the digest of what
it read must have read the checkpoint.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

import msgspec

from lockstep.backends.admin import ProbesStaged, TellsContents, WeightContents
from lockstep.checkpoint.digest import SCHEME, combined, differing
from lockstep.checkpoint.probe import Probe, builtin, compare
from lockstep.fleet.control.desired import Closeness, Reference
from lockstep.fleet.member import Failures, Member, each
from lockstep.fleet.update.judgement import Contents, Judgement, Witness, judge
from lockstep.tokens.errors import Conflict, Disproved
from lockstep.tokens.operation import Evidence, Operation, WorkerResult

Scores = tuple[tuple[float, ...], ...]
CLOSE = 1e-4
"""How far workers may be apart on the built-in probe: kernels differ in the last bits."""
BUILTIN = builtin(256, 160)
"""Sequences of ids that every vocabulary has."""
UNLIKE = Closeness(math.inf, math.inf)
"""Of a worker whose closeness to a trainer was not measured."""


def reference_of(probe: Probe | None) -> Reference | None:
    """What a trainer's probe demands, if it gave one."""
    if probe is None:
        return None
    previous = probe.previous and tuple(
        row if all(map(math.isfinite, row)) else () for row in probe.previous
    )
    return Reference(probe.sequences, probe.logprobs, probe.tolerance, previous, probe.dtype)


class Proof:
    """What a transaction asks before and after. `probe` is the trainer's, if it gave one.

    Workers that can prove the new weights while they are still staged do so `ahead`, and then
    commit those very weights or nothing: they are not asked again. The others prove them `after`.
    """

    def __init__(
        self,
        probe: Reference | None = None,
        *,
        tensors: Mapping[str, str] | None = None,
        sequences: Sequence[Sequence[int]] = BUILTIN,
        tolerance: float = CLOSE,
        same: bool = False,
    ) -> None:
        """`tensors` are the digests of the new weights, where they are known; `same` says that
        they are the old ones, byte for byte."""
        self._same = same
        self._probe = probe
        self._tensors = tensors
        self._sequences = probe.sequences if probe else tuple(tuple(s) for s in sequences)
        self._tolerance = tolerance
        self._before: dict[Member, Scores] = {}
        self._reference: Reference | None = probe
        self._stale = False
        self._ahead: dict[Member, tuple[ProbesStaged, str]] = {}

    async def before(self, members: list[Member], seconds: float, operation: Operation) -> None:
        """Asks what the live weights answer. Members that cannot say are judged without it."""
        self._before, _ = await collect_scores(
            "ask", members, self._sequences, None, seconds, operation
        )

    async def ahead(
        self, members: list[Member], seconds: float, operation: Operation
    ) -> tuple[list[Member], Failures]:
        """Who may be given the staged weights: all but those that disproved them, and why.

        Without a trainer's probe nobody can be judged before all can answer.
        """
        able = {m: m.admin for m in members if isinstance(m.admin, ProbesStaged)}
        proofs: dict[Member, str] = {}
        contents: dict[Member, WeightContents] = {}

        async def staged(member: Member) -> Scores:
            said = await able[member].probe_staged(self._sequences)
            proofs[member] = said.proof
            contents[member] = held = await contents_of(member, self._tensors, staged=True)
            if held.proof not in (None, said.proof):
                raise Conflict("what is staged was replaced while it was probed: update again")
            return _frozen(said.logprobs)

        if not able or (self._probe is None and len(able) < len(members)):
            return members, {}
        scores, failed = await _asked("prove", list(able), staged, seconds, operation)
        proved, wrong = self._judge(scores, contents, operation)
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
            return self._settled(early), early, {}
        contents: dict[Member, WeightContents] = {}

        async def live(member: Member) -> Scores:
            said = await scores_of(member, self._sequences)
            contents[member] = await contents_of(member, self._tensors)
            return said

        scores, failed = await _asked("prove", late, live, seconds, operation)
        proved, wrong = self._judge(scores, contents, operation)
        return self._settled(early + proved), early + proved, failed | wrong

    def _settled(self, proved: list[Member]) -> Reference | None:
        """What those that join later are judged by: also by what the proved ones said before."""
        reference = self._reference
        if reference is None:
            return None
        said = next((self._before[m] for m in proved if m in self._before), None)
        previous = None if self._same else reference.previous or said
        followed = [m.closeness for m in proved if m.closeness is not None]
        closeness = max(followed, key=lambda one: one.mean, default=None)
        return msgspec.structs.replace(reference, previous=previous, closeness=closeness)

    def _judge(
        self,
        scores: dict[Member, Scores],
        contents: Mapping[Member, WeightContents],
        operation: Operation,
    ) -> tuple[list[Member], Failures]:
        """Who said what the new weights say. Without a trainer's probe most of them decide that."""
        if self._reference is None:
            self._reference = self._common(scores)
        wrong: Failures = {}
        judged: dict[object, Judgement] = {}
        for member, said in scores.items():
            held = contents.get(member, WeightContents())
            before = self._before.get(member)
            # Most say the same to the bit: in a large fleet it is judged once.
            case = (said, before, member.closeness, held.digest, held.dtype)
            if case not in judged:
                judged[case] = self._verdict(member, said, held)
            verdict = judged[case]
            result = operation.workers.setdefault(member.id, WorkerResult())
            result.evidence = replace(verdict.evidence)
            if verdict.error is not None:
                wrong[member] = verdict.error
            elif self._probe is not None:
                member.closeness = verdict.closeness
        return [member for member in scores if member not in wrong], wrong

    def _verdict(self, member: Member, said: Scores, held: WeightContents) -> Judgement:
        matches = match(self._tensors, held)
        if matches == "mismatch" and self._tensors is not None:
            return _misread(self._tensors, held)
        evidence = Evidence(decided_by="majority", digest=matches)
        if self._reference is None:
            why = "most workers must agree on a new answer, and it differ from the one before"
            return Judgement(evidence, UNLIKE, Disproved(why))
        if self._probe is not None:
            witness = Witness(
                contents=matches,
                before=self._before.get(member),
                known=member.closeness,
                dtype=held.dtype,
                same=self._same,
            )
            return judge(said, self._reference, witness)
        error = differs(said, self._reference)
        if error is None and self._stale:
            evidence.decided_by = "digest"
            if matches != "match":
                error = Disproved(
                    "its answer does not differ from the one before, and it tells no digest of "
                    "what it read: nothing tells the new weights from the old"
                )
        return Judgement(evidence, UNLIKE, error)

    async def unchanged(
        self, members: list[Member], seconds: float, operation: Operation
    ) -> tuple[list[Member], Failures]:
        """Who answers again what it answered before."""
        scores, failed = await collect_scores(
            "prove", members, self._sequences, None, seconds, operation
        )
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
        self._stale = any(differs(old, found) is None for old in set(self._before.values()))
        return found if not self._stale or self._tensors is not None else None


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


async def collect_scores(
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


async def contents_of(
    member: Member, expected: Mapping[str, str] | None, *, staged: bool = False
) -> WeightContents:
    """What the member says that it read; each tensor of it where it is not what was expected."""
    driver = member.admin
    if not isinstance(driver, TellsContents):
        return WeightContents()
    held = await driver.contents(staged=staged)
    if match(expected, held) == "mismatch":
        return await driver.contents(staged=staged, tensors=True)
    return held


def match(expected: Mapping[str, str] | str | None, held: WeightContents) -> Contents:
    """Whether a worker read what was expected: digests by name, or the one of them all."""
    if expected is None or held.digest is None:
        return "unknown"
    digest = expected if isinstance(expected, str) else combined(expected)
    if not digest.startswith(SCHEME):
        return "unknown"
    return "match" if held.digest == digest else "mismatch"


def _misread(expected: Mapping[str, str], held: WeightContents) -> Judgement:
    names = differing(expected, held.tensors) if held.tensors else "some tensors"
    why = f"it read other contents than the checkpoint has, in {names}"
    return Judgement(Evidence("digest", digest="mismatch"), UNLIKE, Disproved(why))


def differs(scores: Scores, reference: Reference) -> Disproved | None:
    """Why these scores are not those of a reference with a tolerance, or None. NaN never passes."""
    tolerance = reference.tolerance or 0.0
    verdict = compare(reference.logprobs, scores, tolerance)
    if verdict.passed:
        return None
    return Disproved(
        f"its logprobs are off by up to {verdict.max_difference:.3g}, allowed is "
        f"{tolerance:g}: {verdict.where}"
    )
