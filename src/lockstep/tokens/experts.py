"""The experts each token was routed to, kept as bytes until the array is needed."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from lockstep.tokens.errors import BadExperts

Buffer = bytes | bytearray | memoryview
DTYPES = ("uint8", "uint16", "int16", "int32")


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Expert ids of shape (rows, layers, top_k); row 0 belongs to the token at position `start`.

    The last token of a sequence was never forwarded and has no row: a completion over `total`
    tokens has `total - 1 - start` rows. Raises BadExperts if shape, dtype and size do not match.
    """

    data: Buffer
    shape: tuple[int, int, int]
    dtype: str
    start: int = 0

    def __post_init__(self) -> None:
        check_size(memoryview(self.data).nbytes, self.shape, self.dtype, self.start)

    @property
    def rows(self) -> int:
        return self.shape[0]

    def numpy(self) -> npt.NDArray[np.integer]:
        """Return the ids as an array of shape (rows, layers, top_k) that shares the bytes."""
        return np.frombuffer(self.data, dtype=self.dtype).reshape(self.shape)

    def from_row(self, start: int) -> RoutedExperts:
        """Return the rows from position `start` on, without a copy. Raises BadExperts if
        missing.
        """
        if not self.start <= start <= self.start + self.rows:
            raise BadExperts(
                f"rows from {start} were requested, but rows {self.start} to "
                f"{self.start + self.rows} are here"
            )
        skip = start - self.start
        row_bytes = self.shape[1] * self.shape[2] * np.dtype(self.dtype).itemsize
        data = memoryview(self.data).cast("B")[skip * row_bytes :]
        return RoutedExperts(data, (self.rows - skip, *self.shape[1:]), self.dtype, start)

    def up_to(self, rows: int) -> RoutedExperts:
        """Return the first `rows` rows, without a copy."""
        row_bytes = self.shape[1] * self.shape[2] * np.dtype(self.dtype).itemsize
        data = memoryview(self.data).cast("B")[: rows * row_bytes]
        return RoutedExperts(data, (rows, *self.shape[1:]), self.dtype, self.start)

    def check_covers(self, total_tokens: int) -> None:
        """Raise BadExperts unless the rows end where a sequence of `total_tokens` must end."""
        expected = max(total_tokens - 1 - self.start, 0)
        if self.rows != expected:
            raise BadExperts(
                f"a sequence of {total_tokens} tokens has {expected} routed-expert rows from "
                f"position {self.start} on, but {self.rows} came"
            )


def check_size(
    size: int, shape: tuple[int, int, int], dtype: str, start: int, *, skip: int = 0
) -> None:
    """Raise BadExperts unless `size` bytes, `skip` of them before the first row, contain it."""
    if dtype not in DTYPES:
        raise BadExperts(f"routed experts have dtype {dtype!r}, expected one of {DTYPES}")
    if len(shape) != 3 or min(shape) < 0:
        raise BadExperts(f"routed experts have shape {shape}, expected (rows, layers, k)")
    if start < 0:
        raise BadExperts(f"routed experts start at row {start}, expected 0 or more")
    expected = skip + prod(shape) * np.dtype(dtype).itemsize
    if size != expected:
        raise BadExperts(
            f"routed experts of shape {shape} and dtype {dtype} take {expected} bytes, but {size} "
            "came"
        )
