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
    """Where this rank may read from. `roots` limits directories; none given: any."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._groups: dict[str, Broadcast] = {}
        self.roots: tuple[Path, ...] = ()

    def read(self, ask: Stage) -> TensorsRead:
        """The tensors by name, copied: whatever happens to the source later does not matter.

        Raises BadRequest unless exactly one source is named, and what reading it can raise.
        """
        given = (ask.model_path, ask.shared_name, ask.group_name)
        if given.count(None) != 2:
            raise BadRequest(
                f"model_path is {given[0]!r}, shared_name {given[1]!r}, group_name {given[2]!r}: "
                "expected exactly one of them",
                param="model_path",
            )
        if ask.model_path is not None:
            return self._directory(Path(ask.model_path))
        if ask.shared_name is not None:
            return TensorsRead(dict(read_shared(ask.shared_name, ask.tensors)))
        group = self._groups.get(str(ask.group_name))
        if group is None:
            raise NotFound(f"group {ask.group_name!r} was not joined", param="group_name")
        specs = [TensorSpec(one.name, tuple(one.shape), one.dtype) for one in ask.tensors]
        return TensorsRead(dict(group.receive(specs, "cpu")))

    def join(self, ask: JoinGroup) -> None:
        """Joins a broadcast group; `rank` is that of the server's first rank."""
        self._groups[ask.group_name] = Broadcast.join(
            ask.master_address,
            ask.master_port,
            ask.rank + self._rank,
            ask.world_size,
            backend=ask.backend,
            seconds=ask.timeout_seconds,
        )

    def leave(self) -> None:
        self._groups.clear()

    def _directory(self, given: Path) -> TensorsRead:
        if not given.is_absolute():
            raise BadRequest(
                f"model_path is {str(given)!r}, a relative path: give an absolute one",
                param="model_path",
            )
        path = given.resolve()
        if self.roots and not any(path.is_relative_to(root) for root in self.roots):
            raise Forbidden(f"{path} is outside {', '.join(map(str, self.roots))}")
        check_stable(path, Manifest.read(path))
        if not (path / INDEX).exists():
            return _tensors([path / WEIGHTS])
        places = read_object(path / INDEX).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise CheckpointError(f"{path / INDEX} has no weight_map")
        found = _tensors(path / name for name in sorted(set(places.values())))
        if missing := sorted(places.keys() - found.tensors.keys()):
            raise CheckpointError(f"{path} lacks {_some(missing)}, which its index names")
        return found


def completed(
    given: Mapping[str, Any], live: Mapping[str, Any], *, tied: bool, partial: bool
) -> dict[str, Any]:
    """All tensors of the model: those given and, where `partial`, the live ones for the others.

    Raises CheckpointError that names the tensors that the model does not have, lacks, or has in
    another shape, and those with numbers that are not finite.
    """
    found = {name: tensor for name, tensor in given.items() if not name.endswith(DERIVED)}
    wanted = {name: tensor for name, tensor in live.items() if not name.endswith(DERIVED)}
    if tied:
        wanted.pop(HEAD, None)
        head, embedding = found.pop(HEAD, None), found.get(EMBEDDING)
        if head is not None and (embedding is None or not head.equal(embedding)):
            raise CheckpointError(
                f"{HEAD} differs from {EMBEDDING}, but this model ties them: leave it out"
            )
    if not found:
        raise CheckpointError("there are no tensors")
    if extra := sorted(found.keys() - wanted.keys()):
        raise CheckpointError(f"{_some(extra)}: the served model has no such tensor")
    if (missing := sorted(wanted.keys() - found.keys())) and not partial:
        raise CheckpointError(
            f"{_some(missing)} of the served model are not there: send all tensors (also all parts "
            "of a fused module), or set partial and the others stay as they are"
        )
    for name, tensor in found.items():
        want = wanted[name]
        if tensor.shape != want.shape or tensor.is_floating_point() != want.is_floating_point():
            raise CheckpointError(
                f"{name!r} is {tensor.dtype} {list(tensor.shape)}, expected {want.dtype} "
                f"{list(want.shape)}"
            )
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise CheckpointError(f"{name!r} holds numbers that are not finite")
    # In the order of the live ones, so that all tensors of a module come together.
    return {name: found.get(name, tensor) for name, tensor in wanted.items()}


def _tensors(files: Iterable[Path]) -> TensorsRead:
    found: dict[str, Any] = {}
    with Digester() as digester:
        for path in files:
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118
                        # A copy: what safetensors gives is the file itself, mapped into memory.
                        found[name] = file.get_tensor(name).clone()
                        digester.add(name, found[name])
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from None
        return TensorsRead(found, digester.digests())


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(map(repr, names[:SHOWN]))}{more}"
