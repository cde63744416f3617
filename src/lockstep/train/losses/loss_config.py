"""The [loss] section of a training configuration: one algorithm, and what a run changes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from lockstep.tokens.errors import BadRequest
from lockstep.train.losses.corrections import DEFAULT_RANGES, Correction, CorrectionKind, Level
from lockstep.train.losses.denominator import Denominator
from lockstep.train.losses.loss import Aggregation, Baseline, Loss, Option
from lockstep.train.losses.loss_table import LOSSES
from lockstep.train.ranges import Range


@dataclass(frozen=True, slots=True)
class LossPlan:
    """The loss of a run with everything that its algorithm or the run decides."""

    loss: Loss
    options: Mapping[str, Option]
    baseline: Baseline
    denominator: Denominator
    rejected: Literal["count", "leave"]
    corrections: tuple[Correction, ...]
    resamples: bool
    overlong: int

    @property
    def decoupled(self) -> bool:
        """Whether the ratio to the sampler is in the weights of a correction, not in the loss."""
        return any(own.weights for own in self.corrections)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionConfig:
    """One correction, such as { kind = "tis", high = 2.0 }."""

    kind: Annotated[CorrectionKind, "tis limits, mis and icepop weight and reject, mask rejects."]
    level: Annotated[Level | None, "Level of rho. Unset: token; geometric for mask."] = None
    low: Annotated[float | None, Range(least=0), "Lower limit. Unset: the usual one."] = None
    high: Annotated[float | None, Range(above=0), "Upper limit. Unset: the usual one."] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """The loss and its options. `kind` names an algorithm, which sets everything else.

    distill, forward_kl, reverse_kl and jsd learn from a teacher, all others from rewards.

    `corrections` treat tokens whose sampler differs from the trainer: rho is the ratio of their
    probabilities (trainer over sampler). tis multiplies the loss by rho, limited to low and high.
    mis and icepop multiply by rho and reject tokens outside low to high. mask rejects them and
    changes nothing else. Level token takes rho of each token, sequence the product over a sample,
    geometric the geometric mean. With tis, mis or icepop the ratio of the loss itself starts at 1,
    so that rho counts once.
    """

    kind: Annotated[str, f"One of {', '.join(LOSSES)}."] = "dppo"
    baseline: Annotated[
        Baseline | None,
        "What a reward is compared with: the mean of its group (group), also divided by the "
        "group's standard deviation (group_std), the mean of the group's other rewards "
        "(leave_one_out), or mean and standard deviation of the batch (batch). Unset: the "
        "algorithm's.",
    ] = None
    aggregation: Annotated[
        Aggregation | None,
        "Mean over all tokens (token), mean over samples of the mean over their tokens (sequence), "
        "or sum over the tokens divided by the number of samples and `length` (constant). Unset: "
        "the algorithm's.",
    ] = None
    length: Annotated[
        int | None, Range(least=1), "Divisor of constant aggregation. Unset: rollout.max_tokens."
    ] = None
    corrections: Annotated[
        tuple[CorrectionConfig, ...],
        'Tables such as { kind = "tis", level = "token", low = 0.0, high = 2.0 }.',
    ] = ()
    rejected: Annotated[
        Literal["count", "leave"],
        "Whether tokens that a correction rejects count in the mean (count) or leave it (leave).",
    ] = "count"
    resample: Annotated[
        bool | None,
        "Replace groups whose rewards are all equal by other tasks, at most rollout.max_rounds "
        "times. Unset: the algorithm's.",
    ] = None
    overlong: Annotated[
        int | None,
        Range(least=0),
        "The last tokens before rollout.max_tokens, in which the reward falls by up to 1. "
        "Unset: the algorithm's.",
    ] = None
    options: Annotated[Mapping[str, Any], "Options of the loss, by name."] = field(
        default_factory=dict
    )

    def plan(self, max_tokens: int) -> LossPlan:
        """Return the loss with the settings of its algorithm where this section has none.

        Raises BadRequest for an unknown loss, options that it does not have, and settings that
        contradict each other.
        """
        if self.kind not in LOSSES:
            raise BadRequest(
                f"loss.kind is {self.kind!r}: expected one of {', '.join(LOSSES)}",
                param="loss.kind",
            )
        loss = LOSSES[self.kind]
        aggregation = self.aggregation or loss.aggregation
        if self.length is not None and aggregation != "constant":
            raise BadRequest(
                f"loss.length is {self.length}, but loss.aggregation is {aggregation!r}: only "
                "constant aggregation has a length",
                param="loss.length",
            )
        overlong = round(loss.overlong * max_tokens) if self.overlong is None else self.overlong
        if overlong > max_tokens:
            raise BadRequest(
                f"loss.overlong is {overlong}, but rollout.max_tokens is {max_tokens}: no rollout "
                "is longer",
                param="loss.overlong",
            )
        from_teacher = loss.learns_from != "rewards"
        for name in ("baseline", "resample", "overlong"):
            if from_teacher and getattr(self, name):
                raise BadRequest(
                    f"loss.{name} is {getattr(self, name)!r}, but loss.kind {self.kind!r} learns "
                    "from a teacher: rewards change nothing",
                    param=f"loss.{name}",
                )
        return LossPlan(
            loss=loss,
            options=loss.with_defaults(self.kind, self.options, field="loss.options"),
            baseline=self.baseline or loss.baseline,
            denominator=Denominator(aggregation, self.length or max_tokens),
            rejected=self.rejected,
            corrections=self._corrections(loss),
            resamples=loss.resamples if self.resample is None else self.resample,
            overlong=overlong,
        )

    def _corrections(self, loss: Loss) -> tuple[Correction, ...]:
        corrections = tuple(_read(at, own) for at, own in enumerate(self.corrections))
        weighting = [at for at, own in enumerate(corrections) if own.weights]
        if weighting and not loss.trains_decoupled:
            raise _conflict(
                self.corrections, weighting[0],
                f"loss.kind {self.kind!r} bounds the distance to the sampler itself: use kind "
                '"mask", or another loss',
            )  # fmt: skip
        if weighting and "old_logprobs" not in loss.inputs:
            raise _conflict(
                self.corrections, weighting[0],
                f"loss.kind {self.kind!r} takes its tokens as examples: their ratio means nothing",
            )  # fmt: skip
        if len(weighting) > 1:
            raise _conflict(
                self.corrections, weighting[1],
                f"loss.corrections[{weighting[0]}] multiplies the loss by rho already",
            )  # fmt: skip
        names = [own.name for own in corrections]
        for at, name in enumerate(names):
            if name in names[:at]:
                raise _conflict(
                    self.corrections, at, f"loss.corrections[{names.index(name)}] is of this kind"
                )
        return corrections


def _read(at: int, config: CorrectionConfig) -> Correction:
    field = f"loss.corrections[{at}]"
    level: Level = config.level or ("geometric" if config.kind == "mask" else "token")
    if (config.kind, level) not in DEFAULT_RANGES:
        levels = [own for kind, own in DEFAULT_RANGES if kind == config.kind]
        raise BadRequest(
            f"{field}.level is {level!r}: {config.kind} has {', '.join(levels)}",
            param=f"{field}.level",
        )
    usual_low, usual_high = DEFAULT_RANGES[config.kind, level]
    low = usual_low if config.low is None else config.low
    high = usual_high if config.high is None else config.high
    if not low <= 1.0 <= high:
        raise BadRequest(
            f"{field} has the range {low:g} to {high:g}: expected one that contains 1, the ratio "
            "of equal weights",
            param=field,
        )
    return Correction(config.kind, level, low, high)


def _conflict(corrections: Sequence[CorrectionConfig], at: int, why: str) -> BadRequest:
    field = f"loss.corrections[{at}]"
    return BadRequest(f"{field}.kind is {corrections[at].kind!r}, but {why}", param=f"{field}.kind")
