"""Conversion of a sample to one line of JSON and back."""

from __future__ import annotations

import base64
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, get_type_hints

import msgspec

from lockstep.tokens.experts import RoutedExperts
from lockstep.tokens.sample import Sample
from lockstep.tokens.support import PackedSupport


def encode(sample: Sample) -> bytes:
    """Return one line without a line break; `decode` restores an equal sample."""
    values = {name: getattr(sample, name) for name in NAMES}
    if (experts := sample.experts) is not None:
        data = base64.b64encode(experts.data).decode()
        values["experts"] = _Experts(data, experts.shape, experts.dtype, experts.start)
    if (support := sample.support) is not None:
        values["support"] = PackedSupport.of(support)
    elif sample.support_absent:
        values["support"] = ABSENT
    return msgspec.json.encode(values)


def decode(line: bytes | str) -> Sample:
    """Return the sample of a line. Raises as `Sample` does, and msgspec's errors for other JSON."""
    parsed = msgspec.json.decode(line, type=_SampleLine)
    values = {name: getattr(parsed, name) for name in NAMES}
    if (experts := values["experts"]) is not None:
        data = base64.b64decode(experts.data)
        values["experts"] = RoutedExperts(data, experts.shape, experts.dtype, experts.start)
    support = values["support"]
    values["support"] = support.value() if isinstance(support, PackedSupport) else None
    return Sample(**values)


class _Experts(msgspec.Struct):
    data: str
    shape: tuple[int, int, int]
    dtype: str
    start: int


ABSENT: Literal["absent"] = "absent"
"""The support in JSON if sampled tokens were drawn from sets that were not recorded."""
NAMES = tuple(field.name for field in fields(Sample))
ALWAYS = {"logprob_mode", "temperature", "experts", "adapter", "breaks", "aborts", "workers"}
"""Fields that every line contains although `Sample` has defaults for them: if one is missing, its
value is unknown. Fields that were added later are read as their defaults.
"""
TYPES = get_type_hints(Sample) | {
    "experts": _Experts | None,
    "support": PackedSupport | Literal["absent"] | None,
}


def _described(field: Field[Any]) -> tuple[str, Any] | tuple[str, Any, Any]:
    if field.default is MISSING or field.name in ALWAYS:
        return field.name, TYPES[field.name]
    return field.name, TYPES[field.name], field.default


_SampleLine = msgspec.defstruct(
    "_SampleLine",
    [_described(field) for field in fields(Sample)],
    forbid_unknown_fields=True,
    kw_only=True,
)
