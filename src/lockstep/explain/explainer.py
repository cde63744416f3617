"""The search: try hypotheses in order of cost, and stop when only noise is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

import numpy as np

from lockstep.explain import band as bands
from lockstep.explain.band import Band, sizes_of
from lockstep.explain.case import Case, Values
from lockstep.explain.causes import CAUSES
from lockstep.explain.explanation import Cause, Explanation, Tried
from lockstep.explain.hypotheses import HYPOTHESES, Candidate, Trial
from lockstep.explain.hypotheses.hypothesis import READING
from lockstep.explain.judge import Judged, best, evidence_of, judge, kl_of, locate, wrong_groups
from lockstep.explain.scorer import Scorer
from lockstep.explain.server import ServerScores
from lockstep.explain.setting import Overlay, Setting
from lockstep.tokens.errors import Unavailable

STACKED = 2
"""Partial explanations on which a second cause is searched."""
WORTH_STACKING = 0.5
"""Part of the KL that a substitution must remove for a second cause to be searched beside it."""

SETTLED = 50
"""An explanation that leaves this part of the healthy mean ends the search."""


class Explainer:
    """Explains one case with one scorer.

    `scores` are those of the live server, which are explained as well. `say` gets the name of each
    hypothesis before it is tried.
    """

    def __init__(
        self,
        case: Case,
        scorer: Scorer,
        *,
        scores: ServerScores | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._case = case
        self._scorer = scorer
        self._scores = scores
        self._say = say
        self._tried: list[Tried] = []
        self._notes: list[str] = []

    def run(self) -> Explanation:
        """Return the verdict of all sides that differ from the checkpoint."""
        started = time.perf_counter()
        case = self._case
        trials = [self._trial("engine", case.engine, case.engine_dtype)]
        if case.trainer is not None:
            target = np.asarray(case.trainer, dtype=np.float64)
            trials.append(self._trial("trainer", target, case.trainer_dtype or case.engine_dtype))
        if self._scores is not None:
            trials.append(self._server_trial(self._scores, trials[0]))
        main = max(trials, key=lambda trial: _mean(trial) / trial.band.mean)
        causes: list[Cause] = []
        outcome = "healthy"
        for trial in trials:
            if trial.band.holds(trial.target - trial.expected):
                continue
            result = self._explain(trial)
            causes += [item for item in result if item.name not in {c.name for c in causes}]
            if not result:
                outcome = "not explained"
            elif outcome == "healthy":
                outcome = "explained"
        gap = main.target - main.expected
        return Explanation(
            outcome=outcome,  # type: ignore[arg-type]
            sentence=self._sentence(outcome, causes, main),
            causes=tuple(causes),
            tried=tuple(self._tried),
            band={"mean": main.band.mean, "high": main.band.high, "dtype": main.band.dtype,
                  "source": main.band.source},
            mean=_mean(main),
            kl=kl_of(gap),
            tokens=case.tokens,
            samples=len(case.samples),
            notes=tuple(self._notes),
            seconds=time.perf_counter() - started,
            passes=self._scorer.passes,
            requests=0 if self._scores is None else self._scores.requests,
        )  # fmt: skip

    def _trial(self, side: str, target: Values, dtype: str) -> Trial:
        case, scorer = self._case, self._scorer
        self._say(f"scoring the {side}'s tokens")
        base = Setting(adapter=case.adapter)
        if dtype != "float32":
            base = base.with_(rounding=dtype)
        expected = scorer.values(base).copy()
        for label, path in case.others:
            for group in case.groups:
                if label and group.version == label:
                    values = scorer.values(base.with_(overlay=Overlay(path)))
                    expected[group.places] = values[group.places]
        band = bands.measure(scorer, base, dtype)
        return Trial(case, scorer, base, expected, target, band, side)

    def _server_trial(self, scores: ServerScores, engine: Trial) -> Trial:
        """Return the trial of what the server computes now for the same tokens, as raw logprobs."""
        base = engine.base.with_(mode="raw")
        expected = self._scorer.values(base)
        mean, high = scores.noise
        band = engine.band.wider(
            2 * mean, 2 * high, "noise of the server, measured by two scorings"
        )
        labels = {group.version for group in self._case.groups}
        if scores.version and scores.version not in labels:
            self._notes.append(
                f"the server now serves version {scores.version!r}, and the samples are labelled "
                f"{', '.join(sorted(labels)[:4])}"
            )
        healthy = band.holds(scores.values - expected)
        if healthy and not engine.band.holds(engine.target - engine.expected):
            self._notes.append(
                "the server's own scores of these tokens agree with the checkpoint: it holds the "
                "right weights now, and the samples come from another state or another reading"
            )
        return replace(engine, base=base, expected=expected, target=scores.values, band=band,
                       side="server")  # fmt: skip

    def _explain(self, trial: Trial) -> list[Cause]:
        """Return the causes that together leave only noise, or none."""
        judged = self._sweep(trial, trial.side)
        explaining = [item for item in judged if item.explains]
        if explaining:
            first, ties = best(explaining, trial.band)
            return [self._cause(trial, first, ties)]
        if causes := self._of_some_samples(trial):
            return causes
        if causes := self._two_causes(trial, judged):
            return causes
        noisy = self._self_noise(trial)
        return [] if noisy is None else [noisy]

    def _sweep(self, trial: Trial, side: str) -> list[Judged]:
        """Judge the candidates of all hypotheses, until a cost class has an explanation."""
        judged: list[Judged] = []
        for _, hypotheses in groupby(HYPOTHESES, key=lambda item: item.cost):
            for hypothesis in hypotheses:
                if trial.side not in hypothesis.sides or not hypothesis.applies(trial):
                    continue
                self._say(f"{side}: {hypothesis.name}")
                try:
                    for candidate in hypothesis.candidates(trial):
                        judged.append(judge(trial, candidate, len(judged)))
                        self._tried.append(
                            Tried(candidate.cause, side, candidate.detail,
                                  judged[-1].evidence.mean_after)
                        )  # fmt: skip
                except Unavailable as error:
                    if error.message not in self._notes:
                        self._notes.append(error.message)
                    return judged
                # Numbers that fit to the last digit cannot follow from another forward pass too.
                if hypothesis.cost != READING and _settled(judged, trial.band):
                    return judged
            if any(item.explains for item in judged):
                break
        return judged

    def _of_some_samples(self, trial: Trial) -> list[Cause]:
        """Return the causes for the samples that differ, where all others are as expected.

        One worker of several may read its numbers otherwise; a number that is fitted to the samples
        of all of them would fit none.
        """
        case, wrong = trial.case, wrong_groups(trial)
        concerned = {case.groups[at].sample for at in wrong}
        whole = tuple(at for at, group in enumerate(case.groups) if group.sample in concerned)
        if trial.side != "engine" or whole != wrong or len(wrong) in (0, len(case.groups)):
            return []
        samples = [sample for at, sample in enumerate(case.samples) if at in concerned]
        part = replace(case, samples=samples, trainer=None)
        inner = Explainer(part, self._scorer.over(part), say=self._say)
        causes = inner._explain(inner._trial("engine", part.engine, part.engine_dtype))
        self._scorer.passes += inner._scorer.passes
        self._tried += inner._tried
        where = locate(case, wrong, trial.target - trial.expected, trial.band)
        return [replace(cause, location=where) for cause in causes]

    def _two_causes(self, trial: Trial, judged: list[Judged]) -> list[Cause]:
        """Search a second cause beside the substitutions that explain most, for all tokens."""
        partial = [
            item
            for item in judged
            if item.evidence.share >= WORTH_STACKING
            and item.candidate.setting is not None
            and len(item.groups) == len(trial.case.groups)
            and not np.isnan(item.values).any()
        ]
        partial.sort(key=lambda item: item.evidence.mean_after)
        for first in partial[:STACKED]:
            setting = first.candidate.setting
            if setting is None:
                continue
            rest = replace(trial, base=setting, expected=first.values)
            explaining = [
                item for item in self._sweep(rest, f"{trial.side}, second") if item.explains
            ]
            explaining = [e for e in explaining if e.candidate.cause != first.candidate.cause]
            if explaining:
                second, ties = best(explaining, trial.band)
                return [self._cause(trial, first, []), self._cause(rest, second, ties)]
        return []

    def _self_noise(self, trial: Trial) -> Cause | None:
        """Return the cause where equal tokens after equal prefixes differ as much as the sides do.

        Only noise without a direction is explained so, and only where nothing else explains it.
        """
        mean, high, pairs = bands.self_noise(trial.case, trial.target)
        if pairs < 4 or high <= trial.band.high:
            return None
        gap = trial.target - trial.expected
        sizes = sizes_of(gap)
        wide = trial.band.wider(2 * mean, 2 * high, "noise of the engine on equal inputs")
        centred = abs(float(np.nanmean(gap))) <= 3 * float(np.nanstd(gap)) / np.sqrt(len(sizes))
        if not (wide.holds(gap) and centred):
            return None
        values = trial.expected
        judged = Judged(
            Candidate("batch_dependent", f"up to {high:.2g} nats in {pairs} pairs", values),
            evidence_of(trial, values), values, tuple(range(len(trial.case.groups))), True, 0,
        )  # fmt: skip
        return self._cause(trial, judged, [])

    def _cause(self, trial: Trial, result: Judged, ties: list[Judged]) -> Cause:
        candidate = result.candidate
        text = CAUSES[candidate.cause]
        gap = trial.target - trial.expected
        where = locate(trial.case, result.groups, gap, trial.band)
        if candidate.location:
            where = f"{candidate.location}; {where}"
        setting = candidate.setting
        return Cause(
            candidate.cause,
            trial.side,
            text.sentence.format(side=trial.side, detail=candidate.detail),
            where,
            text.remedy,
            result.evidence,
            {} if setting is None else setting.changes_from(trial.base),
            tuple(f"{item.candidate.cause} ({item.candidate.detail})" for item in ties),
        )

    def _sentence(self, outcome: str, causes: list[Cause], main: Trial) -> str:
        side, dtype = main.side, main.band.dtype
        if outcome == "healthy":
            return (
                f"Healthy: the differences are what {dtype} arithmetic gives, and no cause is "
                "looked for."
            )
        if not causes:
            wrong = wrong_groups(main)
            gap = main.target - main.expected
            where = locate(main.case, wrong or tuple(range(len(main.case.groups))), gap,
                           main.band)  # fmt: skip
            return (
                f"Not explained by anything tried: the {side} differs by {_mean(main):.3g} nats "
                f"per token in {where}."
            )
        sentences = [cause.sentence[0].upper() + cause.sentence[1:] for cause in causes]
        rest = " Another difference is not explained." if outcome == "not explained" else ""
        return "; and ".join(sentences) + "." + rest


def _settled(judged: list[Judged], band: Band) -> bool:
    return any(item.explains and item.evidence.mean_after <= band.mean / SETTLED for item in judged)


def _mean(trial: Trial) -> float:
    sizes = sizes_of(trial.target - trial.expected)
    return float(sizes.mean()) if len(sizes) else 0.0


def healthy_band(case: Case, scorer: Scorer) -> Band:
    """Return the healthy band of the case's engine."""
    base = Setting(adapter=case.adapter)
    if case.engine_dtype != "float32":
        base = base.with_(rounding=case.engine_dtype)
    return bands.measure(scorer, base, case.engine_dtype)
