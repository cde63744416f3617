"""Digests of tensors, computed in threads while a checkpoint is loaded."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from lockstep.checkpoint.digest import tensor_digest

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.bool: "BOOL",
}  # fmt: skip
"""Names of dtypes in safetensors."""
THREADS, PENDING = 4, 8
"""Threads (hashing releases the GIL) and the limit of tensors queued, which stay in memory."""


def digest_of(tensor: Tensor) -> str:
    """Return the digest of a tensor's dtype, shape and bytes, as in a checkpoint file."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    name = NAMES.get(tensor.dtype, str(tensor.dtype))
    return tensor_digest(name, tensor.shape, [flat.numpy().data])


class Digester:
    """Thread pool that computes digests by name; a context manager.

    A tensor must not change between `add` and the end of the block.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="digest")
        self._pending: deque[tuple[str, Future[str]]] = deque()
        self._digests: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)

    def add(self, name: str, tensor: Tensor) -> None:
        while len(self._pending) >= PENDING:
            self._collect()
        self._pending.append((name, self._pool.submit(digest_of, tensor)))

    def digests(self) -> dict[str, str]:
        """Wait for all digests and return them by name."""
        while self._pending:
            self._collect()
        return self._digests

    def _collect(self) -> None:
        name, future = self._pending.popleft()
        self._digests[name] = future.result()
