"""The control side of a backend: pauses, weights and adapters of one worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from lockstep.backends.registry import AdminName
from lockstep.checkpoint.sources import check_one_source
from lockstep.checkpoint.stores.url import Location, StoreUrl
from lockstep.protocol.control.read_back import ReadBack
from lockstep.protocol.control.worker import TensorSpec
from lockstep.tokens.errors import UnsupportedField
from lockstep.tokens.operation import FetchSummary, PauseMode

__all__ = [
    "AbortsRequests",
    "Admin",
    "AdminName",
    "Broadcaster",
    "Fenced",
    "PauseMode",
    "ProbesStaged",
    "ReadBack",
    "ReadsBack",
    "Source",
    "StagedScores",
    "TellsContents",
    "TensorSpec",
    "WeightContents",
    "WorkerView",
]


@dataclass(frozen=True, slots=True)
class WorkerView:
    """The state that a worker reports. A field is None where its backend does not report it."""

    version: str | None
    staged: str | None = None
    paused: bool | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Loaded adapters: name to the label of its contents ("" where the backend has none)."""
    in_flight: int | None = None
    incarnation: str | None = None
    """Changes when the worker's process is restarted, and has lost all its state."""
    generation: int = 0
    """The highest generation of a gateway that the worker has obeyed; 0 where it does not report
    it."""
    gateway: str | None = None
    """Identity of the gateway that `generation` belongs to; None where it is not reported."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where new weights come from: exactly one of a directory (on this host or, as a URL, in an
    object store), shared memory, or a broadcast.

    `shared` names a POSIX shared memory block that holds `tensors` one after the other (each at a
    multiple of 64 bytes); `group` names a broadcast group that was joined before and is about to
    send them. With `partial`, tensors that are left out keep their values; otherwise all must be
    there. Raises BadRequest unless exactly one source is named.
    """

    directory: Location | None = None
    shared: str | None = None
    group: str | None = None
    tensors: Sequence[TensorSpec] = ()
    partial: bool = False

    def __post_init__(self) -> None:
        check_one_source(directory=self.directory, shared=self.shared, group=self.group)

    def path(self, url: str) -> Path | None:
        """Return the directory, for a server at `url` that reads no object stores."""
        if isinstance(self.directory, StoreUrl):
            raise UnsupportedField(
                f"{url} cannot fetch {self.directory}: only Lockstep's own workers and vLLM with "
                "its extension read object stores; give this one a directory",
                param="weight_dir",
            )
        return self.directory


@dataclass(frozen=True, slots=True)
class Broadcaster:
    """How to join a broadcast group: the address of its store, and a rank."""

    host: str
    port: int
    rank: int
    world_size: int
    group: str = "weights"
    backend: Literal["gloo", "nccl"] = "gloo"
    seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class StagedScores:
    """Logprobs under staged weights. `proof` identifies those weights, whatever their label."""

    logprobs: list[list[float]]
    proof: str


@dataclass(frozen=True, slots=True)
class WeightContents:
    """The weights that a worker reports to have read. A field is None where it does not report it.

    `digest` identifies them as a checkpoint's digest does, `tensors` has the digest of each;
    `dtype` is the type it computes in, `proof` identifies them as a probe of staged weights does.
    `in_memory` says that the digest is of the memory that the worker computes with; otherwise it is
    of the tensors that were read, whatever the engine made of them.
    """

    digest: str | None = None
    dtype: str | None = None
    proof: str | None = None
    tensors: Mapping[str, str] = field(default_factory=dict)
    in_memory: bool = False


