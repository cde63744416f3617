"""Record of one change of a fleet, as the gateway stores it and callers receive it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

OperationStatus = Literal["running", "done", "failed", "lost"]
PauseMode = Literal["abort", "wait", "keep"]
"""Effect of a pause on running requests: abort them, wait for them, or keep them for later."""

RequiredProof = Literal["any", "held"]
"""Least evidence of a worker: `held`: that the weights it computes with are the checkpoint's."""


@dataclass(slots=True)
class Evidence:
    """Evidence for accepting or rejecting a worker: the differences of its logprobs and the bound.

    `digest` says whether the worker reports exactly the checkpoint's contents. `held` says whether
    the weights that it computes with, read back, equal those contents (`partial`: some tensors
    could not be read back), and `elements` how many were compared. `scope` states what is proved.
    """

    decided_by: Literal["held", "bits", "scores", "digest", "majority"] | None = None
    max_difference: float | None = None
    mean_difference: float | None = None
    bound: float | None = None
    digest: Literal["match", "mismatch", "unknown"] = "unknown"
    held: Literal["match", "mismatch", "partial", "unknown"] = "unknown"
    elements: int | None = None
    scope: str | None = None


@dataclass(slots=True)
class FetchSummary:
    """Cost of bringing a checkpoint from a store to one host: `nbytes` were downloaded in
    `seconds`, of `total` bytes with its chain; the cache of the host had the others.
    """

    nbytes: int
    total: int
    seconds: float


@dataclass(slots=True)
class WorkerResult:
    """Result of one worker: `ok`, or the phase and reason of its failure; seconds per phase.

    `fetched` is what it downloaded while it staged the weights, if they are in a store.
    """

    status: Literal["ok", "failed", "quarantined", "rolled_back"] = "ok"
    phase: str | None = None
    error: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    evidence: Evidence | None = None
    fetched: FetchSummary | None = None


@dataclass(slots=True)
class DeltaSummary:
    """Size of a delta: its bytes beside those of a full checkpoint, changed values of all values.

    `depth` counts the deltas since the last full checkpoint; `encodings` the tensors by encoding.
    """

    base: str
    depth: int
    nbytes: int
    full_bytes: int
    changed: int
    values: int
    encodings: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Operation:
    """One change of the fleet, recorded from its start. The same key returns the same operation.

    A `lost` operation was in progress when its gateway ended; how far it got is unknown. For a
    failed one, `error`, `code` and `param` are those of the error that its caller received.
    `warnings` tell the caller about problems that did not stop it. `nbytes` is the size of the new
    weights, if known, `delta` what they change if they were published as a delta, and `fetched`
    what the gateway downloaded of them if they are in a store.
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
    delta: DeltaSummary | None = None
    fetched: FetchSummary | None = None
