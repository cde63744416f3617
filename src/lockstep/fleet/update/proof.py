"""Proves that workers hold the weights they claim: they must reproduce known logprobs.

With a probe from the trainer, each worker must reproduce its logprobs, and its scores must tell new
weights from old (see `judgement`). Without one, most workers must score built-in sequences the
same, and otherwise than before. A worker that can tell the digest of what it read must have read
the checkpoint.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from lockstep.backends.admin import ProbesStaged, TellsContents, WeightContents
from lockstep.checkpoint.digest import SCHEME, combined, differing
from lockstep.checkpoint.probe import Probe, builtin, compare
from lockstep.fleet.fan_out import Failures, PhaseBudgets, each
from lockstep.fleet.update.judgement import Contents, Judgement, Witness, judge
from lockstep.fleet.worker import Worker
from lockstep.storage.desired_state import Closeness, Reference
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
    """The proof of one transaction. `probe` is the trainer's, if it sent one.

    Workers that can score weights that are still staged prove them then, and commit those very
    weights or nothing: they are not probed again. The others prove them once committed.
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
        self._before: dict[Worker, Scores] = {}
        self._reference: Reference | None = probe
        self._stale = False
        self._proved_staged: dict[Worker, tuple[ProbesStaged, str]] = {}

    async def before(
        self, workers: list[Worker], budget: PhaseBudgets, operation: Operation
    ) -> None:
        """Takes the scores of the live weights. Workers that have none are judged without them."""
        self._before, _ = await collect_scores(
            "baseline", workers, self._sequences, None, budget, operation
        )

    async def prove_staged(
        self, workers: list[Worker], budget: PhaseBudgets, operation: Operation
    ) -> tuple[list[Worker], Failures]:
        """The workers that may commit what they staged, and why the others may not.

        Without a trainer's probe no worker can be judged before all have scored.
        """
        able = {w: w.control for w in workers if isinstance(w.control, ProbesStaged)}
        proofs: dict[Worker, str] = {}
        contents: dict[Worker, WeightContents] = {}

        async def staged(worker: Worker) -> Scores:
            scored = await able[worker].probe_staged(self._sequences)
            proofs[worker] = scored.proof
            contents[worker] = held = await contents_of(worker, self._tensors, staged=True)
            if held.proof not in (None, scored.proof):
                raise Conflict("what is staged was replaced while it was probed: update again")
            return _frozen(scored.logprobs)

        if not able or (self._probe is None and len(able) < len(workers)):
            return workers, {}
        scores, failed = await _collect("prove", list(able), staged, budget, operation)
        proved, wrong = self._judge(scores, contents, operation)
        self._proved_staged = {worker: (able[worker], proofs[worker]) for worker in proved}
        failed |= wrong
        return [worker for worker in workers if worker not in failed], failed

    def only_swaps(self, workers: Iterable[Worker]) -> bool:
        """Whether all of them have proved what they will commit: then nothing is left to load."""
        return all(worker in self._proved_staged for worker in workers)

    async def commit(self, worker: Worker, version: str) -> None:
        """Swaps the worker's weights: for those it proved while staged, where it did."""
        if worker in self._proved_staged:
            driver, proof = self._proved_staged[worker]
            await driver.commit_proved(version, proof)
        else:
            await worker.control.commit(version)

    async def resume(self, worker: Worker) -> None:
        """Lets the worker generate: on those it proved while staged, where it did."""
        if worker in self._proved_staged:
            driver, proof = self._proved_staged[worker]
            await driver.resume_proved(proof)
        else:
            await worker.control.resume()

    async def prove_committed(
        self, workers: list[Worker], budget: PhaseBudgets, operation: Operation
    ) -> tuple[Reference | None, list[Worker], Failures]:
        """The reference of the new weights, the workers that proved it, and why the others did not.

        All `workers` have committed; those that proved it while staged are not probed again.
        """
        early = [worker for worker in workers if worker in self._proved_staged]
        late = [worker for worker in workers if worker not in self._proved_staged]
        if not late:
            return self._settled(early), early, {}
        contents: dict[Worker, WeightContents] = {}

        async def live(worker: Worker) -> Scores:
            scores = await scores_of(worker, self._sequences)
            contents[worker] = await contents_of(worker, self._tensors)
            return scores

        scores, failed = await _collect("prove", late, live, budget, operation)
        proved, wrong = self._judge(scores, contents, operation)
        return self._settled(early + proved), early + proved, failed | wrong

    def _settled(self, proved: list[Worker]) -> Reference | None:
        """What workers that join later are judged by; also by the old scores of a proved one."""
        reference = self._reference
        if reference is None:
            return None
        before = next((self._before[w] for w in proved if w in self._before), None)
        previous = None if self._same else reference.previous or before
        followed = [w.closeness for w in proved if w.closeness is not None]
        closeness = max(followed, key=lambda one: one.mean, default=None)
        return msgspec.structs.replace(reference, previous=previous, closeness=closeness)

    def _judge(
        self,
        scores: dict[Worker, Scores],
        contents: Mapping[Worker, WeightContents],
        operation: Operation,
    ) -> tuple[list[Worker], Failures]:
        """Who scores as the new weights do. Without a trainer's probe most of them decide that."""
        if self._reference is None:
            self._reference = self._common(scores)
        wrong: Failures = {}
        judged: dict[object, Judgement] = {}
        for worker, logprobs in scores.items():
            held = contents.get(worker, WeightContents())
            before = self._before.get(worker)
            # Most score the same to the bit: in a large fleet it is judged once.
            case = (logprobs, before, worker.closeness, held.digest, held.dtype)
            if case not in judged:
                judged[case] = self._verdict(worker, logprobs, held)
            verdict = judged[case]
            result = operation.workers.setdefault(worker.id, WorkerResult())
            result.evidence = replace(verdict.evidence)
            worker.judge(result.evidence)
            if verdict.error is not None:
                wrong[worker] = verdict.error
            elif self._probe is not None:
                worker.closeness = verdict.closeness
        return [worker for worker in scores if worker not in wrong], wrong

    def _verdict(self, worker: Worker, scores: Scores, held: WeightContents) -> Judgement:
        matches = match(self._tensors, held)
        if matches == "mismatch" and self._tensors is not None:
            return _misread(self._tensors, held)
        evidence = Evidence(decided_by="majority", digest=matches)
        if self._reference is None:
            why = "most workers must agree on new scores, which must differ from the ones before"
            return Judgement(evidence, UNLIKE, Disproved(why))
        if self._probe is not None:
            witness = Witness(
                contents=matches,
                before=self._before.get(worker),
                known=worker.closeness,
                dtype=held.dtype,
                same=self._same,
            )
            return judge(scores, self._reference, witness)
        error = differs(scores, self._reference)
        if error is None and self._stale:
            evidence.decided_by = "digest"
            if matches != "match":
                error = Disproved(
                    "its scores do not differ from the ones before, and it tells no digest of "
                    "what it read: nothing tells the new weights from the old"
                )
        return Judgement(evidence, UNLIKE, error)

    async def unchanged(
        self, workers: list[Worker], budget: PhaseBudgets, operation: Operation
    ) -> tuple[list[Worker], Failures]:
        """The workers that score as they did before the update, and why the others do not."""
        scores, failed = await collect_scores(
            "prove", workers, self._sequences, None, budget, operation
        )
        good: list[Worker] = []
        for worker, logprobs in scores.items():
            before = self._before.get(worker)
            if before is None:
                failed[worker] = Disproved("its scores before the update are not known")
            elif (error := differs(logprobs, Reference(self._sequences, before, CLOSE))) is None:
                good.append(worker)
            else:
                failed[worker] = error
        return good, failed

    def _common(self, scores: dict[Worker, Scores]) -> Reference | None:
        """The scores of most of them, unless they are those from before."""
        common = majority(scores, self._sequences, self._tolerance)
        if common is None or self._same:
            return common
        self._stale = any(differs(old, common) is None for old in set(self._before.values()))
        return common if not self._stale or self._tensors is not None else None


