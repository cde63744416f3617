"""The worker's control dialect, POST /engine/<method>: Dynamo's names, and the weight transaction.

Each method has one typed body; unknown fields are refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Literal

import msgspec

from lockstep.checkpoint.sources import check_one_source
from lockstep.tokens.errors import BadRequest

ALIGNMENT = 64
"""Bytes: every tensor in shared memory starts at a multiple of this."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_ELEMENTS = 1 << 36


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor that is sent apart from its description."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def check(self) -> None:
        """Raises BadRequest for a dtype or shape that cannot be sent."""
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
        """Its size. Raises BadRequest as `check` does."""
        self.check()
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


class PlacedTensor(TensorSpec, frozen=True, omit_defaults=True):
    """A tensor of a `stage` body; `offset` says where it lies in shared memory."""

    offset: int = 0


def placed(specs: Iterable[TensorSpec]) -> list[PlacedTensor]:
    """Tensors one after the other, each at the next multiple of the alignment."""
    tensors, end = [], 0
    for spec in specs:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        tensors.append(PlacedTensor(spec.name, spec.dtype, spec.shape, start))
        end = start + spec.nbytes
    return tensors


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """`generation` is that of the gateway which sends it: a worker that has obeyed a higher one
    refuses what changes it. Without it nothing is refused."""

    generation: int | None = None


class EmptyBody(_Body):
    pass


class SequenceNumber(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The number of a pause or resume among those of one caller, counted upwards.

    A message that was delayed, and arrives after a later one of its caller, is refused by it: it
    would undo what the caller decided since.
    """

    caller: str
    number: int


class PauseWorker(_Body):
    mode: Literal["keep", "wait", "abort"] = "keep"
    clear_cache: bool = False
    sequence_number: SequenceNumber | None = msgspec.field(name="order", default=None)


class Resume(_Body):
    """With `proved`, refuses to go on unless the very weights of that `proof` are served."""

    proved: str | None = None
    sequence_number: SequenceNumber | None = msgspec.field(name="order", default=None)


class Abort(_Body):
    request_id: str


class FromDisk(_Body):
    """`weight_version` defaults to the directory's name."""

    model_path: str
    weight_version: str | None = None


class Stage(_Body):
    """Weights to hold ready, from one of: a directory, shared memory, or a broadcast group.

    `tensors` describes what the block `shared_name` holds or what rank 0 of `group_name` is about
    to broadcast, in this order. They must be all tensors of the model unless `partial` is set.
    `weight_version` defaults to the directory's name, and is needed without one. Raises BadRequest
    unless exactly one source is named.
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
    """Version spans name the contents by a hash of them, after `version` where there is one."""

    lora_name: str
    lora_path: str
    version: str | None = None
    load_inplace: bool = True


class UnloadLora(_Body):
    lora_name: str


class Commit(_Body):
    """With `weight_version`, refuses to commit anything else than that staged version.

    With `proved` (the `proof` of a probe of what is staged), refuses to commit anything else than
    the very weights that probe was scored on: two sets of weights can have one label.
    """

    weight_version: str | None = None
    proved: str | None = None


class Rollback(_Body):
    """With `weights_id` (of liveness_probe), refuses unless the weights are still the same.

    So a repetition, or a late copy, of a rollback cannot undo a second step.
    """

    weights_id: str | None = None


class ProbeRequest(_Body):
    """Scores sequences under the live (or staged) weights, and compares when `logprobs` come along.

    `logprobs[i]` has one entry per token of `token_ids[i]` after the first.
    """

    token_ids: list[list[int]]
    logprobs: list[list[float]] | None = None
    tolerance: float = 0.0
    lora_name: str | None = None
    staged: bool = False


class WeightsDigest(_Body):
    """Asks what was read when the live (or staged) weights were loaded; with `tensors` of each."""

    staged: bool = False
    tensors: bool = False
