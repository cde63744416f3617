"""Result of a generation: ids and logprobs from one engine record, with their weight versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isfinite
from typing import Literal, get_args

from lockstep.tokens.errors import (
    BadLogprob,
    BadVersions,
    Misaligned,
    MissingFinish,
)
from lockstep.tokens.experts import RoutedExperts
from lockstep.tokens.sampling import LogprobMode
from lockstep.tokens.shaping import Shaping
from lockstep.tokens.support import Support

Finish = Literal["stop", "length", "tool_calls", "abort"]
FINISHES: tuple[str, ...] = get_args(Finish)
SENTINEL = -9999.0
"""Value that some engines write in place of a missing logprob; it is never a real one."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Range [start, end) of a completion's tokens, sampled under `version` (an opaque string)."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Ranked:
    """One alternative at a position: a token, its logprob, and its rank (1 is the most likely)."""

    token_id: int
    logprob: float
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """Logprob of a prompt token given the tokens before it, and the most likely alternatives."""

    token_id: int
    logprob: float
    rank: int | None = None
    top: tuple[Ranked, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished generation, checked on construction: every instance satisfies the contract.

    token_ids and logprobs have the same length; version spans cover the tokens without gaps; every
    logprob is finite (unless `allow_nonfinite`, which keeps them as received); experts, if present,
    have a row for every token but the last; a support, if present, has for every token a set that
    contains it. `prompt_ids` are the ids that were sent; a gateway that only relays them leaves
    them undecoded, and they read like a list. `shaping` lists the options besides the temperature
    that shaped the distribution, or is None. `stop_reason` is the stop string that ended the
    generation, and `stop_tokens` is how many of the last tokens contain part of it; they stay in
    `token_ids`. None means the server did not report it.
    """

    token_ids: list[int]
    logprobs: list[float]
    prompt_ids: Sequence[int]
    finish: Finish
    versions: tuple[VersionSpan, ...]
    logprob_mode: LogprobMode = "raw"
    temperature: float = 1.0
    shaping: Shaping | None = None
    index: int = 0
    request_id: str = ""
    stop_token: int | None = None
    stop_reason: str | None = None
    stop_tokens: int | None = None
    top_logprobs: list[tuple[Ranked, ...]] | None = None
    ranks: list[int] | None = None
    prompt_logprobs: list[PromptLogprob | None] | None = None
    worker: str | None = None
    adapter: str | None = None
    experts: RoutedExperts | None = None
    support: Support | None = None
    allow_nonfinite: bool = False

    def __post_init__(self) -> None:
        if self.finish not in FINISHES:
            raise MissingFinish(
                f"finish reason is {self.finish!r}, expected one of {', '.join(FINISHES)}"
            )
        check_aligned(len(self.token_ids), self.logprobs, "logprobs")
        for name in ("top_logprobs", "ranks"):
            if (values := getattr(self, name)) is not None:
                check_aligned(len(self.token_ids), values, name)
        if self.prompt_logprobs is not None:
            check_aligned(len(self.prompt_ids), self.prompt_logprobs, "prompt logprobs")
        if not self.allow_nonfinite:
            check_logprobs(self.logprobs)
        check_spans(self.versions, len(self.token_ids))
        if self.experts is not None:
            self.experts.check_covers(len(self.prompt_ids) + len(self.token_ids))
        if self.support is not None:
            self.support.check_contains(self.token_ids)

    @property
    def complete(self) -> bool:
        """Whether the model ended this turn itself: false for `abort` and `length`."""
        return self.finish in ("stop", "tool_calls")


def usable(logprob: float) -> bool:
    """Return whether this is a real logprob: a finite number and not a sentinel."""
    return isfinite(logprob) and logprob > SENTINEL


def check_aligned(tokens: int, values: Sequence[object], name: str) -> None:
    """Raise Misaligned unless there is one value per token."""
    if len(values) != tokens:
        raise Misaligned(f"{tokens} token ids but {len(values)} {name}")


def check_logprobs(logprobs: Sequence[float]) -> None:
    """Raise BadLogprob at the first position that is NaN, infinite or a sentinel."""
    # One sum detects NaN and infinities in a tenth of the time of a test per value.
    if not logprobs or (isfinite(sum(logprobs)) and min(logprobs) > SENTINEL):
        return
    for at, value in enumerate(logprobs):
        if not usable(value):
            raise BadLogprob(f"logprob at position {at} is {value}, expected a finite number")


def check_spans(spans: Sequence[VersionSpan], tokens: int) -> None:
    """Raise BadVersions unless the spans cover [0, tokens) in order and without gaps."""
    at = 0
    for span in spans:
        if span.start != at or span.end <= span.start:
            raise BadVersions(
                f"version span {span.version!r} covers [{span.start}, {span.end}), "
                f"expected it to start at {at} and not to be empty"
            )
        at = span.end
    if at != tokens:
        raise BadVersions(f"version spans cover {at} tokens, but there are {tokens}")


def merge_spans(versions: Sequence[str]) -> tuple[VersionSpan, ...]:
    """Return the spans for one version label per token."""
    spans: list[VersionSpan] = []
    at = 0
    for version, run in groupby(versions):
        end = at + len(list(run))
        spans.append(VersionSpan(version, at, end))
        at = end
    return tuple(spans)
