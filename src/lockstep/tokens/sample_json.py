"""A sample as one line of JSON, and back."""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from lockstep.tokens.completion import VersionSpan
from lockstep.tokens.experts import RoutedExperts
from lockstep.tokens.lineage import Kind
from lockstep.tokens.sample import Sample, TrainedSpan
from lockstep.tokens.sampling import LogprobMode
from lockstep.tokens.shaping import ShapedSpan


def encode(sample: Sample) -> bytes:
    """One line without a line break; `decode` gives back an equal sample."""
    return msgspec.json.encode(SampleLine.of(sample))


def decode(line: bytes | str) -> Sample:
    """The sample of a line. Raises what `Sample` raises, and msgspec's errors for other JSON."""
    return msgspec.json.decode(line, type=SampleLine).sample()


class _Experts(msgspec.Struct):
    data: str
    shape: tuple[int, int, int]
    dtype: str
    start: int


class SampleLine(msgspec.Struct, forbid_unknown_fields=True):
    token_ids: list[int]
    sampled_mask: list[bool]
    logprobs: list[float]
    versions: tuple[VersionSpan, ...]
    logprob_mode: LogprobMode
    temperature: float
    experts: _Experts | None
    adapter: str | None
    breaks: tuple[str, ...]
    aborts: int
    workers: tuple[str, ...]
    trained_in: tuple[TrainedSpan, ...] = ()
    split: tuple[str, ...] = ()
    shaping: tuple[ShapedSpan, ...] = ()
    stops: tuple[tuple[int, int], ...] = ()
    tool_parse_errors: int = 0
    notes: tuple[dict[str, Any], ...] = ()
    reward: float | None = None
    kind: Kind = "unknown"
    branch: int = 0
    parent: int | None = None
    depth: int = 0
    turn_index: int = 0
    harness: str | None = None
    evidence: str = ""
    weight: float = 1.0

    @classmethod
    def of(cls, sample: Sample) -> SampleLine:
        fields = {name: getattr(sample, name) for name in cls.__struct_fields__}
        if (experts := sample.experts) is not None:
            data = base64.b64encode(experts.data).decode()
            fields["experts"] = _Experts(data, experts.shape, experts.dtype, experts.start)
        return cls(**fields)

    def sample(self) -> Sample:
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        if (experts := self.experts) is not None:
            data = base64.b64decode(experts.data)
            fields["experts"] = RoutedExperts(data, experts.shape, experts.dtype, experts.start)
        return Sample(**fields)