def majority(
    scores: dict[Worker, Scores], sequences: tuple[tuple[int, ...], ...], tolerance: float
) -> Reference | None:
    """The scores of more than half of them: with fewer, nobody knows who is right."""
    votes: dict[Reference, int] = {}
    for logprobs, count in Counter(scores.values()).items():
        near = (reference for reference in votes if differs(logprobs, reference) is None)
        choice = next(near, Reference(sequences, logprobs, tolerance))
        votes[choice] = votes.get(choice, 0) + count
    best = max(votes, key=votes.__getitem__, default=None)
    return None if best is None or votes[best] * 2 <= len(scores) else best


async def collect_scores(
    phase: str,
    workers: list[Worker],
    sequences: tuple[tuple[int, ...], ...],
    adapter: str | None,
    budget: PhaseBudgets,
    operation: Operation,
) -> tuple[dict[Worker, Scores], Failures]:
    """The scores of each worker, and the errors of those that have none."""
    return await _collect(
        phase, workers, lambda worker: scores_of(worker, sequences, adapter), budget, operation
    )


async def _collect(
    phase: str,
    workers: list[Worker],
    call: Callable[[Worker], Awaitable[Scores]],
    budget: PhaseBudgets,
    operation: Operation,
) -> tuple[dict[Worker, Scores], Failures]:
    scores: dict[Worker, Scores] = {}

    async def one(worker: Worker) -> None:
        scores[worker] = await call(worker)

    _, failed = await each(phase, workers, one, budget.prove, operation, straggler=budget.straggler)
    return {w: s for w, s in scores.items() if w not in failed}, failed


async def scores_of(
    worker: Worker, sequences: tuple[tuple[int, ...], ...], adapter: str | None = None
) -> Scores:
    return _frozen(await worker.control.probe(sequences, adapter=adapter))


def _frozen(scores: list[list[float]]) -> Scores:
    return tuple(map(tuple, scores))


async def contents_of(
    worker: Worker, expected: Mapping[str, str] | None, *, staged: bool = False
) -> WeightContents:
    """What the worker reports to have read; tensor by tensor where that was not expected."""
    driver = worker.control
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
