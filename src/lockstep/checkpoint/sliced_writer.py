"""How the ranks of a trainer write one checkpoint: each its own files, rank 0 the manifest.

Rank 0 calls `begin_attempt` and sends the attempt to the others. Every rank writes its files and
its record. Rank 0 calls `finish`, which waits for the records, and the others `wait_until_stable`.
Ranks meet in the directory only, so it must be on a file system that all of them share; no wait is
without a limit, and a rank that fails says so to the others.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from lockstep.checkpoint.files import read_object, write_whole
from lockstep.checkpoint.manifest import STABLE, begin, mark_stable, write_manifest
from lockstep.checkpoint.slices import RankRecord, assemble, rank_file
from lockstep.tokens.errors import CheckpointError

T = TypeVar("T")
RANK_SECONDS = 600.0
"""Default limit of the wait for other ranks: time to write hundreds of GB to a slow file system."""
POLL_SECONDS = 0.01


def begin_attempt(directory: Path) -> str:
    """Prepare the directory and return the attempt. Raises Conflict if it holds a checkpoint."""
    begin(directory)
    return secrets.token_hex(8)


def finish(
    directory: Path, ranks: int, attempt: str, *, seconds: float = RANK_SECONDS
) -> tuple[RankRecord, ...]:
    """Wait for the records of all ranks, write the manifest and mark the checkpoint as stable.

    Raises CheckpointError that names the rank that failed or did not write within `seconds`, or the
    tensor and slice that is missing or claimed twice. The other ranks then fail too.
    """
    waiting = _Wait(directory, ranks, attempt, seconds)
    try:
        records = tuple(
            waiting.until(rank, partial(_record, directory, rank, attempt), "written its slices")
            for rank in range(ranks)
        )
        assemble(records, str(directory))
        written = {name: file for record in records for name, file in record.files.items()}
        write_manifest(directory, written=written, ranks=ranks)
        mark_stable(directory)
    except Exception as error:
        report_failure(directory, 0, attempt, error)
        raise
    return records


def wait_until_stable(
    directory: Path, ranks: int, attempt: str, *, seconds: float = RANK_SECONDS
) -> None:
    """Wait on a rank other than 0 until rank 0 has finished the checkpoint.

    Raises CheckpointError when rank 0 failed, or did not finish within `seconds`.
    """
    _Wait(directory, ranks, attempt, seconds).until(
        0, lambda: (directory / STABLE).exists() or None, "finished the checkpoint"
    )


def report_failure(directory: Path, rank: int, attempt: str, error: Exception) -> None:
    """Tell the other ranks that this one cannot write its part."""
    body = {"attempt": attempt, "error": f"{type(error).__name__}: {error}"}
    write_whole(directory / failure_file(rank), json.dumps(body).encode())


def failure_file(rank: int) -> str:
    """Return the name of the file that says that a rank failed."""
    return f".rank-{rank:05d}.failed"


def _record(directory: Path, rank: int, attempt: str) -> RankRecord | None:
    path = directory / rank_file(rank)
    if not path.exists():
        return None
    record = RankRecord.read(path)
    # A process of an earlier attempt may still run, and write into the directory of this one.
    return record if record.attempt == attempt else None


class _Wait:
    """A bounded wait for other ranks."""

    def __init__(self, directory: Path, ranks: int, attempt: str, seconds: float) -> None:
        self._directory, self._ranks, self._attempt = directory, ranks, attempt
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def until(self, rank: int, ready: Callable[[], T | None], task: str) -> T:
        """Return what `ready` returns once it is not None.

        Raises CheckpointError if the rank reports a failure, or at the limit.
        """
        failed = self._directory / failure_file(rank)
        while (value := ready()) is None:
            if failed.exists() and (report := read_object(failed))["attempt"] == self._attempt:
                raise CheckpointError(
                    f"rank {rank} of {self._ranks} could not write its part of {self._directory}: "
                    f"{report['error']}"
                )
            if time.monotonic() >= self._deadline:
                raise CheckpointError(
                    f"rank {rank} of {self._ranks} has not {task} in {self._directory} within "
                    f"{self._seconds:g} s: is it still running, and does it see this directory?"
                )
            time.sleep(POLL_SECONDS)
        return value
