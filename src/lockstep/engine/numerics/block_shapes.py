"""Finds the shapes for which a result does not depend on the batch, by trying them on this CPU.

A matrix library picks its kernels, and with them the order of its sums, by the shape of a product:
by the number of rows, and in attention by the numbers of queries and keys. So the numbers that keep
the bits are found by trying them. Engine and trainer both call this, and find the same.
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
"""Keys that the attention kernel takes at once."""
STEP = 64
"""Lengths of a last block that are tried are multiples of this."""
PLACES = 61
"""Every so many positions a single query is tried."""
MULTIPLES = (4, 8, 16, 32, 64)
"""Multiples of rows and of queries that are tried, best first."""
PREFILL = 8
"""Queries of a prefill come at least in multiples of this: single ones would be too many shapes."""
LANES = 32
"""Elementwise loops take at most this many values at once: two AVX-512 registers."""
WIDEST = 4096
"""Columns of a product that are tried: those of a large vocabulary would take seconds."""
TEAMS = (2, 3, 5)
"""Numbers of threads that are tried."""
FLOPS = 1 << 28
"""The work of the largest product that is tried."""


@dataclass(frozen=True, slots=True)
class AttentionShapes:
    """Queries come in multiples of `queries`; a last block of keys has one of the lengths `tails`.

    Without tails no shape does: even whole blocks of keys give other bits.
    """

    queries: int
    tails: tuple[int, ...]

    @property
    def prefill(self) -> int:
        """The multiple in which the queries of a longer run come."""
        return max(self.queries, PREFILL)

    def keys(self, count: int) -> int:
        """The smallest number of keys from `count` on that keeps the bits."""
        whole, rest = divmod(count, BLOCK)
        if not rest:
            return count
        return whole * BLOCK + next((tail for tail in self.tails if tail >= rest), BLOCK)


@lru_cache
def attention_shapes(dim: int) -> AttentionShapes:
    """The shapes of attention that keep the bits for heads of `dim` values, on this machine."""
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
            """Whether the last queries over that many keys, and over a block more, are right."""
            ends = ((slice(end - queries, end), end) for end in (tail, BLOCK + tail))
            return all(torch.equal(attend(rows, end), whole[:, :, rows]) for rows, end in ends)

        def pads_to(queries: int) -> bool:
            """Whether one query is right when it is padded to that many, wherever it stands."""
            for at in range(5, 2 * BLOCK, PLACES):
                keys = BLOCK if at < BLOCK else 2 * BLOCK
                padded = F.pad(q[:, :, at : at + 1], (0, 0, 0, queries - 1))
                one = F.scaled_dot_product_attention(
                    padded, k[:, :, :keys], v[:, :, :keys], attn_mask=bias[at : at + 1, :keys]
                )
                if not torch.equal(one[:, :, 0], whole[:, :, at]):
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
    """The matrix products of a model: (inputs, outputs of each weight that is packed into one).

    `widths` are those of its elementwise loops, over which an exponential is taken; `adapted` are
    the sizes between which an adapter may lie, `vocab` is that of the logits it may update.
    """

    shapes: tuple[tuple[int, tuple[int, ...]], ...]
    widths: tuple[int, ...]
    adapted: tuple[int, ...]
    vocab: int

    def with_lora(self, rank: int) -> Products:
        """These, and the products of an adapter of that rank."""
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
    """The products of a model of these sizes; without dense layers `intermediate` is 0."""
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
    """The row multiple: rows of these products keep their bits in multiples of it; 0 if of none.

    It keeps them whatever the number of rows and its place among them, and when the weights that
    one product packs are multiplied one by one.
    """
    for rows in MULTIPLES:
        # A vector loop must end with a whole register: what is left is done in scalars, whose
        # exponential has other bits.
        if any(rows * width % LANES for width in required.widths):
            continue
        if all(_rows_hold(inputs, outputs, rows) for inputs, outputs in required.shapes):
            return rows
    return 0


@lru_cache
def shared_products_hold(required: Products) -> bool:
    """Whether products keep their bits when MKL shares them out to threads.

    Strict mode does; without it, a thread may get rows that are no such multiple.
    """
    rows = row_multiple(required) or MULTIPLES[-1]
    for inputs, outputs in required.shapes:
        source = torch.Generator().manual_seed(inputs)
        with torch.inference_mode():
            weight = torch.randn(sum(_narrowed(outputs)), inputs, generator=source)
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
    """Within the block, products of this thread have the same bits in any number of threads."""
    steady = shared_products_hold(required)
    if not steady:
        mkl.share_products(False)
    try:
        yield
    finally:
        if not steady:
            mkl.share_products(True)


def why_unfit(dim: int, required: Products) -> str | None:
    """Why no shapes keep the bits of a model with heads of `dim` values here; None if some do."""
    if not attention_shapes(dim).tails:
        return "the attention of a few queries has other bits than that of many"
    if not row_multiple(required):
        return "a row of a matrix product has other bits in another number of rows"
    return None


@lru_cache(maxsize=1024)
def _rows_hold(inputs: int, outputs: tuple[int, ...], rows: int) -> bool:
    parts = _narrowed(outputs)
    source = torch.Generator().manual_seed(inputs)
    with torch.inference_mode(), threads(1):
        weight = torch.randn(sum(parts), inputs, generator=source)
        most = max(128, min(1024, FLOPS // (2 * weight.numel()) // 64 * 64))
        x = torch.randn(most + 64, inputs, generator=source)
        whole = F.linear(x[:most], weight)
        few = {count for count in (1, 2, 3, 5, 7, 8, 13) if rows * count <= most}
        for count, start in product(sorted(few), (0, 1, rows + 3)):
            rest = slice(start, start + rows * count)
            if rest.stop <= most and not torch.equal(F.linear(x[rest], weight), whole[rest]):
                return False
        if not torch.equal(F.linear(x, weight)[:most], whole):
            return False
        for at, part in enumerate(parts):
            begin = sum(parts[:at])
            one = F.linear(x[:most], weight[begin : begin + part])
            if not torch.equal(one, whole[:, begin : begin + part]):
                return False
    return True


def _narrowed(outputs: tuple[int, ...]) -> tuple[int, ...]:
    """Outputs with no more columns than are tried, and the remainder of a vector as it was."""
    return tuple(size if size <= WIDEST else WIDEST + (size - WIDEST) % STEP for size in outputs)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Torch computes with that many threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
