"""Copying of checkpoint tensors to their device, with digests and a check that they are finite."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import cycle
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.checkpoint.digest import tensor_digest
from lockstep.engine.weights.digest import NAMES, Digester
from lockstep.tokens.errors import CheckpointError

PIECE = 8 << 20
"""Bytes per copy to a device: small enough to be hashed while they are in the CPU's cache."""
PIECES = 2
"""Buffers per thread: one is sent while the other is filled."""
THREADS = 4
"""Tensors copied in parallel. Copying and hashing release the GIL."""
CHECKED = 64 << 20
"""Values checked at a time. The check needs a few bytes of device memory per value."""


class TensorCopier(Protocol):
    """Copier that fills the tensors of a set of weights one by one; a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def fill(self, name: str, target: Tensor, source: Tensor) -> None:
        """Copy `source` to `target`, at once or at the latest in `finish`.

        Raises CheckpointError, here or in `finish`, for values that are not finite in the dtype of
        `target`.
        """
        ...

    def read(self, name: str, source: Tensor) -> None:
        """Compute the digest of a tensor without copying it."""
        ...

    def finish(self) -> dict[str, str]:
        """Wait until all targets are filled and return the digests of all sources by name."""
        ...


def copier(device: str, whole: Tensor | None) -> TensorCopier:
    """Return the copier for this device. `whole` is the memory that holds all targets."""
    if whole is not None and device.startswith("cuda"):
        return DeviceCopier(whole)
    return HostCopier()


class HostCopier(Digester):
    """Copier within host memory. It hashes the copy, because that is what will be served."""

    def fill(self, name: str, target: Tensor, source: Tensor) -> None:
        target.copy_(source)
        check_finite(name, target)
        self.add(name, target if target.dtype == source.dtype else source)

    def read(self, name: str, source: Tensor) -> None:
        self.add(name, source)

    def finish(self) -> dict[str, str]:
        return self.digests()


class DeviceCopier:
    """Copier through pinned buffers on its own CUDA stream, while steps keep running.

    Each memory-mapped tensor is read once, in pieces. A thread copies a piece to a buffer, starts
    its transfer and hashes it. Nothing waits for the device until `finish`.
    """

    def __init__(self, whole: Tensor) -> None:
        self._whole = whole
        self._stream: torch.cuda.Stream | None = None
        if whole.is_cuda:
            self._stream = torch.cuda.Stream(whole.device)
            # Freed memory is reused here, and steps launched earlier may still be reading it.
            self._stream.wait_stream(torch.cuda.default_stream(whole.device))
        self._own = threading.local()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="stage")
        self._pending: dict[str, Future[str]] = {}
        self._targets: dict[str, Tensor] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)
        if self._stream is not None:
            self._stream.synchronize()

    def fill(self, name: str, target: Tensor, source: Tensor) -> None:
        self._targets[name] = target
        self._pending[name] = self._pool.submit(self._copy, target, source)

    def read(self, name: str, source: Tensor) -> None:
        self._pending[name] = self._pool.submit(self._copy, None, source)

    def finish(self) -> dict[str, str]:
        digests = {name: future.result() for name, future in self._pending.items()}
        with self._on_stream():
            # One check of the whole memory. Only if it fails are the tensors checked by name.
            parts = self._whole.split(CHECKED)
            sound = torch.stack([torch.isfinite(part).all() for part in parts]).all()
            if not bool(sound):  # waits for all transfers
                for name, target in self._targets.items():
                    check_finite(name, target)
        return digests

    def _copy(self, target: Tensor | None, source: Tensor) -> str:
        """Copy a tensor in one of the threads; return the digest of the source."""
        here = source.reshape(-1)
        there = None if target is None else target.view(-1)
        size = PIECE // max(source.element_size(), 0 if target is None else target.element_size())

        def parts() -> Iterator[memoryview]:
            for start in range(0, here.numel(), size):
                piece = here[start : start + size]
                if there is None:
                    yield _array(piece).data
                else:
                    yield self._send(piece, there[start : start + size])

        return tensor_digest(NAMES.get(source.dtype, str(source.dtype)), source.shape, parts())

    def _send(self, piece: Tensor, target: Tensor) -> memoryview:
        """Start the transfer of a piece; return its bytes, valid until the buffer is reused."""
        # The buffer may still be read by its last transfer.
        buffer, copied = next(self._buffers())
        if copied is not None:
            copied.synchronize()
        pinned = buffer.view(target.dtype)[: piece.numel()]
        if piece.dtype == target.dtype:
            # Use numpy: torch would start its thread pool for a copy this small.
            _array(pinned)[:] = _array(piece)
        else:
            pinned.copy_(piece)
        with self._on_stream():
            target.copy_(pinned, non_blocking=True)
        if copied is not None:
            copied.record(self._stream)
        return _array(pinned if piece.dtype == target.dtype else piece).data

    def _buffers(self) -> Iterator[tuple[Tensor, torch.cuda.Event | None]]:
        """Return an endless iterator over the buffers of the calling thread."""
        if not hasattr(self._own, "buffers"):
            cuda = self._stream is not None
            self._own.buffers = cycle(
                [
                    (
                        torch.empty(PIECE, dtype=torch.uint8, pin_memory=cuda),
                        torch.cuda.Event() if cuda else None,
                    )
                    for _ in range(PIECES)
                ]
            )
        buffers: Iterator[tuple[Tensor, torch.cuda.Event | None]] = self._own.buffers
        return buffers

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield


def _array(tensor: Tensor) -> npt.NDArray[np.uint8]:
    array: npt.NDArray[np.uint8] = tensor.view(torch.uint8).numpy()
    return array


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise CheckpointError for a tensor with values that are NaN or infinite."""
    # Check the copy: a finite value may overflow the narrower dtype it is served in.
    if not bool(torch.isfinite(tensor).all()):
        bad = int((~torch.isfinite(tensor)).sum())
        raise CheckpointError(
            f"tensor {name!r} has {bad} values that are NaN or infinite as {tensor.dtype}"
        )
