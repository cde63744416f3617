"""The judgement whether a worker holds the new weights, by read-back, digest and logprobs.

Four questions, and the worker must pass them all:

1. Contents. Where the worker reports the digest of what it loaded, it must be the checkpoint's.
2. Held weights. Where the worker can read back the weights it computes with, they must equal the
   contents, element by element. This decides between new and old weights, however small the step.
3. Closeness. Its logprobs must be the trainer's: bit for bit where the tolerance of the probe is 0,
   within it where there is one. Else mean and top (the maximum; for 16-bit types the 99 % quantile,
   as a token near the edge of an expert's routing may be off by whole nats) of the differences are
   bounded by the worker's noise, measured on the weights before: MEAN and TOP times as much.
   Without that, by UNKNOWN. The size of the step does not matter: it would hide stale tensors.
4. New or old. Its logprobs must be at least twice as near to the new weights' as to the old ones',
   by DEVIATIONS standard errors of the paired differences over the whole probe. Where old and new
   are closer to each other than APART times its noise, logprobs cannot tell: the held weights must,
   or the digest of an engine that computes with the very memory that was hashed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
import numpy.typing as npt

from lockstep.checkpoint.probe import compare
from lockstep.protocol.control.read_back import ReadBack
from lockstep.storage.desired_state import Closeness, Reference
from lockstep.tokens.errors import Disproved
from lockstep.tokens.operation import Evidence, RequiredProof

Scores = Sequence[Sequence[float]]
Contents = Literal["match", "mismatch", "unknown"]
Array = npt.NDArray[np.float64]
MEAN, TOP = 1.5, 2.0
APART, NEARER, DEVIATIONS = 2.0, 0.5, 5.0
COARSE = ("float32", "float16", "bfloat16")
"""From fine to coarse. A worker that does not report its type is assumed to use the coarsest."""
QUANTILE: Mapping[str, float] = MappingProxyType(
    {"float32": 1.0, "float16": 0.99, "bfloat16": 0.99}
)
UNKNOWN: Mapping[str, Closeness] = MappingProxyType(
    {
        "float32": Closeness(2e-5, 1e-4),
        "float16": Closeness(0.012, 0.05),
        "bfloat16": Closeness(0.1, 0.4),
    }
)
"""Bounds for a worker without a measured closeness.

