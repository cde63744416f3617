"""Whether a substitution explains a difference: evidence, ranking and ties."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.explain.band import LARGEST, Band, sizes_of
from lockstep.explain.case import Case, Values
from lockstep.explain.causes import APPROXIMATE
from lockstep.explain.explanation import CauseEvidence
from lockstep.explain.hypotheses import Candidate, Trial

COVERAGE = 0.7
"""Least part of the tokens for which a substitution must have a number."""
LEAST_SHARE = 0.75
"""Least part of the KL that an explanation removes."""
LEAST_REDUCTION = 0.5
"""Least part of the mean difference that an explanation removes."""
APPROXIMATE_SHARE, APPROXIMATE_REDUCTION = 0.9, 0.6
"""The same for causes that another implementation rounds differently."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A candidate with its evidence. `groups` are the indices of the groups that it applies to;
    `explains` says whether nothing but noise is left."""

    candidate: Candidate
    evidence: CauseEvidence
    values: Values
    groups: tuple[int, ...]
    explains: bool
    order: int


def judge(trial: Trial, candidate: Candidate, order: int) -> Judged:
    """Return what the candidate explains, for all tokens or for the groups that need it."""
    values, groups = candidate.values, tuple(range(len(trial.case.groups)))
    if candidate.partial:
        wrong = wrong_groups(trial)
        if 0 < len(wrong) < len(groups):
            chosen = np.isin(trial.case.group_of, wrong)
            mixed = np.where(chosen, candidate.values, trial.expected)
            # A substitution that holds for all is simpler than one that holds for some.
            if not trial.band.holds(trial.target - candidate.values):
                values, groups = mixed, wrong
    evidence = evidence_of(trial, values)
    explains = _explains(trial, values, evidence, candidate)
    return Judged(candidate, evidence, values, groups, explains, order)


def wrong_groups(trial: Trial) -> tuple[int, ...]:
    """Return the indices of the groups whose numbers are not those expected."""
    gap = trial.target - trial.expected
    return tuple(
        at for at, group in enumerate(trial.case.groups) if not _fine(trial.band, gap[group.places])
    )


def _fine(band: Band, gap: Values) -> bool:
    sizes = sizes_of(gap)
    return len(sizes) == 0 or bool(sizes.max() <= band.high and sizes.mean() <= 2 * band.mean)


def _explains(trial: Trial, values: Values, evidence: CauseEvidence, candidate: Candidate) -> bool:
    compared = np.isfinite(values) | np.isinf(values)
    if compared.mean() < COVERAGE:
        return False
    if trial.band.holds(trial.target - values):
        return evidence.share >= LEAST_SHARE and evidence.reduced >= LEAST_REDUCTION
    return (
        candidate.cause in APPROXIMATE
        and evidence.share >= APPROXIMATE_SHARE
        and evidence.reduced >= APPROXIMATE_REDUCTION
    )


def evidence_of(trial: Trial, values: Values) -> CauseEvidence:
    """Return mean difference, KL and share of tokens before and after a substitution."""
    finite = ~np.isnan(values) & ~np.isnan(trial.target) & ~np.isnan(trial.expected)
    before = trial.target[finite] - trial.expected[finite]
    after = trial.target[finite] - values[finite]
    if not finite.any():
        return CauseEvidence(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    kl_before, kl_after = kl_of(before), kl_of(after)
    beyond = np.abs(before) > trial.band.high
    inside = beyond & (np.abs(after) <= trial.band.high)
    return CauseEvidence(
        float(sizes_of(before).mean()),
        float(sizes_of(after).mean()),
        kl_before,
        kl_after,
        max(0.0, 1 - kl_after / kl_before) if kl_before else 0.0,
        float(inside.sum() / beyond.sum()) if beyond.any() else 0.0,
    )


def kl_of(difference: Values) -> float:
    """Return the mean of the k3 estimator of the KL, of differences cut at 50 nats."""
    cut = np.clip(-difference[~np.isnan(difference)], -LARGEST, LARGEST)
    return float(np.mean(np.expm1(cut) - cut)) if len(cut) else 0.0


def best(explaining: list[Judged], band: Band) -> tuple[Judged, list[Judged]]:
    """Return the first of the explanations that fit best, and others that fit as well.

    Fits that differ by less than the noise are equal; the simpler one of them comes first: for all
    tokens before some, and in the order in which hypotheses are tried.
    """
    closest = min(item.evidence.mean_after for item in explaining)
    limit = 2 * closest + band.mean / 8
    equal = [item for item in explaining if item.evidence.mean_after <= limit]
    equal.sort(key=lambda item: (-len(item.groups), item.order))
    first = equal[0]
    names = {first.candidate.cause}
    ties = []
    for item in equal[1:]:
        if item.candidate.cause not in names:
            names.add(item.candidate.cause)
            ties.append(item)
    return first, ties


def locate(case: Case, groups: tuple[int, ...], gap: Values, band: Band) -> str:
    """Return in words which tokens are concerned: workers, versions, turns or positions."""
    concerned = [case.groups[at] for at in groups]
    others = [group for at, group in enumerate(case.groups) if at not in set(groups)]
    count = f"{len(concerned)} of {len(case.groups)} turns"
    if others:
        for name, key in (
            ("worker", lambda g: ", ".join(case.samples[g.sample].workers)),
            ("version", lambda g: g.version),
            ("turn", lambda g: str(g.turn + 1)),
            ("sample", lambda g: str(g.sample)),
        ):
            inside, outside = {key(g) for g in concerned}, {key(g) for g in others}
            if inside and not inside & outside and len(inside) <= 8 and "" not in inside:
                return f"{name} {', '.join(sorted(inside))} ({count})"
        turns = {group.turn for group in concerned}
        return f"turn {turns.pop() + 1} of some samples ({count})" if len(turns) == 1 else count
    beyond = np.abs(gap) > band.high
    if beyond.any() and not beyond.all():
        first = int(case.positions[beyond].min())
        before = case.positions < first
        if before.sum() >= 8:
            return f"all turns, from position {first} on"
    return f"all {len(case.groups)} turns of {len({g.sample for g in case.groups})} samples"
