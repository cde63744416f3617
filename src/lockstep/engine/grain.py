"""What a matrix must look like for its attention not to depend on the batch: asked of this CPU.

The attention kernel takes keys in blocks of BLOCK. Over a whole block the order of summation is
always the same; over the last, shorter one a library may choose another, and over few queries too.
So the shapes that give the bits of whole blocks are found by trying them. Engine and trainer both
ask here, and find the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 512
"""Keys that the kernel takes at once."""
STEP = 64
"""Lengths of a last block that are tried are multiples of this."""
QUERIES = (4, 8)
"""Numbers of queries that are tried, best first."""


@dataclass(frozen=True, slots=True)
class Grain:
    """`queries` come in multiples of that; `tails` are the good lengths of a last block of keys.

    Without tails there is no grain here: even whole blocks do not give the same bits.
    """

    queries: int
    tails: tuple[int, ...]

    def keys(self, count: int) -> int:
        """The smallest good number of keys that is not less than `count`."""
        whole, rest = divmod(count, BLOCK)
        if not rest:
            return count
        return whole * BLOCK + next((tail for tail in self.tails if tail >= rest), BLOCK)


@lru_cache
def grain(dim: int) -> Grain:
    """The grain for heads of `dim` values, on this machine."""
    source = torch.Generator().manual_seed(dim)
    with torch.inference_mode():
        q, k, v = (torch.randn(1, 1, 2 * BLOCK, dim, generator=source) for _ in range(3))
        bias = torch.full((2 * BLOCK, 2 * BLOCK), float("-inf")).triu_(1)

        def attend(rows: slice, keys: int) -> Tensor:
            return F.scaled_dot_product_attention(
                q[:, :, rows], k[:, :, :keys], v[:, :, :keys], attn_mask=bias[rows, :keys]
            )

        whole = attend(slice(0, 2 * BLOCK), 2 * BLOCK)

        def good(tail: int, queries: int) -> bool:
            """Whether the last queries over that many keys, and over a block more, are right."""
            ends = ((slice(end - queries, end), end) for end in (tail, BLOCK + tail))
            return all(torch.equal(attend(rows, end), whole[:, :, rows]) for rows, end in ends)

        queries = next((count for count in QUERIES if good(BLOCK, count)), QUERIES[-1])
        shapes = (queries, QUERIES[-1], STEP // 2, STEP)
        tails = [
            tail
            for tail in range(STEP, BLOCK + STEP, STEP)
            if all(good(tail, count) for count in shapes)
        ]
    return Grain(queries, tuple(tails) if BLOCK in tails else ())
