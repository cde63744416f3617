"""Checkpoints that all ranks of a trainer write together.

Every rank calls these functions with the same arguments. Each writes its own slices; rank 0 also
writes the configuration, the probe, the manifest and, last, STABLE.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.files import write_whole
from lockstep.checkpoint.manifest import GENERATION_CONFIG, PROBE
from lockstep.checkpoint.probe import THOROUGH, Probe, builtin
from lockstep.checkpoint.sliced_writer import (
    RANK_SECONDS,
    begin_attempt,
    finish,
    report_failure,
    wait_until_stable,
)
from lockstep.checkpoint.slices import RankRecord
from lockstep.checkpoint.validate import CONFIG
from lockstep.engine.probe import make_probe
from lockstep.engine.sharded.part_writer import write_parts
from lockstep.engine.sharded.parts import ModelParts, Part, Shard, parts_of_tensors
from lockstep.engine.sharded.ranks import Ranks
from lockstep.engine.weights.published import computed_dtype
from lockstep.tokens.errors import BadRequest, CheckpointError, Conflict

Score = Callable[[list[list[int]]], Sequence[Sequence[float]]]
"""Returns the logprob of each token after the first of each sequence. All ranks call it at once."""


def save_checkpoint(
    model: Any,
    directory: str | Path,
    *,
    version: str | None = None,
    dtype: torch.dtype | None = None,
    probe: bool = True,
    sequences: Sequence[Sequence[int]] | None = None,
    tolerance: float | None = None,
    previous: Probe | None = None,
    timeout: float = RANK_SECONDS,
) -> Path:
    """Save a transformers model whose ranks hold slices of it (FSDP2, HSDP) or copies (DDP).

    The directory must be on a file system that all ranks share. Weights are written as `dtype`, by
    default that of a mixed precision policy, else their own; each rank casts what it writes. The
    probe is one forward pass of all ranks, with the weights as they are published. Returns on every
    rank when the checkpoint is complete.

    Raises CheckpointError that names the rank which failed, or which did not call or write within
    `timeout` seconds, Conflict when the directory already holds a checkpoint, and BadRequest for a
    `dtype` in which the model does not compute.
    """
    model = getattr(model, "module", model)  # DistributedDataParallel
    dtype = _published_dtype(model, dtype)
    ranks = Ranks(timeout)
    parts = ModelParts(model, ranks)

    def write_config(path: Path) -> None:
        config = model.config.to_dict()
        config["architectures"] = [type(model).__name__.removeprefix("FSDP")]
        config["dtype"] = str(dtype or model.dtype).removeprefix("torch.")
        write_whole(path / CONFIG, _json(config))
        if getattr(model, "generation_config", None) is not None:
            write_whole(path / GENERATION_CONFIG, _json(model.generation_config.to_dict()))

    score = partial(
        make_probe, model, sequences=sequences, tolerance=tolerance, version=version,
        previous=previous, dtype=dtype,
    )  # fmt: skip
    return _Save(ranks, Path(directory).absolute(), version, dtype, timeout).run(
        parts, write_config, score if probe else None, overlap=not parts.gathers
    )


def save_tensors(
    tensors: Iterable[tuple[str, Shard | None, Tensor]],
    directory: str | Path,
    *,
    model: str | Path,
    score: Score | None,
    version: str | None = None,
    dtype: torch.dtype | None = None,
    sequences: Sequence[Sequence[int]] | None = None,
    tolerance: float | None = None,
    previous: Probe | None = None,
    timeout: float = RANK_SECONDS,
) -> Path:
    """Save the tensors that every rank yields as (name, shard, tensor), for any other trainer.

    Names are those of the checkpoint that workers started from, whose directory is `model`. A
    `Shard` says which box of the tensor this rank has. None says that the tensor is whole and that
    every rank yields it, as exporters such as Megatron-Bridge do: each rank then writes a share of
    its rows. Tensors are written as they come, a few hundred MB at a time, as `dtype` if given.

    `score` computes the probe: all ranks call it at once with the same sequences, and rank 0's
    result is written. Without it, workers cannot prove that they serve these weights. `previous` is
    the probe of the weights before. Raises what `save_checkpoint` raises.
    """
    ranks = Ranks(timeout)
    base = Path(model)

    def write_config(path: Path) -> None:
        config = json.loads((base / CONFIG).read_bytes())
        if dtype is not None:
            config["dtype"] = str(dtype).removeprefix("torch.")
        write_whole(path / CONFIG, _json(config))
        if (base / GENERATION_CONFIG).exists():
            write_whole(path / GENERATION_CONFIG, (base / GENERATION_CONFIG).read_bytes())

    def make() -> Probe:
        return _scored_probe(base, score, sequences, tolerance, version, previous)

    return _Save(ranks, Path(directory).absolute(), version, dtype, timeout).run(
        parts_of_tensors(tensors, ranks), write_config, make if score else None, overlap=False
    )


@dataclass(frozen=True, slots=True)
class _Save:
    """One save of all ranks into `directory`."""

    ranks: Ranks
    directory: Path
    version: str | None
    dtype: torch.dtype | None
    timeout: float

    def run(
        self,
        parts: Iterable[Part],
        write_config: Callable[[Path], None],
        make: Callable[[], Probe] | None,
        *,
        overlap: bool,
    ) -> Path:
        """Write the checkpoint; with `overlap` the probe is computed while slices are written."""
        attempt = self._begin()
        rank, count = self.ranks.rank, self.ranks.count
        outcome: dict[str, str] = {}
        failure: Exception | None = None
        try:
            write = partial(
                write_parts, parts, self.directory, self.ranks,
                attempt=attempt, version=self.version, dtype=self.dtype,
            )  # fmt: skip
            with ThreadPoolExecutor(1, thread_name_prefix="slices") as saver:
                # Parts that are gathered and the probe are both collective: one after the other.
                written = saver.submit(write) if overlap else _done(write())
                probe = make() if make is not None else None
                record = written.result()
            if rank == 0:
                write_config(self.directory)
                if probe is not None:
                    probe.write(self.directory / PROBE)
            record.write(self.directory)
            if probe is not None and probe.tolerance == 0.0:
                outcome["logprobs"] = hashlib.sha256(repr(probe.logprobs).encode()).hexdigest()
        except Exception as error:  # the other ranks must not wait for this one
            failure, outcome = error, {"error": f"{type(error).__name__}: {error}"}
            report_failure(self.directory, rank, attempt, error)
        self._check(outcome, failure)
        if rank == 0:
            finish(self.directory, count, attempt, seconds=self.timeout)
        else:
            wait_until_stable(self.directory, count, attempt, seconds=self.timeout)
        return self.directory

    def _begin(self) -> str:
        """Prepare the directory on rank 0; return the attempt, which all ranks share."""
        own = [str(self.directory), self.version, str(self.dtype), self.timeout]
        for rank, theirs in enumerate(self.ranks.exchange("called to save a checkpoint", own)):
            if theirs[:3] != own[:3]:
                raise CheckpointError(
                    f"rank {rank} of {self.ranks.count} saves version {theirs[1]!r} as {theirs[2]} "
                    f"to {theirs[0]}, but rank {self.ranks.rank} saves version {own[1]!r} as "
                    f"{own[2]} to {own[0]}: all ranks must save the same step"
                )
        begun: dict[str, str] = {}
        failure: Exception | None = None
        if self.ranks.rank == 0:
            try:
                begun = {"attempt": begin_attempt(self.directory)}
            except (Conflict, OSError) as error:  # the other ranks must not wait for this one
                failure, begun = error, {"error": f"{type(error).__name__}: {error}"}
        begun = self.ranks.exchange("prepared the directory", begun)[0]
        if failure is not None:
            raise failure
        if "error" in begun:
            raise CheckpointError(f"rank 0 could not prepare {self.directory}: {begun['error']}")
        return begun["attempt"]

    def _check(self, outcome: dict[str, str], failure: Exception | None) -> None:
        """Raise what failed here or on another rank; of an exact model, other logprobs there."""
        outcomes = self.ranks.exchange("written its slices", outcome)
        if failure is not None:
            raise failure
        for rank, theirs in enumerate(outcomes):
            if "error" in theirs:
                raise CheckpointError(
                    f"rank {rank} of {self.ranks.count} could not write its part of "
                    f"{self.directory}: {theirs['error']}"
                )
            if theirs != outcomes[0]:
                raise CheckpointError(
                    f"rank {rank} of {self.ranks.count} computes other logprobs than rank 0: the "
                    "weights of the ranks differ, so that no worker could reproduce what they "
                    "wrote; are gradients reduced on all ranks?"
                )


def _published_dtype(model: Any, dtype: torch.dtype | None) -> torch.dtype | None:
    computed = computed_dtype(model)
    if computed is not None and dtype not in (None, computed):
        raise BadRequest(
            f"dtype is {dtype}, but the mixed precision policy of the model computes with "
            f"{computed}: the probe would be of other weights than those saved; leave dtype out",
            param="dtype",
        )
    return computed or dtype


def _scored_probe(
    base: Path,
    score: Score | None,
    sequences: Sequence[Sequence[int]] | None,
    tolerance: float | None,
    version: str | None,
    previous: Probe | None,
) -> Probe:
    if sequences is None:
        config = json.loads((base / CONFIG).read_bytes())
        config = config.get("text_config", config)
        sequences = builtin(config["vocab_size"], config["max_position_embeddings"], THOROUGH)
    ids = tuple(map(tuple, sequences))
    rows = score([list(row) for row in ids]) if score is not None else []
    before = dict(zip(previous.sequences, previous.logprobs, strict=True)) if previous else {}
    return Probe(
        sequences=ids,
        logprobs=tuple(tuple(float(value) for value in row) for row in rows),
        tolerance=tolerance,
        version=version,
        previous=tuple(before[row] for row in ids) if set(ids) <= before.keys() else None,
    )


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2, default=str).encode()


def _done(record: RankRecord) -> Future[RankRecord]:
    done: Future[RankRecord] = Future()
    done.set_result(record)
    return done
