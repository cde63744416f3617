"""Checks of a recorded run that compute nothing: its chain, files, signatures and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from lockstep.chain.records import Chain, Record
from lockstep.checkpoint.digest import combined
from lockstep.checkpoint.manifest import Manifest
from lockstep.replay.tensor_difference import file_digests
from lockstep.tokens.errors import BadRequest, CheckpointError
from lockstep.train.learning.batch import Clock
from lockstep.train.records.run_dir import RunDirectory
from lockstep.train.records.step_contents import decode_groups, group_digests, sample_digests

START_LINKS = ("config", "code", "model", "arithmetic", "tensors")
STEP_LINKS = (
    "tasks", "seeds", "rewards", "updates", "file",
    "samples.token_ids", "samples.logprobs", "samples.versions", "samples.routes",
    "samples.supports",
    "batch.order", "batch.advantages", "batch.masks", "batch.packing",
    "learning.metrics", "learning.gradients", "learning.optimizer", "learning.weights",
)  # fmt: skip
"""Links of a complete record. A trainer that does not know one leaves it out."""

UNREADABLE = (BadRequest, LookupError, TypeError, ValueError)
"""Errors of contents that were altered, or written by another version."""


def chain_problems(chain: Chain) -> list[str]:
    """Return in sentences where the chain, or a file that it names, is not as it was written."""
    problems = list(chain.breaks)
    if "tensors" in chain.start:
        problems += _unreadable(chain, chain.start["tensors"])
    for step, record in chain.steps.items():
        problems += _step_problems(chain, step, record)
    return [*problems, *_gaps(chain)]


def checkpoint_problems(chain: Chain) -> list[str]:
    """Return in sentences which kept checkpoints are not those that the records name."""
    directory = RunDirectory(chain.directory)
    problems = []
    for step in sorted(directory.steps()):
        record = chain.steps.get(step)
        path = directory.checkpoint(step)
        try:
            manifest = Manifest.read(path)
            if manifest is None:
                continue
            manifest.check(path, hashes=True)
        except CheckpointError as error:
            names = _altered_tensors(path)
            problems.append(f"the checkpoint of step {step} was altered{names}: {error.message}")
            continue
        if not manifest.tensors or record is None or not record.get("learning"):
            continue
        if combined(manifest.tensors) != record["learning"].get("weights"):
            names = _differing(chain, record, manifest.tensors)
            problems.append(
                f"the checkpoint of step {step} holds other weights than its record: {names}"
            )
    return problems


def missing_links(chain: Chain) -> dict[str, int]:
    """Return the links that records lack, and how many records lack each."""
    missing = {name: 1 for name in START_LINKS if name not in chain.start}
    for record in chain.steps.values():
        for name in STEP_LINKS:
            if not _has(record, name):
                missing[name] = missing.get(name, 0) + 1
    return missing


def _has(record: Record, name: str) -> bool:
    section, _, key = name.partition(".")
    if section not in record:
        return False
    value = record[section]
    # A step without a token to learn from has None in the place of what it would have learnt.
    return not key or value is None or key in value


def _gaps(chain: Chain) -> Iterator[str]:
    """Yield a sentence for every step without a record between the first and the last."""
    steps = sorted(chain.steps)
    expected = range(int(chain.start["step"]) + 1, steps[-1] + 1) if steps else ()
    for step in sorted(set(expected) - set(steps)):
        yield f"step {step} has no record"


def _step_problems(chain: Chain, step: int, record: Record) -> Iterator[str]:
    learning = record.get("learning") or {}
    if "tensors" in learning:
        problems = _unreadable(chain, learning["tensors"])
        yield from problems
        if not problems:
            tensors = chain.contents(learning["tensors"])
            for kind in ("gradients", "optimizer", "weights"):
                if combined(tensors.get(kind, {})) != learning.get(kind):
                    yield f"step {step}: the digests of its {kind} are not those of its record"
    if "file" not in record:
        return
    if problems := _unreadable(chain, record["file"]):
        yield from problems
        return
    contents = chain.contents(record["file"])
    try:
        digests = content_digests(contents)
    except UNREADABLE as error:
        yield f"step {step}: {record['file']['name']} cannot be read: {error!r}"
        return
    for name, value in digests.items():
        if name in record and record[name] != value:
            yield f"step {step}: the {name} in {record['file']['name']} are not those of its record"


def content_digests(contents: Record) -> Record:
    """Return the digests of a step's file, as its record has them. May raise UNREADABLE."""
    samples = sample_digests(decode_groups(contents), Clock(dict(contents["clock"])))
    return {**group_digests(contents), "samples": samples}


def _altered_tensors(directory: Path) -> str:
    """Name the tensors of a checkpoint whose bytes are not those of its manifest."""
    manifest = Manifest.read(directory)
    try:
        digests = file_digests(directory)
    except (OSError, SafetensorError):
        return ""
    listed = {} if manifest is None else manifest.tensors
    names = [name for name, digest in digests.items() if listed.get(name, digest) != digest]
    return f" in {', '.join(names[:3])} ({len(names)} of {len(digests)} tensors)" if names else ""


def _unreadable(chain: Chain, file: Mapping[str, Any]) -> list[str]:
    try:
        chain.contents(file)
    except BadRequest as error:
        return [error.message]
    return []


def _differing(chain: Chain, record: Record, tensors: Mapping[str, str]) -> str:
    try:
        recorded = chain.contents(record["learning"]["tensors"])["weights"]
    except (BadRequest, KeyError):
        return "its tensors are not known"
    names = [name for name, digest in recorded.items() if tensors.get(name) != digest]
    return f"{', '.join(names[:3])} ({len(names)} of {len(recorded)} tensors)"
