"""LoRA adapters in captured graphs: every row of a batch adds the update of its own adapter.

A graph reads from tables on the device which rows use which adapter, and the addresses of its
matrices. Adapters can therefore change without another capture. Products and roundings are those of
`AdapterRows.add_to` on the exact kernels, bit for bit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2 as pow2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.engine.config import ModelConfig
from lockstep.engine.cuda.kernels import exact_kernels
from lockstep.engine.cuda.kernels.exact_kernels import _part, launch
from lockstep.engine.model.lora import HEAD_LAYER, Adapter

Run = tuple[Adapter | None, int]
"""Consecutive rows with one adapter or none: (adapter, number of rows)."""
BLOCK = 16
"""Rows of one adapter per program: the number of rows of a matrix instruction."""
NARROW, COLUMNS, TERMS, RANKS = 16, 128, 1024, 64
"""Tiles of both products: columns and terms of the first, columns and terms of the second."""
TERMS_FP32 = 32


class _Module(NamedTuple):
    """One packed module: its first update in the table, the first column of each, the longest."""

    first: int
    starts: tuple[int, ...]
    longest: int


class AdapterBank:
    """The adapters that rows of a batch may use, at fixed places of a table on the device.

    `places` must be at least the number of adapters in a batch. An adapter stays until its place is
    needed.
    """

    def __init__(self, config: ModelConfig, places: int, max_rank: int, like: Tensor) -> None:
        self._modules: dict[tuple[int, str], _Module] = {}
        spans: list[tuple[int, int]] = []
        for key, sizes in _sizes(config):
            starts = tuple(sum(sizes[:at]) for at in range(len(sizes)))
            self._modules[key] = _Module(len(spans), starts, max(sizes))
            spans += zip(starts, sizes, strict=True)
        device = like.device
        self._config, self._like = config, like
        self._spans = torch.tensor(spans, dtype=torch.int32, device=device)
        self._addresses = torch.zeros((places, len(spans), 2), dtype=torch.int64, device=device)
        self._ranks = torch.zeros(places, dtype=torch.int32, device=device)
        self._scales = torch.zeros(places, dtype=torch.float32, device=device)
        self.max_rank, self._most = max_rank, max(pow2(max_rank), NARROW)
        self._loaded: OrderedDict[int, tuple[int, Adapter]] = OrderedDict()
        self.changes = 0
        """Number of times a place changed its adapter. Blocks made before a change are stale."""

    def another(self) -> AdapterBank:
        """Return an empty bank of the same size, for a computation that runs in parallel."""
        return AdapterBank(self._config, len(self._ranks), self.max_rank, self._like)

    def blocks(self, runs: Iterable[Run], most: int) -> npt.NDArray[np.int32]:
        """Return first row, number of rows and adapter place of every block, (most, 3).

        Unused blocks at the end are zero. Adapters without a place get one.
        """
        merged = _merge_runs(runs)
        wanted = {adapter.uid: adapter for adapter, _ in merged if adapter is not None}
        for uid, new in wanted.items():
            if uid not in self._loaded:
                self._put(new, keep=wanted.keys())
            self._loaded.move_to_end(uid)
        table = np.zeros((most, 3), dtype=np.int32)
        row = at = 0
        for adapter, count in merged:
            if adapter is not None:
                place = self._loaded[adapter.uid][0]
                for start in range(0, count, BLOCK):
                    table[at] = row + start, min(BLOCK, count - start), place
                    at += 1
            row += count
        return table

    def clear(self) -> None:
        """Remove all adapters."""
        self._loaded.clear()
        self.changes += 1

    def _put(self, adapter: Adapter, keep: Container[int]) -> None:
        place = len(self._loaded)
        if place == len(self._ranks):
            oldest = next((uid for uid in self._loaded if uid not in keep), None)
            if oldest is None:
                raise RuntimeError(f"a batch has more than {place} adapters")
            place, _ = self._loaded.pop(oldest)
            self.changes += 1
        addresses = torch.zeros(self._addresses.shape[1:], dtype=torch.int64)
        for key, deltas in adapter.deltas.items():
            module = self._modules[key]
            for delta in deltas:
                at = module.first + module.starts.index(delta.start)
                addresses[at] = torch.tensor([delta.a.data_ptr(), delta.b.data_ptr()])
        self._addresses[place] = addresses.to(self._addresses.device)
        self._ranks[place] = adapter.rank
        self._scales[place] = adapter.scaling
        self._loaded[adapter.uid] = place, adapter

    def add_to(self, out: Tensor, x: Tensor, blocks: Tensor, layer: int, module: str) -> None:
        """Add the update of each row's adapter in place, if it has one for this module.

        `blocks` is the result of `AdapterBank.blocks`, on the device.
        """
        where = self._modules.get((layer, module))
        if where is None:
            return
        (rows, inner), count = x.shape, len(where.starts)
        small = x.new_empty((rows, count, self._most))
        part = min(exact_kernels.PART, max(pow2(inner), 16))
        sizes = {"targets": len(self._spans), "deltas": count, "most": self._most, "lanes": BLOCK}
        options, terms, ranks = launch(x), TERMS, RANKS
        if x.dtype == torch.float32:
            terms = ranks = TERMS_FP32
        _shrink[(len(blocks), count, self._most // NARROW)](
            x, blocks, self._addresses, self._ranks, small, where.first, **sizes, inner=inner,
            part=part, block_n=NARROW,
            # A part of a single loop step would be fused into the running sum: see `_run` of
            # `exact_kernels`.
            block_k=min(terms, part if inner <= part else part // 4), num_warps=2, **options,
        )  # fmt: skip
        _expand[(triton.cdiv(where.longest, COLUMNS), count, len(blocks))](
            small, blocks, self._addresses, self._ranks, self._scales, self._spans, out,
            where.first, out.shape[1], **sizes, block_n=COLUMNS, block_k=min(ranks, self._most),
            num_warps=4, **options,
        )  # fmt: skip


def block_count(runs: Iterable[Run]) -> int:
    """Return the number of blocks that `AdapterBank.blocks` makes of these runs."""
    return sum(-(-count // BLOCK) for adapter, count in _merge_runs(runs) if adapter is not None)


def _merge_runs(runs: Iterable[Run]) -> list[Run]:
    """Return the runs with neighbours of the same adapter merged."""
    groups = groupby(runs, lambda run: None if run[0] is None else run[0].uid)
    pairs = (list(group) for _, group in groups)
    return [(group[0][0], sum(count for _, count in group)) for group in pairs]


def _sizes(config: ModelConfig) -> list[tuple[tuple[int, str], list[int]]]:
    """Return the packed modules that an adapter may update, with the columns of each part."""
    sizes: list[tuple[tuple[int, str], list[int]]] = [((HEAD_LAYER, "head"), [config.vocab_size])]
    for layer in range(config.layers):
        sizes.append(((layer, "qkv"), [config.q_size, config.kv_size, config.kv_size]))
        sizes.append(((layer, "out"), [config.hidden]))
        if layer not in config.moe_layers:
            sizes.append(((layer, "gate_up"), [config.intermediate] * 2))
            sizes.append(((layer, "down"), [config.hidden]))
    return sizes


@triton.jit(do_not_specialize=["first"])
def _shrink(
    x, blocks, addresses, ranks, small, first,
    targets: tl.constexpr, deltas: tl.constexpr, most: tl.constexpr, lanes: tl.constexpr,
    inner: tl.constexpr, part: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    """Multiply the rows of one block with some columns of the first matrix of their adapter."""
    if early:
        gdc_launch_dependents()
    block, delta, column = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, count = tl.load(blocks + block * 3), tl.load(blocks + block * 3 + 1)
    place = tl.load(blocks + block * 3 + 2).to(tl.int64)
    rank = tl.load(ranks + place)
    address = tl.load(addresses + (place * targets + first + delta) * 2)
    active = (count > 0) & (address != 0) & (column * block_n < rank)
    n, k, lane = (
        column * block_n + tl.arange(0, block_n),
        tl.arange(0, block_k),
        tl.arange(0, lanes),
    )
    some, real = (lane < count)[:, None], (n < tl.where(active, rank, 0))[None, :]
    columns = tl.multiple_of(address, 16).to(x.dtype) + n[None, :] * inner + k[:, None]
    # No kernel of a step writes adapters, so the first terms are loaded before waiting for x.
    matrix = tl.load(columns, mask=real & (k < inner)[:, None], other=0.0)
    if early:
        gdc_wait()
    if active:
        row = (begin + lane).to(tl.int64)
        lines = x + row[:, None] * inner + k[None, :]
        values = tl.load(lines, mask=some & (k < inner)[None, :], other=0.0)
        total = tl.zeros((lanes, block_n), tl.float32)
        total = tl.dot(values, matrix, total, input_precision="ieee")
        total = _part(lines, columns, some, real, block_k, part, total, inner, block_k)
        if inner > part:
            for start in range(part, inner, part):
                summed = tl.zeros((lanes, block_n), tl.float32)
                end = start + part
                total += _part(lines, columns, some, real, start, end, summed, inner, block_k)
        out = small + (row * deltas + delta)[:, None] * most + n[None, :]
        tl.store(out, total.to(small.dtype.element_ty), mask=some & real)


@triton.jit(do_not_specialize=["first"])
def _expand(
    small, blocks, addresses, ranks, scales, spans, out, first, width,
    targets: tl.constexpr, deltas: tl.constexpr, most: tl.constexpr, lanes: tl.constexpr,
    block_n: tl.constexpr, block_k: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Add the product with the second matrix of the adapter to some columns of one block's rows."""
    if early:
        gdc_launch_dependents()
    column, delta, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, count = tl.load(blocks + block * 3), tl.load(blocks + block * 3 + 1)
    place = tl.load(blocks + block * 3 + 2).to(tl.int64)
    target = first + delta
    start, size = tl.load(spans + target * 2), tl.load(spans + target * 2 + 1)
    rank, scale = tl.load(ranks + place), tl.load(scales + place)
    address = tl.load(addresses + (place * targets + target) * 2 + 1)
    active = (count > 0) & (address != 0) & (column * block_n < size)
    n, k, lane = (
        column * block_n + tl.arange(0, block_n),
        tl.arange(0, block_k),
        tl.arange(0, lanes),
    )
    some, real = (lane < count)[:, None], (n < tl.where(active, size, 0))[None, :]
    columns = tl.multiple_of(address, 16).to(out.dtype) + n[None, :] * rank + k[:, None]
    matrix = tl.load(columns, mask=real & (k < rank)[:, None], other=0.0)
    if early:
        gdc_wait()
    if active:
        kind = out.dtype.element_ty
        row = (begin + lane).to(tl.int64)
        line = small + (row * deltas + delta)[:, None] * most + k[None, :]
        values = tl.load(line, mask=some & (k < rank)[None, :], other=0.0)
        total = tl.zeros((lanes, block_n), tl.float32)
        total = tl.dot(values, matrix, total, input_precision="ieee")
        for term in tl.static_range(block_k, most, block_k):
            inside = term + k < rank
            values = tl.load(line + term, mask=some & inside[None, :], other=0.0)
            matrix = tl.load(columns + term, mask=real & inside[:, None], other=0.0)
            total = tl.dot(values, matrix, total, input_precision="ieee")
        added = (total.to(kind).to(tl.float32) * scale).to(kind)
        cell = out + row[:, None] * width + start + n[None, :]
        old = tl.load(cell, mask=some & real, other=0.0).to(tl.float32)
        tl.store(cell, (old + added.to(tl.float32)).to(kind), mask=some & real)
