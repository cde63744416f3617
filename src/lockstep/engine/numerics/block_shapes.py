"""Search for the shapes whose results do not depend on the batch, by trial on this CPU.

A matrix library picks its kernels, and with them the order of its sums, by the shape of a product:
by the number of rows, and in attention by the numbers of queries and keys. No documentation lists
the shapes that keep the bits, so they are found by trial. The engine and the trainer both run this
search and find the same shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.numerics import mkl

BLOCK = 512
"""Number of keys that torch's attention kernel processes per block."""
STEP = 64
"""Lengths tested for the last block are multiples of this."""
PLACES = 61
"""Distance between the positions at which a single query is tested."""
MULTIPLES = (4, 8, 16, 32, 64)
"""Row and query multiples to test, best first."""
PREFILL = 8
"""Minimum multiple of queries in a prefill. A multiple of 1 would allow too many shapes to test."""
LANES = 32
"""Largest number of values that an elementwise loop processes at once: two AVX-512 registers."""
WIDEST = 4096
"""Largest number of columns tested. Products as wide as a large vocabulary would take seconds."""
TEAMS = (2, 3, 5)
"""Thread counts to test."""
FLOPS = 1 << 28
"""Floating-point operations of the largest product tested."""


@dataclass(frozen=True, slots=True)
class AttentionShapes:
    """Attention shapes that keep the bits: the query multiple and the lengths of the last block."""

    queries: int
    tails: tuple[int, ...]

    @property
    def prefill(self) -> int:
        """The query multiple of a prefill."""
        return max(self.queries, PREFILL)

    def keys(self, count: int) -> int:
        """Return the smallest number of keys, at least `count`, that keeps the bits."""
        whole, rest = divmod(count, BLOCK)
        if not rest:
            return count
        return whole * BLOCK + next((tail for tail in self.tails if tail >= rest), BLOCK)


@lru_cache
def attention_shapes(dim: int) -> AttentionShapes:
    """Return the attention shapes that keep the bits on this machine, for heads of size `dim`."""
    source = torch.Generator().manual_seed(dim)
    with torch.inference_mode(), threads(1):
        q, k, v = (torch.randn(1, 1, 2 * BLOCK, dim, generator=source) for _ in range(3))
        bias = torch.full((2 * BLOCK, 2 * BLOCK), float("-inf")).triu_(1)

        def attend(rows: slice, keys: int) -> Tensor:
            return F.scaled_dot_product_attention(
                q[:, :, rows], k[:, :, :keys], v[:, :, :keys], attn_mask=bias[rows, :keys]
            )

        whole = attend(slice(0, 2 * BLOCK), 2 * BLOCK)

        def keeps_bits(tail: int, queries: int) -> bool:
            """Return whether the last queries are right over `tail` keys and over a block more."""
            # A tail after a whole block is folded into a running softmax, a first one is not.
            ends = ((slice(end - queries, end), end) for end in (tail, BLOCK + tail))
            return all(torch.equal(attend(rows, end), whole[:, :, rows]) for rows, end in ends)

        def pads_to(queries: int) -> bool:
            """Return whether a single query at any position is right when padded to `queries`."""
            for at in range(5, 2 * BLOCK, PLACES):
                keys = BLOCK if at < BLOCK else 2 * BLOCK
                padded = F.pad(q[:, :, at : at + 1], (0, 0, 0, queries - 1))
                single = F.scaled_dot_product_attention(
                    padded, k[:, :, :keys], v[:, :, :keys], attn_mask=bias[at : at + 1, :keys]
                )
                if not torch.equal(single[:, :, 0], whole[:, :, at]):
                    return False
            return keeps_bits(BLOCK, queries)

        queries = next((count for count in MULTIPLES if pads_to(count)), MULTIPLES[-1])
        prefill = max(queries, PREFILL)
        shapes = {queries, *range(prefill, STEP + 1, prefill)}
        tails = [
            tail
            for tail in range(STEP, BLOCK + STEP, STEP)
            if all(keeps_bits(tail, count) for count in shapes)
        ]
    return AttentionShapes(queries, tuple(tails) if BLOCK in tails else ())


@dataclass(frozen=True, slots=True)
class Products:
    """The matrix products of a model, as (inputs, outputs of each weight packed into the product).

    `widths` are the widths of elementwise loops that compute an exponential, `adapted` the input
    and output sizes of modules that adapters may update, `vocab` the size of the logits.
    """

    shapes: tuple[tuple[int, tuple[int, ...]], ...]
    widths: tuple[int, ...]
    adapted: tuple[int, ...]
    vocab: int

    def with_lora(self, rank: int) -> Products:
        """Return these products plus those of an adapter of that rank."""
        low = [(size, (rank,)) for size in self.adapted]
        high = [(rank, (size,)) for size in (*self.adapted, self.vocab)]
        return replace(self, shapes=(*self.shapes, *low, *high))


