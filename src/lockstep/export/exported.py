"""A sample on its way out, with where it came from; and how run directories and files give them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lockstep.run_record import METRICS, Run
from lockstep.tokens import Sample, VersionSpan
from lockstep.tokens.errors import BadRequest, LockstepError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedSample:
    """One sample. `source` is its session, run or file and `index` its number there; `step` and
    `advantage` are known of a training run's only."""

    sample: Sample
    source: str
    index: int
    step: int | None = None
    advantage: float | None = None

    @property
    def id(self) -> str:
        """A name that no other sample of the source has."""
        return f"{self.source}#{self.index}"


def is_run(path: Path) -> bool:
    """Whether this is the directory of a training run."""
    return (path / METRICS).is_file()


def samples_of_run(path: Path) -> Iterator[ExportedSample]:
    """The samples that a run has kept, in its order. Raises NotFound and BadRequest."""
    run = Run.read(path)
    rollout = run.about.get("config", {}).get("rollout", {})
    for index, row in enumerate(run.samples):
        try:
            sample = _sample_of_row(row, rollout)
        except (KeyError, TypeError, LockstepError) as error:
            raise BadRequest(
                f"sample {index} of {path} is none: {error!r}", param="source"
            ) from None
        yield ExportedSample(
            sample=sample,
            source=str(path),
            index=index,
            step=row["step"],
            advantage=row["advantage"],
        )


def _sample_of_row(row: dict[str, Any], rollout: dict[str, Any]) -> Sample:
    return Sample(
        token_ids=row["token_ids"],
        sampled_mask=row["sampled_mask"],
        logprobs=row["logprobs"],
        versions=_spans(row["versions"]),
        logprob_mode=rollout.get("logprobs", "processed"),
        temperature=rollout.get("temperature", 1.0),
        workers=tuple(row["workers"]),
        reward=row["reward"],
    )


def _spans(labels: Sequence[str | None]) -> tuple[VersionSpan, ...]:
    """The spans of equal labels; None where a token was not sampled."""
    spans: list[VersionSpan] = []
    for at, label in enumerate(labels):
        if label is None:
            continue
        if spans and spans[-1].end == at and spans[-1].version == label:
            spans[-1] = VersionSpan(label, spans[-1].start, at + 1)
        else:
            spans.append(VersionSpan(label, at, at + 1))
    return tuple(spans)


def samples_of_file(path: Path) -> Iterator[ExportedSample]:
    """The samples of a file of JSON lines, as `Sample.to_json` writes them. Raises BadRequest."""
    with open(path, "rb") as lines:
        for index, line in enumerate(lines):
            try:
                sample = Sample.from_json(line)
            except (msgspec.MsgspecError, LockstepError) as error:
                raise BadRequest(
                    f"line {index + 1} of {path} is no sample: {error}", param="source"
                ) from None
            yield ExportedSample(sample=sample, source=str(path), index=index)


def turns(sample: Sample) -> Iterator[tuple[int, int]]:
    """The stretches [start, end) that were sampled without anything between them."""
    start: int | None = None
    for at, sampled in enumerate([*sample.sampled_mask, False]):
        if sampled and start is None:
            start = at
        elif not sampled and start is not None:
            yield start, at
            start = None
