"""Reads new weights into this process's memory: from a directory, shared memory or a broadcast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from lockstep.checkpoint.digest import DERIVED
from lockstep.checkpoint.files import read_object
from lockstep.checkpoint.manifest import INDEX, WEIGHTS, Manifest, check_stable
from lockstep.engine.weights.broadcast import Broadcast, TensorSpec
from lockstep.engine.weights.digest import Digester
from lockstep.engine.weights.shared_memory import read_shared
from lockstep.protocol.control.worker import JoinGroup, Stage
from lockstep.tokens.errors import BadRequest, CheckpointError, Forbidden, NotFound

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
SHOWN = 3


@dataclass(frozen=True, slots=True)
class TensorsRead:
    """Tensors by name, and the digests of those that were read from a checkpoint."""

    tensors: dict[str, Any]
    digests: Mapping[str, str] | None = None


class Sources:
    """Where this rank may read from. `roots` limits directories; without any, all are allowed."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._groups: dict[str, Broadcast] = {}
        self.roots: tuple[Path, ...] = ()

    def read(self, request: Stage) -> TensorsRead:
        """The tensors by name, copied: whatever happens to the source later does not matter.

        Raises BadRequest unless exactly one source is named, and what reading it can raise.
        """
        sources = (request.model_path, request.shared_name, request.group_name)
        if sources.count(None) != 2:
            raise BadRequest(
                f"model_path is {sources[0]!r}, shared_name {sources[1]!r}, group_name "
                f"{sources[2]!r}: expected exactly one of them",
                param="model_path",
            )
        if request.model_path is not None:
            return self._directory(Path(request.model_path))
        if request.shared_name is not None:
            return TensorsRead(dict(read_shared(request.shared_name, request.tensors)))
        group = self._groups.get(str(request.group_name))
        if group is None:
            raise NotFound(f"group {request.group_name!r} was not joined", param="group_name")
        specs = [TensorSpec(one.name, tuple(one.shape), one.dtype) for one in request.tensors]
        return TensorsRead(dict(group.receive(specs, "cpu")))

    def join(self, request: JoinGroup) -> None:
        """Joins a broadcast group; `rank` is that of the server's first rank."""
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

    def _directory(self, directory: Path) -> TensorsRead:
        if not directory.is_absolute():
            raise BadRequest(
                f"model_path is {str(directory)!r}, a relative path: give an absolute one",
                param="model_path",
            )
        path = directory.resolve()
        if self.roots and not any(path.is_relative_to(root) for root in self.roots):
            raise Forbidden(f"{path} is outside {', '.join(map(str, self.roots))}")
        check_stable(path, Manifest.read(path))
        if not (path / INDEX).exists():
            return _tensors([path / WEIGHTS])
        places = read_object(path / INDEX).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise CheckpointError(f"{path / INDEX} has no weight_map")
        read = _tensors(path / name for name in sorted(set(places.values())))
        if missing := sorted(places.keys() - read.tensors.keys()):
            raise CheckpointError(f"{path} lacks {_some(missing)}, which its index names")
        return read


def completed(
    new: Mapping[str, Any], live: Mapping[str, Any], *, tied: bool, partial: bool
) -> dict[str, Any]:
    """All tensors of the model: the new ones and, where `partial`, the live ones for the others.

    Raises CheckpointError that names the tensors that the model does not have, lacks, or has in
    another shape, and those with numbers that are not finite.
    """
    tensors = {name: tensor for name, tensor in new.items() if not name.endswith(DERIVED)}
    wanted = {name: tensor for name, tensor in live.items() if not name.endswith(DERIVED)}
    if tied:
        wanted.pop(HEAD, None)
        head, embedding = tensors.pop(HEAD, None), tensors.get(EMBEDDING)
        if head is not None and (embedding is None or not head.equal(embedding)):
            raise CheckpointError(
                f"{HEAD} differs from {EMBEDDING}, but this model ties them: leave it out"
            )
    if not tensors:
        raise CheckpointError("there are no tensors")
    if extra := sorted(tensors.keys() - wanted.keys()):
        raise CheckpointError(f"{_some(extra)}: the served model has no such tensor")
    if (missing := sorted(wanted.keys() - tensors.keys())) and not partial:
        raise CheckpointError(
            f"{_some(missing)} of the served model are not there: send all tensors (also all parts "
            "of a fused module), or set partial and the others stay as they are"
        )
    for name, tensor in tensors.items():
        want = wanted[name]
        if tensor.shape != want.shape or tensor.is_floating_point() != want.is_floating_point():
            raise CheckpointError(
                f"{name!r} is {tensor.dtype} {list(tensor.shape)}, expected {want.dtype} "
                f"{list(want.shape)}"
            )
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise CheckpointError(f"{name!r} holds numbers that are not finite")
    # In the order of the live ones, so that all tensors of a module come together.
    return {name: tensors.get(name, tensor) for name, tensor in wanted.items()}


def _tensors(files: Iterable[Path]) -> TensorsRead:
    tensors: dict[str, Any] = {}
    with Digester() as digester:
        for path in files:
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118
                        # A copy: what safetensors gives is the file itself, mapped into memory.
                        tensors[name] = file.get_tensor(name).clone()
                        digester.add(name, tensors[name])
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from None
        return TensorsRead(tensors, digester.digests())


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(map(repr, names[:SHOWN]))}{more}"
