"""The outcome of an explanation: one sentence, the ranked causes, and what was tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Outcome = Literal["healthy", "explained", "not explained"]


@dataclass(frozen=True, slots=True)
class CauseEvidence:
    """The effect of one substitution on the difference of the two sides.

    Means are of |difference| per token, in nats; `kl` is the mean of the k3 estimator; `share` is
    the part of the KL that the substitution removes, and `tokens` the part of the tokens beyond the
    band that it brings into it.
    """

    mean_before: float
    mean_after: float
    kl_before: float
    kl_after: float
    share: float
    tokens: float

    @property
    def reduced(self) -> float:
        """The part of the mean difference that is gone."""
        return 1 - self.mean_after / self.mean_before if self.mean_before else 0.0


@dataclass(frozen=True, slots=True)
class Cause:
    """A named cause: what was substituted on which side, where, and what to do.

    `setting` lists the fields of the substitution. `ties` are other causes whose substitutions
    explain the same numbers equally well: the samples alone cannot tell them apart.
    """

    name: str
    side: str
    sentence: str
    location: str
    remedy: str
    evidence: CauseEvidence
    setting: dict[str, Any] = field(default_factory=dict)
    ties: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tried:
    """A substitution that was computed, and the mean |difference| that it left."""

    name: str
    side: str
    detail: str
    mean_after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The result of `explain`. `outcome` "explained" means that the causes leave only noise.

    `band` bounds the noise of the side with the larger difference: mean, highest, dtype and source.
    """

    outcome: Outcome
    sentence: str
    causes: tuple[Cause, ...]
    tried: tuple[Tried, ...]
    band: dict[str, Any]
    mean: float
    kl: float
    tokens: int
    samples: int
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    passes: int = 0
    requests: int = 0

    @property
    def cause(self) -> str | None:
        """The name of the first cause, if any."""
        return self.causes[0].name if self.causes else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """Yield the verdict as a person reads it: one sentence, then a table of evidence."""
        yield self.sentence
        yield (
            f"Compared {self.tokens} tokens of {self.samples} samples: mean |difference| "
            f"{self.mean:.3g} nats, KL {self.kl:.3g}. Healthy is a mean up to "
            f"{self.band['mean']:.2g} and single tokens up to {self.band['high']:.2g} "
            f"({self.band['dtype']}; {self.band['source']})."
        )
        for rank, cause in enumerate(self.causes, start=1):
            yield ""
            yield f"{rank}. {cause.name} ({cause.side}): {cause.sentence}"
            evidence = cause.evidence
            yield (
                f"   mean |difference| {evidence.mean_before:.3g} -> {evidence.mean_after:.3g}   "
                f"KL {evidence.kl_before:.3g} -> {evidence.kl_after:.3g}   "
                f"tokens explained {evidence.tokens:.0%}"
            )
            yield f"   where: {cause.location}"
            yield f"   remedy: {cause.remedy}"
            if cause.ties:
                yield f"   the same numbers also follow from: {', '.join(cause.ties)}"
        if self.outcome == "not explained" and self.tried:
            yield ""
            yield "Closest of what was tried (none is named as the cause):"
            for tried in sorted(self.tried, key=lambda item: item.mean_after)[:5]:
                where = f"{tried.side}, {tried.detail}"
                yield f"   {tried.name} ({where}): leaves {tried.mean_after:.3g}"
        yield from (f"Note: {note}" for note in self.notes)
        yield (
            f"{len(self.tried)} substitutions, {self.passes} forward passes, {self.requests} "
            f"requests, {self.seconds:.1f} s."
        )
