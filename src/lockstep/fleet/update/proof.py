"""The proof that workers hold the weights they claim, by what they hold and how they score.

A worker that can read back the weights it computes with must hold the checkpoint's. With a probe
from the trainer, each worker must reproduce its logprobs, and its scores must tell new weights from
old unless the read-back does (see `judgement`). Without a probe, most workers must score built-in
sequences alike, and differently than before. A worker that reports the digest of what it read must
have read the checkpoint.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from lockstep.backends.admin import (
    ProbesStaged,
    ReadBack,
    ReadsBack,
    TellsContents,
    WeightContents,
)
from lockstep.checkpoint.digest import SCHEME, combined, differing
from lockstep.checkpoint.probe import Probe, builtin, compare
from lockstep.fleet.fan_out import Failures, PhaseBudgets, run_phase
from lockstep.fleet.update.judgement import (
    Contents,
    Judgement,
    Witness,
    check_requirement,
    describe_other_weights,
    judge,
)
from lockstep.fleet.worker import Worker
from lockstep.storage.desired_state import Closeness, Reference
from lockstep.tokens.errors import Conflict, Disproved
from lockstep.tokens.operation import Evidence, Operation, RequiredProof, WorkerResult

Scores = tuple[tuple[float, ...], ...]
CLOSE = 1e-4
"""Largest difference between workers on the built-in probe: kernels differ in the last bits."""
BUILTIN = builtin(256, 160)
"""Sequences of ids that every vocabulary has."""
UNLIKE = Closeness(math.inf, math.inf)
"""Closeness of a worker that was not compared with a trainer."""


def reference_of(probe: Probe | None) -> Reference | None:
    """Return the reference of a trainer's probe; None if it sent none."""
    if probe is None:
        return None
    previous = probe.previous and tuple(
        row if all(map(math.isfinite, row)) else () for row in probe.previous
    )
    return Reference(probe.sequences, probe.logprobs, probe.tolerance, previous, probe.dtype)


@dataclass(frozen=True, slots=True)
class Held:
    """Report of a worker's weights: the contents it read, and those it computes with."""

    contents: WeightContents = field(default_factory=WeightContents)
    read_back: ReadBack | None = None

    @property
    def key(self) -> object:
        """Equal for reports that are judged alike."""
        report, contents = self.read_back, self.contents
        summary = report and (report.elements, str(report.first), tuple(report.unread))
        return contents.digest, contents.dtype, contents.in_memory, summary


