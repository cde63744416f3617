"""Copies the tensors of a checkpoint to where they will serve, and checks that they are finite."""

from __future__ import annotations

from itertools import cycle
from typing import Protocol

import torch
from torch import Tensor

from lockstep.tokens.errors import CheckpointError

PIECE = 32 << 20
"""Bytes that are on their way to a device at a time."""
PIECES = 4


class TensorCopier(Protocol):
    """Fills the tensors of a set of weights one by one."""

    def fill(self, name: str, target: Tensor, source: Tensor) -> Tensor:
        """Copies `source` to `target`; returns what its digest is to be made of.

        Raises CheckpointError for values that are not finite in the type of `target`, now or in
        `finish`.
        """
        ...

    def finish(self) -> None:
        """Returns when all targets hold what they were filled with."""
        ...


def copier(device: str) -> TensorCopier:
    """What copies tensors from files to this device."""
    return DeviceCopier(torch.device(device)) if device.startswith("cuda") else HostCopier()


class HostCopier:
    """Copies within host memory. The copy is what will serve, so it is the better evidence."""

    def fill(self, name: str, target: Tensor, source: Tensor) -> Tensor:
        target.copy_(source)
        check_finite(name, target)
        return target if target.dtype == source.dtype else source

    def finish(self) -> None:
        return


class DeviceCopier:
    """Copies through pinned buffers on a stream of its own, beside which steps go on.

    The source, memory-mapped, is read once into a buffer while the buffers before it travel;
    nothing waits for the device until the end.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        # Memory that was just freed may still be read by steps that were launched before.
        self._stream.wait_stream(torch.cuda.default_stream(device))
        self._buffers = cycle(
            (torch.empty(PIECE, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
            for _ in range(PIECES)
        )
        self._finite: dict[str, tuple[Tensor, Tensor]] = {}

    def fill(self, name: str, target: Tensor, source: Tensor) -> Tensor:
        there, here = target.view(-1), source.reshape(-1)
        size = PIECE // target.element_size()
        with torch.cuda.stream(self._stream):
            for start in range(0, there.numel(), size):
                buffer, copied = next(self._buffers)
                copied.synchronize()
                piece = here[start : start + size]
                pinned = buffer.view(target.dtype)[: piece.numel()]
                pinned.copy_(piece)
                there[start : start + size].copy_(pinned, non_blocking=True)
                copied.record(self._stream)
            self._finite[name] = target, torch.isfinite(target).all()
        return source

    def finish(self) -> None:
        self._stream.synchronize()
        if not self._finite:
            return
        with torch.cuda.stream(self._stream):
            sound = torch.stack([flag for _, flag in self._finite.values()]).tolist()
        for (name, (target, _)), finite in zip(self._finite.items(), sound, strict=True):
            if not finite:
                check_finite(name, target)


def check_finite(name: str, tensor: Tensor) -> None:
    """Raises CheckpointError for a tensor with values that are NaN or infinite."""
    # Asked of the copy: a value may be too large for the narrower type it is served in.
    if not bool(torch.isfinite(tensor).all()):
        bad = int((~torch.isfinite(tensor)).sum())
        raise CheckpointError(
            f"tensor {name!r} has {bad} values that are NaN or infinite as {tensor.dtype}"
        )
