"""Which experts each token was routed to, kept as bytes until somebody asks for the array."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lockstep.tokens.errors import BadExperts

Buffer = bytes | bytearray | memoryview
DTYPES = ("uint8", "uint16", "int16", "int32")


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Expert ids of shape (rows, layers, top_k); row 0 belongs to the token at position `start`.

    The last token of a sequence was never forwarded and has no row: a completion over
    `total` tokens has `total - 1 - start` rows. Raises BadExperts when shape, dtype and
    size do not fit together.
    """

    data: Buffer
    shape: tuple[int, int, int]
    dtype: str
    start: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise BadExperts(f"routed experts have dtype {self.dtype!r}, expected one of {DTYPES}")
        if len(self.shape) != 3 or any(dim < 0 for dim in self.shape):
            raise BadExperts(f"routed experts have shape {self.shape}, expected (rows, layers, k)")
        if self.start < 0:
            raise BadExperts(f"routed experts start at row {self.start}, expected 0 or more")
        expected = int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize
        size = memoryview(self.data).nbytes
        if size != expected:
            raise BadExperts(
                f"routed experts of shape {self.shape} and dtype {self.dtype} take "
                f"{expected} bytes, but {size} came"
            )

    @property
    def rows(self) -> int:
        return self.shape[0]

    def numpy(self) -> npt.NDArray[np.integer]:
        """The ids as an array of shape (rows, layers, top_k), sharing the bytes."""
        return np.frombuffer(self.data, dtype=self.dtype).reshape(self.shape)

    def from_row(self, start: int) -> RoutedExperts:
        """The rows from position `start` on, not copied. Raises BadExperts if not here."""
        if not self.start <= start <= self.start + self.rows:
            raise BadExperts(
                f"rows from {start} were asked for, but rows {self.start} to "
                f"{self.start + self.rows} are here"
            )
        skip = start - self.start
        row_bytes = self.shape[1] * self.shape[2] * np.dtype(self.dtype).itemsize
        data = memoryview(self.data).cast("B")[skip * row_bytes :]
        return RoutedExperts(data, (self.rows - skip, *self.shape[1:]), self.dtype, start)

    def check_covers(self, total_tokens: int) -> None:
        """Raises BadExperts unless the rows end where a sequence of `total_tokens` must end."""
        expected = max(total_tokens - 1 - self.start, 0)
        if self.rows != expected:
            raise BadExperts(
                f"a sequence of {total_tokens} tokens has {expected} routed-expert rows from "
                f"position {self.start} on, but {self.rows} came"
            )
