"""Reading of new weights into this process's memory: a directory, shared memory or a broadcast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.checkpoint.open import open_checkpoint
from lockstep.checkpoint.stores.fetch import local_checkpoint
from lockstep.checkpoint.stores.url import AllowedRoots
from lockstep.checkpoint.tensor_names import (
    DERIVED,
    EMBEDDING,
    HEAD,
    check_names,
    tied_head_differs,
)
from lockstep.engine.weights.broadcast import Broadcast
from lockstep.engine.weights.digest import Digester
from lockstep.engine.weights.read import read_tensor
from lockstep.engine.weights.shared_memory import read_shared
from lockstep.protocol.control.worker import JoinGroup, Stage
from lockstep.tokens.errors import CheckpointError, NotFound


@dataclass(frozen=True, slots=True)
class TensorsRead:
    """Tensors by name, and the digests of those that were read from a checkpoint."""

    tensors: dict[str, Any]
    digests: Mapping[str, str] | None = None


class Sources:
    """The sources that this rank may read. `roots` limits directories and stores."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._groups: dict[str, Broadcast] = {}
        self.roots = AllowedRoots()

    def read(self, request: Stage) -> TensorsRead:
        """Return the tensors by name, copied, so that later changes of the source have no effect.
        Raises what reading the source raises."""
        if request.model_path is not None:
            return self._directory(request.model_path)
        if request.shared_name is not None:
            return TensorsRead(dict(read_shared(request.shared_name, request.tensors)))
        group = self._groups.get(str(request.group_name))
        if group is None:
            raise NotFound(f"group {request.group_name!r} was not joined", param="group_name")
        return TensorsRead(dict(group.receive(request.tensors, "cpu")))

    def join(self, request: JoinGroup) -> None:
        """Join a broadcast group; `rank` is that of the server's first rank."""
        self._groups[request.group_name] = Broadcast.join(
            request.master_address,
            request.master_port,
            request.rank + self._rank,
            request.world_size,
            backend=request.backend,
            seconds=request.timeout_seconds,
        )

    def leave(self) -> None:
        self._groups.clear()

    def _directory(self, directory: str) -> TensorsRead:
        tensors: dict[str, Any] = {}
        with (
            local_checkpoint(directory, self.roots, "model_path") as local,
            Digester() as digester,
        ):
            reader = open_checkpoint(local.directory)
            for name in reader.tensors:
                # A copy: the reader returns a view of the file, mapped into memory.
                tensors[name] = read_tensor(reader, name).clone()
                digester.add(name, tensors[name])
            return TensorsRead(tensors, digester.digests())


def complete_tensors(
    new: Mapping[str, Any], live: Mapping[str, Any], *, tied: bool, partial: bool
) -> dict[str, Any]:
    """Return all tensors of the model: the new ones and, if `partial`, the live ones for the rest.

    Raises CheckpointError that names tensors that the model does not have, that are missing, that
    have another shape, or that hold non-finite numbers.
    """
    check_names(new, live, "the update", tied=tied, partial=partial)
    tensors = {name: tensor for name, tensor in new.items() if not name.endswith(DERIVED)}
    wanted = {name: tensor for name, tensor in live.items() if not name.endswith(DERIVED)}
    if tied:
        wanted.pop(HEAD, None)
        head, embedding = tensors.pop(HEAD, None), tensors.get(EMBEDDING)
        if head is not None and (embedding is None or not head.equal(embedding)):
            raise tied_head_differs("the update")
    for name, tensor in tensors.items():
        want = wanted[name]
        if tensor.shape != want.shape or tensor.is_floating_point() != want.is_floating_point():
            raise CheckpointError(
                f"{name!r} is {tensor.dtype} {list(tensor.shape)}, expected {want.dtype} "
                f"{list(want.shape)}"
            )
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise CheckpointError(f"{name!r} holds numbers that are not finite")
    # In the order of the live tensors: vLLM expects all tensors of a module together.
    return {name: tensors.get(name, tensor) for name, tensor in wanted.items()}
