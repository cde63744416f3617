"""The record of one change of a fleet, as its gateway keeps it and its callers get it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

OperationStatus = Literal["running", "done", "failed", "lost"]


@dataclass(slots=True)
class Evidence:
    """Why a worker was believed or not: how far its logprobs were off, and what was allowed.

    `digest` says whether it reports the checkpoint's very contents.
    """

    decided_by: Literal["bits", "scores", "digest", "majority"] | None = None
    max_difference: float | None = None
    mean_difference: float | None = None
    bound: float | None = None
    digest: Literal["match", "mismatch", "unknown"] = "unknown"


@dataclass(slots=True)
class WorkerResult:
    """How one worker fared: `ok`, or in which phase it failed and why; seconds per phase."""

    status: Literal["ok", "failed", "quarantined", "rolled_back"] = "ok"
    phase: str | None = None
    error: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    evidence: Evidence | None = None


@dataclass(slots=True)
class Operation:
    """One change of the fleet, from its beginning on. The same key gives the same operation.

    One that is `lost` was under way when its gateway ended: nobody knows how far it came. Of one
    that failed, `error`, `code` and `param` are those of the error that its caller got. `warnings`
    say what its caller should know although it went on. `nbytes` is the size of new weights, where
    it is known.
    """

    id: str
    kind: str
    request: dict[str, str | None]
    key: str | None = None
    status: OperationStatus = "running"
    started: float = 0.0
    ended: float | None = None
    version: str | None = None
    workers: dict[str, WorkerResult] = field(default_factory=dict)
    pause_seconds: float | None = None
    warnings: list[str] = field(default_factory=list)
    error: str | None = None
    code: str | None = None
    param: str | None = None
    http_status: int = 200
    nbytes: int | None = None