In bfloat16 two to three times what right workers had under a float32 trainer (mean 0.026 to 0.037,
quantile 0.09 to 0.19), in float32 ten times and more. float16 was not measured; its bounds are
between, by its precision.
"""
LEAST: Mapping[str, Closeness] = MappingProxyType(
    {
        "float32": Closeness(2e-6, 1e-4),
        "float16": Closeness(2e-4, 2e-3),
        "bfloat16": Closeness(1e-3, 1e-2),
    }
)
"""Differences that are always allowed: a worker that agreed to the bit may round a logit
differently."""


@dataclass(frozen=True, slots=True)
class Witness:
    """Facts about one worker besides its scores.

    `before` are its scores under the weights it held before, `earlier` how closely it followed the
    right numbers then, `dtype` the type it computes in, `held` the comparison of the weights it
    computes with; each None where unknown. `in_memory` says that `contents` is about the memory
    that it computes with. `same` says that the new weights equal the old ones byte for byte.
    """

    contents: Contents = "unknown"
    held: ReadBack | None = None
    in_memory: bool = False
    before: Scores | None = None
    earlier: Closeness | None = None
    dtype: str | None = None
    same: bool = False

    @property
    def is_held(self) -> bool:
        """Whether every weight that it computes with was read back and is the checkpoint's."""
        held = self.held
        complete = held is not None and held.is_complete and not held.different
        return complete and self.contents == "match"

    @property
    def is_shown(self) -> bool:
        """Whether the memory that it computes with is known to hold the checkpoint's contents."""
        return self.is_held or (self.in_memory and self.contents == "match")

    def evidence(self) -> Evidence:
        """Return the evidence from contents and held weights, without logprobs."""
        evidence = Evidence(digest=self.contents)
        if self.held is not None:
            evidence.elements = self.held.elements
            evidence.held = "match" if self.held.is_complete else "partial"
            if self.held.different:
                evidence.held = "mismatch"
        return evidence

    def describe_gap(self) -> str:
        """Return why the weights that it computes with are not known to be the checkpoint's."""
        if self.contents != "match":
            return "it reports no digest of what it read"
        if self.held is None:
            return "its digest is of what it read, and it cannot read its weights back"
        return f"not read back: {self.held.describe_unread()}"

    def scope(self, noise: float | None = None) -> str:
        """Return what a worker with these facts proves; `noise` is that of its logprobs."""
        if self.is_held and self.held is not None:
            return f"held weights: {self.held.elements} elements read back, all as given"
        if self.is_shown:
            return "held weights: the memory that it computes with was hashed"
        scope = "behaviour only"
        if self.held is not None and self.held.unread:
            scope = f"not read back: {self.held.describe_unread()}; for these {scope}"
        if noise is None:
            return scope
        return f"{scope}, noise {noise:.2g}: smaller updates are not proved"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on a worker. `error` says why it was rejected, `closeness` how closely it
    followed."""

    evidence: Evidence
    closeness: Closeness
    error: Disproved | None = None


def judge(scores: Scores, reference: Reference, witness: Witness) -> Judgement:
    """Judge whether scores, and what else is known, prove the weights of the reference."""
    shape = compare(reference.logprobs, scores, math.inf)
    evidence = witness.evidence()
    if not math.isfinite(shape.max_difference):
        error = Disproved(f"its logprobs are wrong: {shape.where}")
        return Judgement(evidence, Closeness(math.inf, math.inf), error)
    case = _Case.of(scores, reference, witness)
    evidence.max_difference = float(shape.max_difference)
    evidence.mean_difference = case.closeness.mean
    if witness.contents == "mismatch":
        evidence.decided_by = "digest"
        why: str | None = "it read contents that differ from the checkpoint"
    elif witness.held is not None and witness.held.different:
        evidence.decided_by = "held"
        why = describe_other_weights(witness.held)
    else:
        evidence.scope = witness.scope(case.noise)
        why = case.too_far(scores, evidence) or case.not_told(evidence)
    return Judgement(evidence, case.closeness, None if why is None else Disproved(why))


def check_requirement(require: RequiredProof, witness: Witness) -> Disproved | None:
    """Return the error of a worker that shows less than the operator requires, or None."""
    if require == "any" or witness.is_shown:
        return None
    return Disproved(
        f"--require-proof held is set, and this worker shows less: {witness.describe_gap()}; serve "
        "with Lockstep's own engine or with vLLM and Lockstep's worker extension"
    )


def describe_other_weights(held: ReadBack) -> str:
    """Return why a worker is rejected whose held weights differ from those it was given."""
    return f"it computes with other weights than it was given: {held.describe_difference()}"


@dataclass(frozen=True, slots=True)
class _Case:
    """The numbers of one worker, flat: its scores, those of new and old weights, its noise, the
    step."""

    reference: Reference
    witness: Witness
    dtype: str
    measured: Array
    new: Array
    old: Array | None
    earlier: Closeness | None
    closeness: Closeness
    step: float

    @classmethod
    def of(cls, scores: Scores, reference: Reference, witness: Witness) -> _Case:
        new, measured = _flat(reference.logprobs), _flat(scores)
        dtype = _coarser(reference.dtype or COARSE[0], witness.dtype or COARSE[-1])
        trained = _previous(reference)
        before = None if witness.before is None else _flat(witness.before)
        if before is not None and before.shape != new.shape:
            before = None
        followed = _earlier_closeness(before, trained, dtype)
        # The trainer's own numbers have no noise, but count only if the worker held those weights.
        apart = trained if before is None or followed is not None else before
        return cls(
            reference=reference,
            witness=witness,
            dtype=dtype,
            measured=measured,
            new=new,
            old=trained if before is None else before,
            earlier=followed or witness.earlier or reference.closeness,
            closeness=_closeness(measured, new, dtype),
            step=0.0 if apart is None else float(np.nanmean(np.abs(new - apart))),
        )

    @property
    def noise(self) -> float:
        """Mean difference of a worker with the right weights."""
        least, most = LEAST[self.dtype].mean, UNKNOWN[self.dtype].mean
        noise = most if self.earlier is None else max(self.earlier.mean, least)
        return noise if self.reference.tolerance is None else min(noise, self.reference.tolerance)

    def too_far(self, scores: Scores, evidence: Evidence) -> str | None:
        """Return why the scores are not those of the new weights, or None."""
        tolerance, closeness = self.reference.tolerance, self.closeness
        evidence.decided_by = "bits" if tolerance == 0.0 else "scores"
        if tolerance is not None:
            evidence.bound = tolerance
            verdict = compare(self.reference.logprobs, scores, tolerance)
            if verdict.passed:
                return None
            return (
                f"its logprobs are off by up to {verdict.max_difference:.3g}, allowed is "
                f"{tolerance:g}: {verdict.where}"
            )
        allowed, least = UNKNOWN[self.dtype], LEAST[self.dtype]
        why = f"the maximum for {self.dtype}, as its closeness on the weights before is not known"
        if (earlier := self.earlier) is not None:
            # With the weights read back, logprobs need only show that nothing else is wrong, and
            # the noise on the weights before may be too narrow after a large step.
            least = allowed if self.witness.is_held else least
            allowed = Closeness(
                max(least.mean, MEAN * earlier.mean), max(least.top, TOP * earlier.top)
            )
            why = f"on the weights before it was off by {earlier.mean:.3g} and {earlier.top:.3g}"
        evidence.bound = allowed.top
        if closeness.mean <= allowed.mean and closeness.top <= allowed.top:
            return None
        return (
            f"its logprobs are off by {closeness.mean:.3g} on average and "
            f"{closeness.top:.3g} at the top, allowed are {allowed.mean:.3g} and "
            f"{allowed.top:.3g} ({why}): {compare(self.reference.logprobs, scores, 0.0).where}"
        )

    def not_told(self, evidence: Evidence) -> str | None:
        """Return why nothing shows that these are the new weights and not the old ones, or None."""
        if self.witness.is_held:
            evidence.decided_by = "held"
        if self.witness.same:
            return None
        tolerance = self.reference.tolerance
        reason = "its scores under the old weights are not known"
        if self.old is not None:
            # Old scores may be missing for some sequences: compare over the others.
            finite = np.isfinite(self.old)
            near = np.abs(self.measured - self.new)[finite]
            far = np.abs(self.measured - self.old)[finite]
            if tolerance == 0.0 and far.any():
                return None
            if tolerance != 0.0 and self.step >= APART * self.noise:
                if not near.mean() <= NEARER * far.mean():
                    return (
                        f"its logprobs are off by {near.mean():.3g} from those of the new weights "
                        f"and by {far.mean():.3g} from those of the old ones, which differ by "
                        f"{self.step:.3g}: it does not compute with the new ones"
                    )
                gain = far - near
                if gain.mean() >= DEVIATIONS * gain.std() / math.sqrt(len(gain)):
                    return None
            reason = (
                f"old and new weights differ by {self.step:.3g} on average, too little to tell "
                f"them apart by logprobs (noise {self.noise:.3g})"
            )
        if self.witness.is_held:
            return None
        if self.witness.is_shown:
            evidence.decided_by = "digest"
            return None
        if tolerance is not None and (tolerance > 0.0 or self.old is None):
            return None
        return (
            f"nothing tells the new weights from the old: {reason}, and the worker does not show "
            f"the weights it computes with ({self.witness.describe_gap()}); serve with Lockstep's "
            "own engine or its vLLM extension, or give the probe a tolerance"
        )


def _earlier_closeness(before: Array | None, trained: Array | None, dtype: str) -> Closeness | None:
    """Return how the worker followed the trainer on the old weights, if it held those."""
    if before is None or trained is None:
        return None
    finite = np.isfinite(trained)
    closeness, most = _closeness(before[finite], trained[finite], dtype), UNKNOWN[dtype]
    return closeness if closeness.mean <= most.mean and closeness.top <= most.top else None


def _closeness(measured: Array, right: Array, dtype: str) -> Closeness:
    off = np.abs(measured - right)
    return Closeness(float(off.mean()), float(np.quantile(off, QUANTILE[dtype])))


def _coarser(*dtypes: str) -> str:
    places = [COARSE.index(name) if name in COARSE else len(COARSE) - 1 for name in dtypes]
    return COARSE[max(places)]


def _previous(reference: Reference) -> Array | None:
    """Return the logprobs under the weights before, NaN where unknown; None if all are unknown."""
    if reference.previous is None or not any(reference.previous):
        return None
    pairs = zip(reference.previous, reference.logprobs, strict=True)
    return _flat([row or [math.nan] * len(new) for row, new in pairs])


def _flat(scores: Scores) -> Array:
    return np.array([value for row in scores for value in row], dtype=np.float64)
