"""Training sample: one sequence, which of its tokens were sampled, and their provenance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lockstep.tokens.completion import SENTINEL, VersionSpan, check_aligned
from lockstep.tokens.errors import BadLogprob, BadVersions
from lockstep.tokens.experts import RoutedExperts
from lockstep.tokens.lineage import Kind
from lockstep.tokens.sampling import LogprobMode
from lockstep.tokens.shaping import ShapedSpan
from lockstep.tokens.support import Support

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TrainedSpan:
    """Range [start, end) of tokens that sample number `sample` of the same session already
    trains.
    """

    sample: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One trainable sequence: arrays of equal length, and the record of how it was sampled.

    logprobs are 0.0 where there is nothing to train, never null. Version spans use positions of
    this sequence and cover exactly the tokens of `sampled_mask`. `breaks` lists the causes of
    prefix breaks before this branch, `aborts` counts aborted turns, `workers` names the workers
    that sampled. Raises Misaligned, BadLogprob or BadVersions if the parts do not match.

    `trained_in` lists the sampled tokens that an earlier sample of the session trains; they are
    masked unless requested, like those of branches that were not selected. `split` names the
    difference between turns that splits this branch into several samples. `shaping` lists the
    options besides the temperature that shaped the distribution, with their tokens. `stops` are the
    spans of tokens that contain a stop string, and `tool_parse_errors` counts turns with a tool
    call that could not be parsed. `notes` are the client's annotations of the turns: each distinct
    set of `user`, `metadata` and the like once. `support` has a row for each token of the sequence,
    with the set that a sampled token was drawn from, or is None if none was recorded. `reward` is
    the reward the session was finished with, None without one.

    `kind` is the kind of the branch and `evidence` how it was determined. `branch` is the index, in
    the session, of the first turn that belongs to this branch only, `turn_index` that of the
    sample's last turn. `parent` is the branch it came from (for a compaction, the one it replaced),
    `depth` the number of branches above it. `harness` names the program that made the turns.
    `weight` is the weight of the sample, 1 unless weights were requested.
    """

    token_ids: list[int]
    sampled_mask: list[bool]
    logprobs: list[float]
    versions: tuple[VersionSpan, ...]
    logprob_mode: LogprobMode = "raw"
    temperature: float = 1.0
    experts: RoutedExperts | None = None
    support: Support | None = None
    adapter: str | None = None
    breaks: tuple[str, ...] = ()
    aborts: int = 0
    workers: tuple[str, ...] = ()
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

    def __post_init__(self) -> None:
        check_aligned(len(self.token_ids), self.sampled_mask, "mask entries")
        check_aligned(len(self.token_ids), self.logprobs, "logprobs")
        mask = np.asarray(self.sampled_mask, dtype=bool)
        values = np.asarray(self.logprobs, dtype=np.float64)
        stray = np.flatnonzero(~mask & (values != 0.0))
        if stray.size:
            at = int(stray[0])
            raise BadLogprob(f"logprob at position {at} is {values[at]}, but it was not sampled")
        bad = np.flatnonzero(~(np.isfinite(values) & (values > SENTINEL)))
        if bad.size:
            at = int(bad[0])
            raise BadLogprob(f"logprob at position {at} is {values[at]}, expected a finite number")
        covered = np.zeros(len(mask), dtype=bool)
        for span in self.versions:
            if not 0 <= span.start < span.end <= len(mask) or covered[span.start : span.end].any():
                raise BadVersions(f"{span} does not fit a sample of {len(mask)} tokens")
            covered[span.start : span.end] = True
        wrong = np.flatnonzero(covered != mask)
        if wrong.size:
            raise BadVersions(f"position {int(wrong[0])} is sampled or has a version, but not both")
        if self.experts is not None:
            self.experts.check_covers(len(self.token_ids))
        if self.support is not None:
            self.support.check_contains(self.token_ids)

    @property
    def support_absent(self) -> bool:
        """Whether sampled tokens were drawn from a part of the vocabulary that was not recorded.

        Trainers that know nothing of the options compare their logprobs with the wrong ones.
        """
        return self._unrecorded([span for span in self.shaping if span.shaping.restricts])

    @property
    def support_lost(self) -> bool:
        """Whether that part depended on the weights, so that later ones cannot compute it again."""
        return self._unrecorded([span for span in self.shaping if span.shaping.truncates])

    def _unrecorded(self, spans: list[ShapedSpan]) -> bool:
        if not spans:
            return False
        missing = np.asarray(self.sampled_mask, dtype=bool)
        if self.support is not None:
            missing = missing & ~self.support.recorded()
        return any(bool(missing[span.start : span.end].any()) for span in spans)

    def numpy(self) -> dict[str, npt.NDArray[Any]]:
        """Return token_ids int64, sampled_mask bool and logprobs float32, each of shape
        (tokens,).
        """
        return {
            "token_ids": np.asarray(self.token_ids, dtype=np.int64),
            "sampled_mask": np.asarray(self.sampled_mask, dtype=bool),
            "logprobs": np.asarray(self.logprobs, dtype=np.float32),
        }

    def torch(self) -> dict[str, torch.Tensor]:
        """Return the arrays of `numpy()` as tensors that share their memory."""
        import torch

        return {name: torch.from_numpy(array) for name, array in self.numpy().items()}

    def to_json(self) -> bytes:
        """Return one line of JSON without a line break; `from_json` restores an equal sample."""
        from lockstep.tokens.sample_json import encode  # which needs this class

        return encode(self)

    @classmethod
    def from_json(cls, line: bytes | str) -> Sample:
        """Return the sample that `to_json` wrote."""
        from lockstep.tokens.sample_json import decode

        return decode(line)
