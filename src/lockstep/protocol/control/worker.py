"""The worker's control dialect, POST /engine/<method>: Dynamo's names and the weight transaction.

Each method has one typed body; unknown fields are rejected.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Literal

import msgspec

from lockstep.checkpoint.sources import check_one_source
from lockstep.tokens.errors import BadRequest

ALIGNMENT = 64
"""Alignment of tensors in shared memory, in bytes."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_ELEMENTS = 1 << 36


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description of a tensor whose data is sent separately."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def check(self) -> None:
        """Raise BadRequest for a dtype or shape that cannot be sent."""
        if self.dtype not in DTYPE_BYTES:
            raise BadRequest(
                f"dtype of {self.name!r} is {self.dtype!r}: expected one of "
                f"{', '.join(DTYPE_BYTES)}",
                param="tensors",
            )
        if any(dim < 1 for dim in self.shape) or prod(self.shape) > MAX_ELEMENTS:
            raise BadRequest(
                f"shape of {self.name!r} is {list(self.shape)}: expected sizes of 1 or more, and "
                f"at most {MAX_ELEMENTS} elements",
                param="tensors",
            )

    @property
    def nbytes(self) -> int:
        """Size in bytes. Raises BadRequest as `check` does."""
        self.check()
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


class PlacedTensor(TensorSpec, frozen=True, omit_defaults=True):
    """A tensor of a `stage` body; `offset` is its position in shared memory."""

    offset: int = 0


def placed(specs: Iterable[TensorSpec]) -> list[PlacedTensor]:
    """Place tensors one after the other, each at the next multiple of the alignment."""
    tensors, end = [], 0
    for spec in specs:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        tensors.append(PlacedTensor(spec.name, spec.dtype, spec.shape, start))
        end = start + spec.nbytes
    return tensors


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Base of all bodies. `generation` is that of the sending gateway, whose identity is `gateway`:
    a worker that has obeyed a higher number, or the same number of another gateway, rejects
    changes. Without `generation` nothing is rejected.
    """

    generation: int | None = None
    gateway: str | None = None


class EmptyBody(_Body):
    pass


class SequenceNumber(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Number of a pause or resume among those of one caller, counted upwards.

    A delayed message that arrives after a later one of its caller is rejected: it would undo what
    the caller decided since.
    """

    caller: str
    number: int


class PauseWorker(_Body):
    mode: Literal["keep", "wait", "abort"] = "keep"
    clear_cache: bool = False
    sequence_number: SequenceNumber | None = msgspec.field(name="order", default=None)


class Resume(_Body):
    """Resume; with `proved`, only if exactly the weights of that proof are live."""

    proved: str | None = None
    sequence_number: SequenceNumber | None = msgspec.field(name="order", default=None)


class Abort(_Body):
    request_id: str


class FromDisk(_Body):
    """Weights from a directory; `weight_version` defaults to its name."""

    model_path: str
    weight_version: str | None = None


class Stage(_Body):
    """Weights to stage, from one of: a directory, shared memory, or a broadcast group.

    `tensors` describes the contents of the block `shared_name`, or what rank 0 of `group_name` is
    about to broadcast, in this order. They must be all tensors of the model unless `partial` is
    set. `weight_version` defaults to the directory's name and is required without one. Raises
    BadRequest unless exactly one source is set.
    """

    model_path: str | None = None
    shared_name: str | None = None
    group_name: str | None = None
    tensors: list[PlacedTensor] = []
    partial: bool = False
    weight_version: str | None = None

    def __post_init__(self) -> None:
        check_one_source(
            model_path=self.model_path, shared_name=self.shared_name, group_name=self.group_name
        )


class JoinGroup(_Body):
    master_address: str
    master_port: int
    rank: int
    world_size: int
    group_name: str = "weights"
    backend: Literal["gloo", "nccl"] = "gloo"
    timeout_seconds: float = 60.0


class LeaveGroup(_Body):
    group_name: str = "weights"


class FromGroup(_Body):
    """Tensors that rank 0 is about to broadcast, in this order."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    weight_version: str
    group_name: str = "weights"


class LoadLora(_Body):
    """An adapter to load; version spans name its contents by a hash, after `version` if set."""

    lora_name: str
    lora_path: str
    version: str | None = None
    load_inplace: bool = True


class UnloadLora(_Body):
    lora_name: str


class Commit(_Body):
    """Commit; with `weight_version`, only that staged version.

    With `proved` (the `proof` of a probe of the staged weights), commit only exactly the weights
    that probe was scored on: two sets of weights can have the same label.
    """

    weight_version: str | None = None
    proved: str | None = None


class Rollback(_Body):
    """Roll back; with `weights_id` (of liveness_probe), only if the weights are still the same.

    A repeated or delayed rollback therefore cannot undo a second step.
    """

    weights_id: str | None = None


class ProbeRequest(_Body):
    """Score sequences under the live (or staged) weights, and compare if `logprobs` are sent.

    `logprobs[i]` has one entry per token of `token_ids[i]` after the first.
    """

    token_ids: list[list[int]]
    logprobs: list[list[float]] | None = None
    tolerance: float = 0.0
    lora_name: str | None = None
    staged: bool = False


class WeightsDigest(_Body):
    """Request the digest of the live (or staged) weights as loaded; with `tensors`, of each
    tensor.
    """

    staged: bool = False
    tensors: bool = False