def products(
    *,
    hidden: int,
    q_size: int,
    kv_size: int,
    vocab: int,
    intermediate: int,
    experts: int = 0,
    expert_intermediate: int = 0,
) -> Products:
    """Return the products of a model of these sizes. `intermediate` is 0 without dense layers."""
    shapes = [(hidden, (q_size, kv_size, kv_size)), (q_size, (hidden,)), (hidden, (vocab,))]
    if intermediate:
        shapes += [(hidden, (intermediate, intermediate)), (intermediate, (hidden,))]
    if experts:
        shapes += [(hidden, (experts,)), (expert_intermediate, (hidden,))]
        shapes += [(hidden, (2 * expert_intermediate,))]
    widths = [width for width in (intermediate, expert_intermediate) if width]
    adapted = sorted({hidden, q_size, kv_size, *([intermediate] if intermediate else [])})
    return Products(tuple(shapes), tuple(widths), tuple(adapted), vocab)


@lru_cache
def row_multiple(required: Products) -> int:
    """Return the row multiple for which all these products keep their bits, or 0 if there is none.

    A row then has the same bits for any number of rows and any position among them, and also when
    packed weights are multiplied separately.
    """
    for rows in MULTIPLES:
        # A vectorised loop must end with a whole register: the remainder is computed by scalar
        # code, whose exponential has other bits.
        if any(rows * width % LANES for width in required.widths):
            continue
        if all(_rows_hold(inputs, outputs, rows) for inputs, outputs in required.shapes):
            return rows
    return 0


@lru_cache
def shared_products_hold(required: Products) -> bool:
    """Return whether products keep their bits when MKL splits them over threads.

    They do in strict mode. Without it, a thread may get a number of rows that is not the row
    multiple.
    """
    rows = row_multiple(required) or MULTIPLES[-1]
    for inputs, outputs in required.shapes:
        source = torch.Generator().manual_seed(inputs)
        with torch.inference_mode():
            weight = torch.randn(sum(_narrow(outputs)), inputs, generator=source)
            most = max(128, min(512, FLOPS // (2 * weight.numel()) // 64 * 64))
            x = torch.randn(most, inputs, generator=source)
            with threads(1):
                whole = F.linear(x, weight)
            for team, count in product(TEAMS, (most, most - rows, rows * 11)):
                with threads(team):
                    if count <= most and not torch.equal(
                        F.linear(x[:count], weight), whole[:count]
                    ):
                        return False
    return True


@contextmanager
def steady_products(required: Products) -> Iterator[None]:
    """Give this thread's products the same bits in any number of threads within the block."""
    steady = shared_products_hold(required)
    if not steady:
        mkl.share_products(False)
    try:
        yield
    finally:
        if not steady:
            mkl.share_products(True)


def why_unfit(dim: int, required: Products) -> str | None:
    """Return why no shape keeps the bits for this model on this CPU, or None if some do."""
    if not attention_shapes(dim).tails:
        return "the attention of a few queries has other bits than that of many"
    if not row_multiple(required):
        return "a row of a matrix product has other bits in another number of rows"
    return None


@lru_cache(maxsize=1024)
def _rows_hold(inputs: int, outputs: tuple[int, ...], rows: int) -> bool:
    parts = _narrow(outputs)
    source = torch.Generator().manual_seed(inputs)
    with torch.inference_mode(), threads(1):
        weight = torch.randn(sum(parts), inputs, generator=source)
        most = max(128, min(1024, FLOPS // (2 * weight.numel()) // 64 * 64))
        x = torch.randn(most + 64, inputs, generator=source)
        whole = F.linear(x[:most], weight)
        # Few rows select other kernels than many. Odd starts put a row at another place in a tile.
        few = {count for count in (1, 2, 3, 5, 7, 8, 13) if rows * count <= most}
        for count, start in product(sorted(few), (0, 1, rows + 3)):
            rest = slice(start, start + rows * count)
            if rest.stop <= most and not torch.equal(F.linear(x[rest], weight), whole[rest]):
                return False
        # A number of rows that is not a multiple of the largest tile must not change the others.
        if not torch.equal(F.linear(x, weight)[:most], whole):
            return False
        # The engine multiplies q, k and v as one packed weight, a trainer one by one.
        for at, part in enumerate(parts):
            begin = sum(parts[:at])
            separate = F.linear(x[:most], weight[begin : begin + part])
            if not torch.equal(separate, whole[:, begin : begin + part]):
                return False
    return True


def _narrow(outputs: tuple[int, ...]) -> tuple[int, ...]:
    """Return the outputs capped at WIDEST columns, with the same remainder of a vector register."""
    return tuple(size if size <= WIDEST else WIDEST + (size - WIDEST) % STEP for size in outputs)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Set the number of torch threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
