"""Weights over torch.distributed: a trainer broadcasts tensors to all workers of a group.

The group has its own store and no global state, so a process may join several groups and leave
them. The trainer is rank 0 and hosts the store (`Broadcast.join(..., rank=0)`, then `send`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lockstep.protocol.control.worker import TensorSpec
from lockstep.tokens.errors import BadRequest, DeadlineExceeded

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Broadcast:
    """Membership in one broadcast group. Its methods block: call them in a thread."""

    def __init__(self, group: Any, store: Any, rank: int, world_size: int) -> None:
        self._group = group
        self._store = store
        self.rank = rank
        self.world_size = world_size

    @classmethod
    def join(
        cls,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        *,
        backend: str = "gloo",
        seconds: float = 60.0,
    ) -> Broadcast:
        """Join a group and return once all members have joined.

        Raises DeadlineExceeded when a member is missing after `seconds`.
        """
        import torch.distributed as dist

        if not 0 <= rank < world_size or world_size < 2:
            raise BadRequest(
                f"rank {rank} of {world_size} makes no sense: rank 0 is the trainer", param="rank"
            )
        if backend not in ("gloo", "nccl"):
            raise BadRequest(f"backend is {backend!r}: expected gloo or nccl", param="backend")
        limit = timedelta(seconds=seconds)
        try:
            # Torch exports these two at run time, but not in its type stubs.
            store = dist.TCPStore(  # type: ignore[attr-defined]
                host, port, world_size, is_master=rank == 0, timeout=limit
            )
            scoped = dist.PrefixStore("lockstep", store)  # type: ignore[attr-defined]
            kind: Any = dist.ProcessGroupGloo if backend == "gloo" else dist.ProcessGroupNCCL
            group = kind(scoped, rank, world_size, limit)
        except (RuntimeError, ValueError) as error:
            raise DeadlineExceeded(
                f"could not join the weight group at {host}:{port} as rank {rank} of {world_size} "
                f"within {seconds:g} s: {error}"
            ) from None
        return cls(group, store, rank, world_size)

    def send(self, tensors: Iterable[Tensor]) -> None:
        """Broadcast tensors from rank 0, in order."""
        for tensor in tensors:
            self._exchange(tensor.detach().contiguous())

    def receive(self, specs: Sequence[TensorSpec], device: str) -> list[tuple[str, Tensor]]:
        """Return the named tensors, in the order in which rank 0 sends them.

        Raises BadRequest for a dtype or shape that cannot be sent.
        """
        tensors = [(spec.name, _empty(spec, device)) for spec in specs]
        for _, tensor in tensors:
            self._exchange(tensor)
        return tensors

    def _exchange(self, tensor: Tensor) -> None:
        try:
            self._group.broadcast(tensor, 0).wait()
        except RuntimeError as error:
            raise DeadlineExceeded(f"a weight broadcast failed: {error}") from None


def _empty(spec: TensorSpec, device: str) -> Tensor:
    spec.check()
    return torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device=device)