class Proof:
    """The proof of one transaction. `probe` is the trainer's, if it sent one.

    Workers that can score staged weights prove them while staged, and then commit those very
    weights or nothing: they are not probed again. The others prove the weights once committed.
    """

    def __init__(
        self,
        probe: Reference | None = None,
        *,
        tensors: Mapping[str, str] | None = None,
        sequences: Sequence[Sequence[int]] = BUILTIN,
        tolerance: float = CLOSE,
        same: bool = False,
        require: RequiredProof = "any",
    ) -> None:
        """`tensors` are the digests of the new weights, where known. `same` says that the new
        weights equal the old ones byte for byte. `require` is what every worker must show."""
        self._same = same
        self._require = require
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
        """Take the scores of the live weights. Workers without scores are judged without them."""
        self._before, _ = await collect_scores(
            "baseline", workers, self._sequences, None, budget, operation
        )

    async def prove_staged(
        self, workers: list[Worker], budget: PhaseBudgets, operation: Operation
    ) -> tuple[list[Worker], Failures]:
        """Return the workers that may commit what they staged, and why the others may not. Without
        a trainer's probe, no worker can be judged before all have scored."""
        able = {w: w.control for w in workers if isinstance(w.control, ProbesStaged)}
        proofs: dict[Worker, str] = {}
        held: dict[Worker, Held] = {}

        async def score_staged(worker: Worker) -> Scores:
            scored = await able[worker].probe_staged(self._sequences)
            proofs[worker] = scored.proof
            contents = await contents_of(worker, self._tensors, staged=True)
            held[worker] = Held(contents)
            # Scores and digest are two calls. Both must be of the same staged weights.
            if contents.proof not in (None, scored.proof):
                raise Conflict("the staged weights were replaced while probed: update again")
            return _frozen(scored.logprobs)

        # Without a probe the majority of all workers decides. A vote among some of them now and the
        # others after the commit could end differently.
        if not able or (self._probe is None and len(able) < len(workers)):
            return workers, {}
        scores, failed = await _collect("prove", list(able), score_staged, budget, operation)
        proved, wrong = self._judge(scores, held, operation)
        self._proved_staged = {worker: (able[worker], proofs[worker]) for worker in proved}
        failed |= wrong
        return [worker for worker in workers if worker not in failed], failed

    def only_swaps(self, workers: Iterable[Worker]) -> bool:
        """Return whether all these workers have proved what they will commit, so nothing is
        loaded."""
        return all(worker in self._proved_staged for worker in workers)

    async def commit(self, worker: Worker, version: str) -> None:
        """Swap the worker's weights, to exactly those it proved while staged, where it did."""
        if worker in self._proved_staged:
            driver, proof = self._proved_staged[worker]
            await driver.commit_proved(version, proof)
        else:
            await worker.control.commit(version)

    async def resume(self, worker: Worker) -> None:
        """Let the worker generate, on exactly the weights it proved while staged, where it did."""
        if worker in self._proved_staged:
            driver, proof = self._proved_staged[worker]
            await driver.resume_proved(proof)
        else:
            await worker.control.resume()

    async def prove_committed(
        self, workers: list[Worker], budget: PhaseBudgets, operation: Operation
    ) -> tuple[Reference | None, list[Worker], Failures]:
        """Return the reference of the new weights, the workers that proved it, and the others'
        errors.

        All `workers` have committed. Those that proved the weights while staged are not probed
        again.
        """
        early = [worker for worker in workers if worker in self._proved_staged]
        late = [worker for worker in workers if worker not in self._proved_staged]
        if not late:
            return self._final_reference(early), early, {}
        held: dict[Worker, Held] = {}

        async def score_live(worker: Worker) -> Scores:
            contents = await contents_of(worker, self._tensors)
            held[worker] = Held(contents, await read_back_of(worker))
            return await scores_of(worker, self._sequences)

        scores, failed = await _collect("prove", late, score_live, budget, operation)
        proved, wrong = self._judge(scores, held, operation)
        return self._final_reference(early + proved), early + proved, failed | wrong

    def _final_reference(self, proved: list[Worker]) -> Reference | None:
        """Return the reference for workers that join later, with the old scores of a proved
        worker."""
        reference = self._reference
        if reference is None:
            return None
        before = next((self._before[w] for w in proved if w in self._before), None)
        previous = None if self._same else reference.previous or before
        followed = [w.closeness for w in proved if w.closeness is not None]
        closeness = max(followed, key=lambda closeness: closeness.mean, default=None)
        return msgspec.structs.replace(reference, previous=previous, closeness=closeness)

    def _judge(
        self,
        scores: dict[Worker, Scores],
        reports: Mapping[Worker, Held],
        operation: Operation,
    ) -> tuple[list[Worker], Failures]:
        """Return the workers that score like the new weights, and why the others do not. Without a
        trainer's probe, the majority decides how the new weights score."""
        if self._reference is None:
            self._reference = self._common(scores)
        wrong: Failures = {}
        judged: dict[object, Judgement] = {}
        for worker, logprobs in scores.items():
            held = reports.get(worker, Held())
            before = self._before.get(worker)
            # In a large fleet most workers score alike to the bit, and are judged once.
            case = (logprobs, before, worker.closeness, held.key)
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

    def _verdict(self, worker: Worker, scores: Scores, held: Held) -> Judgement:
        matches = match(self._tensors, held.contents)
        if matches == "mismatch" and self._tensors is not None:
            return _misread(self._tensors, held.contents)
        witness = Witness(
            contents=matches,
            held=held.read_back,
            in_memory=held.contents.in_memory,
            before=self._before.get(worker),
            earlier=worker.closeness,
            dtype=held.contents.dtype,
            same=self._same,
        )
        if self._probe is not None and self._reference is not None:
            verdict = judge(scores, self._reference, witness)
        else:
            verdict = self._vote(scores, witness)
        if verdict.error is None:
            verdict = replace(verdict, error=check_requirement(self._require, witness))
        return verdict

    def _vote(self, scores: Scores, witness: Witness) -> Judgement:
        """Judge a worker by the majority's scores, as the trainer sent no probe."""
        evidence = witness.evidence()
        evidence.decided_by, evidence.scope = "majority", witness.scope()
        error: Disproved | None = None
        if witness.held is not None and witness.held.different:
            evidence.decided_by = "held"
            error = Disproved(describe_other_weights(witness.held))
        elif self._reference is None:
            why = "most workers must agree on scores that differ from those before"
            error = Disproved(why)
        else:
            error = differs(scores, self._reference)
            if witness.is_held:
                evidence.decided_by = "held"
            elif error is None and self._stale:
                evidence.decided_by = "digest"
                if not witness.is_shown:
                    error = Disproved(
                        "its scores do not differ from those before, and it does not show the "
                        f"weights it computes with ({witness.describe_gap()}): nothing tells the "
                        "new weights from the old"
                    )
        return Judgement(evidence, UNLIKE, error)

    async def prove_unchanged(
        self, workers: list[Worker], budget: PhaseBudgets, operation: Operation
    ) -> tuple[list[Worker], Failures]:
        """Return the workers that hold and score what they did before the update, and why the
        others do not."""
        reports: dict[Worker, ReadBack | None] = {}

        async def score(worker: Worker) -> Scores:
            reports[worker] = await read_back_of(worker)
            return await scores_of(worker, self._sequences)

        scores, failed = await _collect("prove", workers, score, budget, operation)
        good: list[Worker] = []
        for worker, logprobs in scores.items():
            before, report = self._before.get(worker), reports[worker]
            if report is not None and report.different:
                failed[worker] = Disproved(describe_other_weights(report))
            elif before is None:
                failed[worker] = Disproved("its scores before the update are not known")
            elif (error := differs(logprobs, Reference(self._sequences, before, CLOSE))) is None:
                good.append(worker)
            else:
                failed[worker] = error
        return good, failed

    def _common(self, scores: dict[Worker, Scores]) -> Reference | None:
        """Return the scores of most workers, unless they equal the scores before."""
        common = majority(scores, self._sequences, self._tolerance)
        if common is None or self._same:
            return common
        self._stale = any(differs(old, common) is None for old in set(self._before.values()))
        return common if not self._stale or self._tensors is not None else None


