"""The input of an explanation: samples, the checkpoint they should come from, and what is known."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lockstep.export.exported import turns
from lockstep.tokens import Sample
from lockstep.tokens.completion import usable
from lockstep.tokens.errors import BadRequest

Values = npt.NDArray[np.float64]
"""One number per compared token, over all samples one after another."""
Ints = npt.NDArray[np.int64]
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Group:
    """Sampled tokens of one turn under one version label: they have one cause, if any.

    [start, end) are positions in the sample, [first, first + end - start) places in `Values`.
    """

    sample: int
    turn: int
    start: int
    end: int
    first: int
    version: str

    @property
    def places(self) -> slice:
        return slice(self.first, self.first + self.end - self.start)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A mismatch to explain. Raises BadRequest for parts that do not fit each other.

    `checkpoint` is the directory of the weights that the tokens were labelled with; `others` are
    checkpoints that an engine may have served instead, such as those of earlier steps, with the
    version label of each where it is known. `engine_dtype` and `trainer_dtype` are what the two
    sides are meant to compute in. `trainer` are a trainer's logprobs, one per sampled token over
    all samples; without them, the samples are compared with the checkpoint alone.
    """

    samples: Sequence[Sample]
    checkpoint: Path
    others: tuple[tuple[str, Path], ...] = ()
    adapter: Path | None = None
    other_adapters: tuple[Path, ...] = ()
    engine_dtype: str = "float32"
    trainer_dtype: str | None = None
    trainer: Sequence[float] | None = None
    tokenizer: Path | None = None
    groups: tuple[Group, ...] = field(init=False)

    def __post_init__(self) -> None:
        for name in ("engine_dtype", "trainer_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in DTYPES:
                raise BadRequest(f"{name} is {dtype!r}: expected one of {DTYPES}", param=name)
        object.__setattr__(self, "groups", tuple(_groups(self.samples)))
        if not self.groups:
            raise BadRequest(
                f"{len(self.samples)} samples have no sampled token: nothing can be compared",
                param="samples",
            )
        if self.trainer is not None and len(self.trainer) != self.tokens:
            raise BadRequest(
                f"the trainer has {len(self.trainer)} logprobs, but the samples have {self.tokens} "
                "sampled tokens: give one number per sampled token, sample after sample",
                param="trainer",
            )

    @property
    def tokens(self) -> int:
        """Number of compared tokens."""
        last = self.groups[-1]
        return last.first + last.end - last.start

    @cached_property
    def engine(self) -> Values:
        """The engine's logprobs of the compared tokens."""
        return np.concatenate(
            [self.samples[g.sample].logprobs[g.start : g.end] for g in self.groups]
        ).astype(np.float64)

    @cached_property
    def positions(self) -> Ints:
        """The position of each compared token in its sample."""
        return np.concatenate([np.arange(g.start, g.end) for g in self.groups])

    @cached_property
    def group_of(self) -> Ints:
        """The index of the group of each compared token."""
        return np.concatenate([np.full(g.end - g.start, at) for at, g in enumerate(self.groups)])

    @cached_property
    def digest(self) -> str:
        """Digest of the samples, which names the stored results of a resumed explanation."""
        digest = hashlib.sha256()
        for sample in self.samples:
            digest.update(sample.to_json())
        return digest.hexdigest()[:16]


def _groups(samples: Sequence[Sample]) -> list[Group]:
    groups: list[Group] = []
    at = 0
    for index, sample in enumerate(samples):
        for turn, (start, end) in enumerate(turns(sample)):
            for span in sample.versions:
                begin, stop = max(start, span.start, 1), min(end, span.end)
                if begin < stop:
                    groups.append(Group(index, turn, begin, stop, at, span.version))
                    at += stop - begin
    return groups


def select(
    samples: Sequence[Sample], most_tokens: int, vocab: int
) -> tuple[list[Sample], list[int]]:
    """Return samples with at most `most_tokens` sampled tokens in all, and their indices.

    They are spread evenly over the input, so that every worker and version of a batch is there.
    Tokens outside a vocabulary of `vocab` raise BadRequest: such samples are of another model.
    """
    for index, sample in enumerate(samples):
        if sample.token_ids and not 0 <= min(sample.token_ids) <= max(sample.token_ids) < vocab:
            raise BadRequest(
                f"sample {index} has token id {max(sample.token_ids)}, but the checkpoint's "
                f"vocabulary has {vocab}: the samples are of another model",
                param="samples",
            )
    counts = [sum(sample.sampled_mask) for sample in samples]
    fitting = [at for at, count in enumerate(counts) if count > 0]
    total = sum(counts)
    stride = max(1, -(-total // most_tokens))
    order = [at for offset in range(stride) for at in fitting[offset::stride]]
    chosen: list[int] = []
    used = 0
    for at in order:
        if not chosen or used + counts[at] <= most_tokens:
            chosen.append(at)
            used += counts[at]
    return [samples[at] for at in sorted(chosen)], sorted(chosen)


def check_values(values: Sequence[float], name: str) -> None:
    """Raise BadRequest for numbers that no trainer means, such as NaN."""
    for at, value in enumerate(values):
        if not usable(value):
            raise BadRequest(f"{name}[{at}] is {value}: expected a logprob", param=name)
