"""The control side of a backend: pauses, weights and adapters of one worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from lockstep.checkpoint.sources import check_one_source
from lockstep.protocol.control.worker import TensorSpec
from lockstep.tokens.operation import PauseMode

__all__ = [
    "Admin",
    "AdminName",
    "Broadcaster",
    "Fenced",
    "PauseMode",
    "ProbesStaged",
    "Source",
    "StagedScores",
    "TellsContents",
    "TensorSpec",
    "WeightContents",
    "WorkerView",
]

AdminName = Literal["lockstep", "vllm", "prime-rl", "dynamo"]


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What a worker says of itself. None where its backend does not tell."""

    version: str | None
    staged: str | None = None
    paused: bool | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Loaded adapters: name to the label of its contents ("" where the backend knows none)."""
    in_flight: int | None = None
    incarnation: str | None = None
    """Changes when the worker's process is started anew: then it has forgotten everything."""
    generation: int = 0
    """The highest generation of a gateway that it has obeyed; 0 where it does not tell."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where new weights come from: exactly one of a directory, shared memory, or a broadcast.

    `shared` names a POSIX shared memory block that holds `tensors` one after the other (each at a
    multiple of 64 bytes); `group` a broadcast group that was joined before and is about to send
    them. `partial` says that tensors left out shall stay as they are; else all must be there.
    Raises BadRequest unless exactly one source is named.
    """

    directory: Path | None = None
    shared: str | None = None
    group: str | None = None
    tensors: Sequence[TensorSpec] = ()
    partial: bool = False

    def __post_init__(self) -> None:
        check_one_source(directory=self.directory, shared=self.shared, group=self.group)


@dataclass(frozen=True, slots=True)
class Broadcaster:
    """How to join a broadcast group: where its store is, and as which of how many."""

    host: str
    port: int
    rank: int
    world_size: int
    group: str = "weights"
    backend: Literal["gloo", "nccl"] = "gloo"
    seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class StagedScores:
    """Logprobs under staged weights. `proof` names those weights, whatever label they have."""

    logprobs: list[list[float]]
    proof: str


@dataclass(frozen=True, slots=True)
class WeightContents:
    """What a worker says of the weights it read. None where it does not tell.

    `digest` identifies them as a checkpoint's digest does, `tensors` one by one; `dtype` is the
    type it computes in, `proof` names them as a probe of what is staged does.
    """

    digest: str | None = None
    dtype: str | None = None
    proof: str | None = None
    tensors: Mapping[str, str] = field(default_factory=dict)


class Admin(Protocol):
    """Controls one worker in its dialect. Every method raises LockstepError, nothing of HTTP.

    Each attempt has a timeout and each call a budget; only what is idempotent is tried again. A
    response that says it failed (whatever its status), or says nothing, is a failure.
    """

    @property
    def name(self) -> AdminName: ...

    @property
    def url(self) -> str: ...

    @property
    def stages(self) -> bool:
        """Whether weights can be staged beside the live ones and rolled back from memory.

        Where not, `stage` only remembers the source, `commit` loads it while paused, and
        `rollback` loads the one before again.
        """
        ...

    @property
    def probes_while_paused(self) -> bool:
        """Whether `probe` works on a paused worker. Where not, it must be resumed without traffic,
        probed, and only then given requests."""
        ...

    async def view(self) -> WorkerView: ...

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> None:
        """Returns when nothing is generated any more."""
        ...

    async def resume(self) -> None: ...

    async def flush(self) -> None:
        """Forgets cached prefixes."""
        ...

    async def stage(self, source: Source, version: str) -> None: ...

    async def commit(self, version: str) -> None:
        """Serves the staged weights under that label. Raises Conflict if another is staged."""
        ...

    async def rollback(self) -> str | None:
        """Drops what is staged, or else undoes the last commit; the version served then."""
        ...

    async def probe(
        self, token_ids: Sequence[Sequence[int]], *, adapter: str | None = None
    ) -> list[list[float]]:
        """Logprobs of every token after the first of each sequence, under the live weights.

        Raises UnsupportedField on a paused worker unless `probes_while_paused`.
        """
        ...

    async def load_adapter(self, name: str, path: Path, label: str | None = None) -> str:
        """Serves an adapter, swapping one of that name; returns the label of its contents."""
        ...

    async def unload_adapter(self, name: str) -> None: ...

    async def join_group(self, broadcaster: Broadcaster) -> None: ...

    async def close(self) -> None: ...


@runtime_checkable
class Fenced(Protocol):
    """A driver that says with each command which generation of a gateway sends it."""

    def fence(self, generation: Callable[[], int]) -> None:
        """Takes the number from `generation` from now on. Commands raise Superseded once the worker
        has obeyed a higher one; a worker that knows no generations obeys all."""
        ...


@runtime_checkable
class ProbesStaged(Protocol):
    """A driver whose worker scores what it has staged while it serves what is live, and can serve
    exactly that afterwards: nothing is left to be proved once it did."""

    async def probe_staged(self, token_ids: Sequence[Sequence[int]]) -> StagedScores:
        """Logprobs of every token after the first, under exactly what `commit_proved` serves."""
        ...

    async def commit_proved(self, version: str, proof: str) -> None:
        """Serves the weights that were scored, under that label.

        Raises Conflict, with nothing swapped, when anything else is staged now.
        """
        ...

    async def resume_proved(self, proof: str) -> None:
        """`resume` if they are served still. Raises Conflict, and stays paused, if not."""
        ...


@runtime_checkable
class TellsContents(Protocol):
    """A driver whose worker can tell what it read when it loaded its weights."""

    async def contents(self, *, staged: bool = False, tensors: bool = False) -> WeightContents:
        """What was read for the live or the staged weights; `tensors` adds the digest of each."""
        ...