class Admin(Protocol):
    """Control of one worker in its dialect. Every method raises LockstepError, and no HTTP error.

    Each attempt has a timeout and each call a budget. Only idempotent calls are retried. A response
    that reports a failure (whatever its status), or reports nothing, is a failure.
    """

    @property
    def name(self) -> AdminName: ...

    @property
    def url(self) -> str: ...

    @property
    def stages(self) -> bool:
        """Whether weights can be staged beside the live ones and rolled back from memory.

        Where not, `stage` only stores the source, `commit` loads it while paused, and `rollback`
        loads the previous one again.
        """
        ...

    @property
    def probes_while_paused(self) -> bool:
        """Whether `probe` works on a paused worker. Where not, the worker must be resumed without
        traffic, probed, and only then given requests."""
        ...

    async def view(self) -> WorkerView: ...

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> None:
        """Pause the worker; return when it generates nothing any more."""
        ...

    async def resume(self) -> None: ...

    async def flush(self) -> None:
        """Drop cached prefixes."""
        ...

    async def stage(self, source: Source, version: str) -> FetchSummary | None:
        """Load weights beside the live ones; return what the worker downloaded for it, if it
        reports that."""
        ...

    async def commit(self, version: str) -> None:
        """Serve the staged weights under that label. Raises Conflict if another label is staged."""
        ...

    async def rollback(self) -> str | None:
        """Drop staged weights, or else undo the last commit; return the version served then."""
        ...

    async def probe(
        self, token_ids: Sequence[Sequence[int]], *, adapter: str | None = None
    ) -> list[list[float]]:
        """Return the logprobs of every token after the first of each sequence, under the live
        weights.

        Raises UnsupportedField on a paused worker unless `probes_while_paused`.
        """
        ...

    async def load_adapter(self, name: str, path: Path, label: str | None = None) -> str:
        """Serve an adapter, replacing one of that name; return the label of its contents."""
        ...

    async def unload_adapter(self, name: str) -> None: ...

    async def join_group(self, broadcaster: Broadcaster) -> None: ...

    async def close(self) -> None: ...


@runtime_checkable
class Fenced(Protocol):
    """A driver whose commands carry the generation of the gateway that sends them."""

    def fence(self, generation: Callable[[], int], gateway: str) -> None:
        """Send the number that `generation` returns, and the identity of the gateway, with every
        command from now on.

        Commands raise Superseded once the worker has obeyed a higher number, or the same number
        from another gateway. A worker without generations obeys all gateways.
        """
        ...


@runtime_checkable
class AbortsRequests(Protocol):
    """A driver that aborts requests by id, for servers whose data side has no route for it."""

    async def abort(self, *request_ids: str) -> int | None:
        """Abort these requests; return how many were running, or None if that is not reported.

        The ids are those that `DynamoTransport.sent_ids` returns.
        """
        ...


@runtime_checkable
class ProbesStaged(Protocol):
    """A driver whose worker scores staged weights while it serves the live ones.

    It can then serve exactly the weights that it scored, so they need no proof after the commit.
    """

    async def probe_staged(self, token_ids: Sequence[Sequence[int]]) -> StagedScores:
        """Return the logprobs of every token after the first, under the weights `commit_proved`
        serves."""
        ...

    async def commit_proved(self, version: str, proof: str) -> None:
        """Serve the weights that were scored, under that label. Raises Conflict, with nothing
        swapped, when other weights are staged now."""
        ...

    async def resume_proved(self, proof: str) -> None:
        """Resume if the proved weights are still served. Otherwise raise Conflict and stay
        paused."""
        ...


@runtime_checkable
class TellsContents(Protocol):
    """A driver whose worker reports what it read when it loaded its weights."""

    async def contents(self, *, staged: bool = False, tensors: bool = False) -> WeightContents:
        """Return what was read for the live or the staged weights; `tensors` adds the digest of
        each."""
        ...


@runtime_checkable
class ReadsBack(Protocol):
    """A driver whose worker can compare the weights it computes with to those it was given."""

    async def read_back(
        self, *, adapter: str | None = None, path: Path | None = None
    ) -> ReadBack | None:
        """Return the comparison for the live weights, or for an adapter loaded from `path`.

        Returns None where the worker cannot read its weights back.
        """
        ...
