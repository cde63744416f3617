"""Samples to export with their source, read from run directories and files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from lockstep.run_record import METRICS, Run
from lockstep.tokens import Sample, ShapedSpan, VersionSpan
from lockstep.tokens.errors import BadRequest, LockstepError
from lockstep.tokens.support import PackedSupport


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedSample:
    """One sample. `source` is its session, run or file, and `index` its number there.

    `step` and `advantage` are set for samples of a training run.
    """

    sample: Sample
    source: str
    index: int
    step: int | None = None
    advantage: float | None = None

    @property
    def id(self) -> str:
        """A name that is unique within the source."""
        return f"{self.source}#{self.index}"


def is_run(path: Path) -> bool:
    """Whether `path` is the directory of a training run."""
    return (path / METRICS).is_file()


def samples_of_run(path: Path) -> Iterator[ExportedSample]:
    """Yield the stored samples of a run, in order. Raises NotFound and BadRequest."""
    run = Run.read(path)
    rollout = run.about.get("config", {}).get("rollout", {})
    for index, row in enumerate(run.samples):
        try:
            sample = _sample_of_row(row, rollout)
        except (KeyError, TypeError, msgspec.MsgspecError, LockstepError) as error:
            raise BadRequest(
                f"sample {index} of {path} cannot be read: {error!r}", param="source"
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
        shaping=msgspec.convert(row.get("shaping", ()), tuple[ShapedSpan, ...]),
        support=None
        if (support := row.get("support")) is None
        else msgspec.convert(support, PackedSupport).value(),
    )


def _spans(labels: Sequence[str | None]) -> tuple[VersionSpan, ...]:
    """Return the spans of equal labels; a token with label None was not sampled."""
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
    """Yield the samples of a JSON-lines file of `Sample.to_json`. Raises BadRequest."""
    with open(path, "rb") as lines:
        for index, line in enumerate(lines):
            try:
                sample = Sample.from_json(line)
            except (msgspec.MsgspecError, LockstepError) as error:
                raise BadRequest(
                    f"line {index + 1} of {path} is not a sample: {error}", param="source"
                ) from None
            yield ExportedSample(sample=sample, source=str(path), index=index)


def turns(sample: Sample) -> Iterator[tuple[int, int]]:
    """Yield the ranges [start, end) of consecutive sampled tokens."""
    start: int | None = None
    for at, sampled in enumerate([*sample.sampled_mask, False]):
        if sampled and start is None:
            start = at
        elif not sampled and start is not None:
            yield start, at
            start = None
