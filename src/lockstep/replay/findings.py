"""The outcome of a replay: what was compared, what differs, and what came from the record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ReplayDifference:
    """One value that the replay computed and that is not the recorded one.

    `what` is its kind, such as "token", "reward" or "gradients", and `where` its place in the step.
    """

    step: int
    what: str
    where: str
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        place = f", {self.where}" if self.where else ""
        return (
            f"step {self.step}{place}: {self.what} recorded {self.recorded}, "
            f"replayed {self.replayed}"
        )


@dataclass(slots=True)
class Replay:
    """The outcome of a replay. `mode` "bits" compares bit for bit; "band" within a tolerance.

    `from_record` lists inputs that were not computed again, and `notes` what else a reader must
    know. The counts say how much was compared.
    """

    run: str
    mode: str = "bits"
    reason: str = ""
    first: int = 0
    last: int = 0
    steps: list[int] = field(default_factory=list)
    digests: int = 0
    draws: int = 0
    tokens: int = 0
    rewards: int = 0
    differences: list[ReplayDifference] = field(default_factory=list)
    from_record: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def held(self) -> bool:
        """Whether everything that was compared is as recorded, and something was compared."""
        return not self.differences and bool(self.digests or self.tokens)

    def note(self, sentence: str) -> None:
        """Add a sentence that a reader must know, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def listed(self, what: str, count: int = 1) -> None:
        """Count an input that was taken from the record instead of being computed again."""
        if count:
            self.from_record[what] = self.from_record.get(what, 0) + count

    def compare(self, step: int, what: str, recorded: Any, replayed: Any, where: str = "") -> bool:
        """Count one comparison, note a difference, and return whether both are equal."""
        self.digests += 1
        if recorded != replayed:
            self.differences.append(ReplayDifference(step, what, where, recorded, replayed))
        return bool(recorded == replayed)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "held": self.held}

    def lines(self) -> Iterator[str]:
        """Yield the outcome as sentences for a person."""
        span = f"steps {self.first} to {self.last}" if self.first != self.last else (
            f"step {self.first}"
        )  # fmt: skip
        how = "bit for bit" if self.mode == "bits" else f"within a band, because {self.reason}"
        yield f"Replayed {span} of {self.run}, compared {how}."
        yield f"{self.digests} digests and figures of the learner."
        if self.rewards:
            yield f"{self.rewards} rewards, computed again by the environment."
        if self.draws:
            yield f"{self.tokens} tokens of {self.draws} draws, sampled again."
        for what, count in self.from_record.items():
            yield f"From the record, not computed again: {what} ({count})."
        yield from self.notes
        for difference in self.differences[:20]:
            yield f"DIFFERS: {difference}"
        if len(self.differences) > 20:
            yield f"and {len(self.differences) - 20} more differences"
        yield "Everything compared is equal." if self.held and self.mode == "bits" else (
            "Everything compared is within the band." if self.held else "The run does not replay."
        )  # fmt: skip
