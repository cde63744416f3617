"""Probe: the trainer's logprobs of some sequences, in a file beside its weights."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.checkpoint import safetensors_file
from lockstep.checkpoint.manifest import PROBE
from lockstep.tokens.errors import BadRequest, CheckpointError

FORMAT = "lockstep-probe-1"
LENGTHS = (160, 66) + (9,) * 24
"""Lengths of the built-in sequences: a few hundred tokens, because some workers score them while
paused. Long ones cross the blocks of 64 or 128 keys in which attention is summed. Short ones, with
their many first positions, reach experts that tokens in a long context never do.
"""
THOROUGH = LENGTHS + (128,) * 12
"""Lengths for workers that are not bit-exact: about 2,000 tokens, for reliable statistics."""
MEASURED = "measured"
"""Tolerance in a file whose workers are judged by measured noise."""
MOST_SEQUENCES = 4096
MOST_TOKENS = 1 << 18
"""Limits of a probe. Those of trainers have tens of sequences and hundreds to thousands of tokens;
every worker scores all of it before it serves new weights.
"""
LARGEST_TOLERANCE = 1.0
"""Maximum tolerance in nats. With more, other weights than the trainer's would pass."""
GOLDEN = (math.sqrt(5) - 1) / 2
SEED = 0
Scores = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of comparing logprobs. `where` names the worst position if it did not pass."""

    passed: bool
    max_difference: float
    where: str | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """Sequences, the logprob of each token after the first, and the allowed difference.

    A `tolerance` of None means that it is measured: see `lockstep.fleet.update.judgement`.
    `previous` are the logprobs under the previous weights, NaN if unknown; `dtype` is the dtype of
    the model's computation, `adapter` the name of the adapter. Raises CheckpointError unless every
    logprob is finite and all lengths match.
    """

    sequences: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    tolerance: float | None
    adapter: str | None = None
    version: str | None = None
    previous: tuple[tuple[float, ...], ...] | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        check_size(len(self.sequences), sum(map(len, self.sequences)))
        if not self.sequences or min(map(len, self.sequences)) < 2:
            raise CheckpointError(
                f"a probe of sequences with {[len(s) for s in self.sequences]} tokens proves "
                "nothing: each needs 2 or more"
            )
        if [len(row) + 1 for row in self.logprobs] != [len(ids) for ids in self.sequences]:
            raise CheckpointError(
                f"the probe has sequences of {[len(ids) for ids in self.sequences]} tokens, but "
                f"{[len(row) for row in self.logprobs]} logprobs: one fewer is expected of each"
            )
        if min(map(min, self.sequences)) < 0:
            raise CheckpointError(f"the probe has token id {min(map(min, self.sequences))}")
        for at, row in enumerate(self.logprobs):
            for token, value in enumerate(row, start=1):
                if not (math.isfinite(value) and value <= 0.0):
                    raise CheckpointError(
                        f"the probe has logprob {value} for token {token} of sequence {at}: the "
                        "model it was made from computes no probabilities there"
                    )
        tolerance = 0.0 if self.tolerance is None else self.tolerance
        if not 0.0 <= tolerance <= LARGEST_TOLERANCE:
            raise CheckpointError(
                f"the probe has tolerance {tolerance}: expected 0 to {LARGEST_TOLERANCE:g}"
            )
        if self.previous is not None:
            counts = [len(row) for row in self.previous]
            if counts != [len(row) for row in self.logprobs]:
                raise CheckpointError(
                    f"the probe has {counts} logprobs under the weights before: expected as many "
                    "as under the new ones"
                )

    @classmethod
    def beside(cls, directory: Path) -> Probe | None:
        """Return the probe in a checkpoint's (or adapter's) directory, or None."""
        path = directory / PROBE
        return cls.read(path) if path.exists() or path.is_symlink() else None

    @classmethod
    def read(cls, path: Path) -> Probe:
        """Return the probe in a file. Raises CheckpointError if it is missing or invalid."""
        file = safetensors_file.TensorFile.read(path)
        if file.metadata.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} has format {file.metadata.get('format')!r}, expected {FORMAT!r}"
            )
        # By the header, before an array is read.
        sizes = {entry.name: math.prod(entry.shape) for entry in file.entries}
        check_size(sizes.get("lengths", 0), sizes.get("token_ids", 0))
        ids, lengths = _vector(file, "token_ids", "i"), _vector(file, "lengths", "i")
        logprobs = _vector(file, "logprobs", "f")
        if lengths.size == 0 or int(lengths.min()) < 2 or int(lengths.max()) > ids.size:
            raise CheckpointError(f"{path} has lengths {lengths.tolist()[:8]}: expected 2 or more")
        if int(lengths.sum()) != ids.size or ids.size - lengths.size != logprobs.size:
            raise CheckpointError(
                f"{path} has {lengths.size} sequences of {int(lengths.sum())} tokens together, but "
                f"{ids.size} token ids and {logprobs.size} logprobs"
            )
        previous: npt.NDArray[np.generic] | None = None
        if any(entry.name == "previous_logprobs" for entry in file.entries):
            previous = _vector(file, "previous_logprobs", "f")
            if previous.size != logprobs.size:
                raise CheckpointError(
                    f"{path} has {previous.size} previous_logprobs, expected {logprobs.size}"
                )
        tolerance_text = file.metadata.get("tolerance", "none")
        try:
            tolerance = None if tolerance_text == MEASURED else float(tolerance_text)
        except ValueError:
            raise CheckpointError(f"{path} has no tolerance in its metadata") from None
        return cls(
            sequences=_rows(ids, lengths),
            logprobs=_rows(logprobs, lengths - 1),
            tolerance=tolerance,
            adapter=file.metadata.get("adapter"),
            version=file.metadata.get("version"),
            previous=None if previous is None else _rows(previous, lengths - 1),
            dtype=file.metadata.get("dtype"),
        )

    def write(self, path: Path) -> None:
        """Write the probe to a file atomically. Logprobs keep every bit."""
        tolerance_text = MEASURED if self.tolerance is None else repr(float(self.tolerance))
        metadata = {"format": FORMAT, "tolerance": tolerance_text}
        metadata |= {"adapter": self.adapter} if self.adapter is not None else {}
        metadata |= {"version": self.version} if self.version is not None else {}
        metadata |= {"dtype": self.dtype} if self.dtype is not None else {}
        arrays = {
            "token_ids": np.array([i for ids in self.sequences for i in ids], dtype="<i8"),
            "lengths": np.array([len(ids) for ids in self.sequences], dtype="<i8"),
            "logprobs": np.array([p for row in self.logprobs for p in row], dtype="<f8"),
        }
        if self.previous is not None:
            before = [p for row in self.previous for p in row]
            arrays["previous_logprobs"] = np.array(before, dtype="<f8")
        safetensors_file.write(path, arrays, metadata)


def check_size(sequences: int, tokens: int) -> None:
    """Raise CheckpointError for a probe that would occupy workers for too long."""
    if sequences > MOST_SEQUENCES or tokens > MOST_TOKENS:
        raise CheckpointError(
            f"the probe has {sequences} sequences of {tokens} tokens together: expected at most "
            f"{MOST_SEQUENCES} sequences and {MOST_TOKENS} tokens"
        )


def compare(expected: Scores, scores: Scores, tolerance: float) -> Verdict:
    """Pass if every score is within `tolerance` of the expected one; NaN never is."""
    counts, expected_counts = [len(row) for row in scores], [len(row) for row in expected]
    if counts != expected_counts:
        return Verdict(
            False, math.inf, f"logprobs per sequence: {counts} instead of {expected_counts}"
        )
    worst, where = 0.0, None
    for at, (row, right) in enumerate(zip(scores, expected, strict=True)):
        scored, reference = np.array(row, dtype=np.float64), np.array(right, dtype=np.float64)
        with np.errstate(invalid="ignore"):
            off = np.abs(scored - reference)
        off[~np.isfinite(off)] = np.inf
        if off.size and float(off.max()) > worst:
            worst, token = float(off.max()), int(off.argmax())
            where = (
                f"token {token + 1} of sequence {at}: {scored[token]} instead of {reference[token]}"
            )
    passed = worst <= tolerance
    return Verdict(passed, worst, None if passed else where)


def builtin(
    vocab_size: int, max_len: int, shape: Sequence[int] = LENGTHS
) -> tuple[tuple[int, ...], ...]:
    """Return the sequences to score without a probe, for this vocabulary and context size.

    `shape` are their lengths, LENGTHS or THOROUGH. The sequences are always the same, spread evenly
    over the vocabulary in no order, so that many embedding rows, positions and contexts take part.
    Whether every expert does depends on the model; a trainer ensures that when it writes its own
    probe.
    """
    if vocab_size < 1:
        raise BadRequest(f"vocab_size is {vocab_size}, expected 1 or more", param="vocab_size")
    if max_len < 2:
        raise BadRequest(
            f"max_len is {max_len}: one logprob needs 2 tokens or more", param="max_len"
        )
    lengths = [min(length, max_len) for length in shape]
    # Steps of the golden ratio never come close to earlier points.
    ids = [int(vocab_size * ((at + 0.5) * GOLDEN % 1.0)) for at in range(sum(lengths))]
    random.Random(SEED).shuffle(ids)
    ends = [sum(lengths[: at + 1]) for at in range(len(lengths))]
    return tuple(tuple(ids[end - length : end]) for end, length in zip(ends, lengths, strict=True))


def _rows(values: npt.NDArray[np.generic], lengths: npt.NDArray[Any]) -> tuple[Any, ...]:
    return tuple(tuple(part.tolist()) for part in np.split(values, np.cumsum(lengths)[:-1]))


def _vector(file: safetensors_file.TensorFile, name: str, kind: str) -> npt.NDArray[np.generic]:
    array = file.array(name)
    if array.ndim != 1 or array.dtype.kind != kind:
        raise CheckpointError(
            f"tensor {name!r} of {file.path} has shape {array.shape} and dtype {array.dtype}: "
            f"expected one row of {'integers' if kind == 'i' else 'floats'}"
        )
    return array