def majority(
    scores: dict[Worker, Scores], sequences: tuple[tuple[int, ...], ...], tolerance: float
) -> Reference | None:
    """Return the scores of more than half of the workers. With fewer, it is unknown which are
    right."""
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
    """Return the scores of each worker, and the errors of those that have none."""
    return await _collect(
        phase, workers, lambda worker: scores_of(worker, sequences, adapter), budget, operation
    )


async def collect_adapter_scores(
    phase: str,
    workers: list[Worker],
    sequences: tuple[tuple[int, ...], ...],
    adapter: str,
    directory: Path,
    budget: PhaseBudgets,
    operation: Operation,
) -> tuple[dict[Worker, Scores], dict[Worker, Held], Failures]:
    """Return scores under an adapter, what each worker holds of it, and the errors of those that
    have none."""
    held: dict[Worker, Held] = {}

    async def score(worker: Worker) -> Scores:
        scores = await scores_of(worker, sequences, adapter)
        # After the scores: the request tells the engine which adapter the name stands for.
        report = await read_back_of(worker, adapter, directory)
        held[worker] = Held(await contents_of(worker, None), report)
        return scores

    scores, failed = await _collect(phase, workers, score, budget, operation)
    return scores, held, failed


async def _collect(
    phase: str,
    workers: list[Worker],
    call: Callable[[Worker], Awaitable[Scores]],
    budget: PhaseBudgets,
    operation: Operation,
) -> tuple[dict[Worker, Scores], Failures]:
    scores: dict[Worker, Scores] = {}

    async def collect(worker: Worker) -> None:
        scores[worker] = await call(worker)

    _, failed = await run_phase(
        phase, workers, collect, budget.prove, operation, straggler=budget.straggler
    )
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
    """Return what the worker reports to have read; tensor by tensor where it was not as
    expected."""
    driver = worker.control
    if not isinstance(driver, TellsContents):
        return WeightContents()
    held = await driver.contents(staged=staged)
    if match(expected, held) == "mismatch":
        return await driver.contents(staged=staged, tensors=True)
    return held


async def read_back_of(
    worker: Worker, adapter: str | None = None, path: Path | None = None
) -> ReadBack | None:
    """Return the comparison of the weights, or of an adapter, that a worker computes with; None
    where it cannot read them back."""
    driver = worker.control
    if not isinstance(driver, ReadsBack):
        return None
    return await driver.read_back(adapter=adapter, path=path)


def match(expected: Mapping[str, str] | str | None, held: WeightContents) -> Contents:
    """Compare what a worker read with the expected digests, by name or combined."""
    if expected is None or held.digest is None:
        return "unknown"
    digest = expected if isinstance(expected, str) else combined(expected)
    if not digest.startswith(SCHEME):
        return "unknown"
    return "match" if held.digest == digest else "mismatch"


def _misread(expected: Mapping[str, str], held: WeightContents) -> Judgement:
    names = differing(expected, held.tensors) if held.tensors else "some tensors"
    why = f"it read contents that differ from the checkpoint, in {names}"
    return Judgement(Evidence("digest", digest="mismatch"), UNLIKE, Disproved(why))


def differs(scores: Scores, reference: Reference) -> Disproved | None:
    """Return why scores differ from a reference with a tolerance, or None. NaN always differs."""
    tolerance = reference.tolerance or 0.0
    verdict = compare(reference.logprobs, scores, tolerance)
    if verdict.passed:
        return None
    return Disproved(
        f"its logprobs are off by up to {verdict.max_difference:.3g}, allowed is "
        f"{tolerance:g}: {verdict.where}"
    )
