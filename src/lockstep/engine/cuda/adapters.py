"""LoRA adapters in captured graphs: every row of a batch adds the update of its own adapter.

A graph reads where the matrices of each adapter lie from a table on the device, so that adapters
come and go without another capture. Products and roundings are those of `AdapterRows.add_to` on
the exact kernels, to the bit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2 as pow2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lockstep.engine.config import ModelConfig
from lockstep.engine.cuda import exact_kernels
from lockstep.engine.cuda.exact_kernels import _part, launch
from lockstep.engine.model.lora import HEAD_LAYER, Adapter

NONE = -1
"""The place of a row that has no adapter."""
LANES, NARROW, COLUMNS, TERMS = 16, 16, 128, 256
"""Rows that matrix instructions want, of which one is there; and the tiles of both products."""
TERMS_FP32 = 32


class _Module(NamedTuple):
    """One packed module: its first update in the table, the first column of each, the longest."""

    first: int
    starts: tuple[int, ...]
    longest: int


class AdapterBank:
    """The adapters that rows of a batch may have, by their places in a table on the device.

    `places` are at least as many as a batch has rows. An adapter stays until its place is needed.
    """

    def __init__(self, config: ModelConfig, places: int, max_rank: int, like: Tensor) -> None:
        self._modules: dict[tuple[int, str], _Module] = {}
        spans: list[tuple[int, int]] = []
        for key, sizes in _sizes(config):
            starts = tuple(sum(sizes[:at]) for at in range(len(sizes)))
            self._modules[key] = _Module(len(spans), starts, max(sizes))
            spans += zip(starts, sizes, strict=True)
        device = like.device
        self._spans = torch.tensor(spans, dtype=torch.int32, device=device)
        self._addresses = torch.zeros((places, len(spans), 2), dtype=torch.int64, device=device)
        self._ranks = torch.zeros(places, dtype=torch.int32, device=device)
        self._scales = torch.zeros(places, dtype=torch.float32, device=device)
        self.max_rank, self._most = max_rank, max(pow2(max_rank), NARROW)
        self._held: OrderedDict[int, tuple[int, Adapter]] = OrderedDict()

    def places(self, adapters: Seq[Adapter | None]) -> list[int]:
        """The place of the adapter of each row, which is put there if it was not; or `NONE`."""
        wanted = {each.uid: each for each in adapters if each is not None}
        for uid, adapter in wanted.items():
            if uid not in self._held:
                self._put(adapter, keep=wanted.keys())
            self._held.move_to_end(uid)
        return [NONE if each is None else self._held[each.uid][0] for each in adapters]

    def clear(self) -> None:
        """Lets go of all adapters."""
        self._held.clear()

    def _put(self, adapter: Adapter, keep: Container[int]) -> None:
        place = len(self._held)
        if place == len(self._ranks):
            oldest = next(uid for uid in self._held if uid not in keep)
            place, _ = self._held.pop(oldest)
        addresses = torch.zeros(self._addresses.shape[1:], dtype=torch.int64)
        for key, deltas in adapter.deltas.items():
            module = self._modules[key]
            for delta in deltas:
                at = module.first + module.starts.index(delta.start)
                addresses[at] = torch.tensor([delta.a.data_ptr(), delta.b.data_ptr()])
        self._addresses[place] = addresses.to(self._addresses.device)
        self._ranks[place] = adapter.rank
        self._scales[place] = adapter.scaling
        self._held[adapter.uid] = place, adapter

    def add_to(self, out: Tensor, x: Tensor, places: Tensor, layer: int, module: str) -> None:
        """Adds the update of each row's adapter, if it has one of this module, in place."""
        where = self._modules.get((layer, module))
        if where is None:
            return
        (rows, inner), count = x.shape, len(where.starts)
        small = x.new_empty((rows, count, self._most))
        part = min(exact_kernels.PART, max(pow2(inner), 16))
        sizes = {"targets": len(self._spans), "deltas": count, "most": self._most}
        options, lanes, terms, ranks = launch(x), LANES, TERMS, self._most
        if x.dtype == torch.float32:
            lanes, terms, ranks = 1, TERMS_FP32, min(TERMS_FP32, self._most)
        _shrink[(rows, count, self._most // NARROW)](
            x, places, self._addresses, self._ranks, small, where.first, **sizes, inner=inner,
            part=part, lanes=lanes, block_n=NARROW,
            block_k=min(terms, part if inner <= part else part // 2), num_warps=2, **options,
        )  # fmt: skip
        _expand[(triton.cdiv(where.longest, COLUMNS), count, rows)](
            small, places, self._addresses, self._ranks, self._scales, self._spans, out,
            where.first, out.shape[1], **sizes, lanes=lanes, block_n=COLUMNS, block_k=ranks,
            num_warps=4, **options,
        )  # fmt: skip


def _sizes(config: ModelConfig) -> list[tuple[tuple[int, str], list[int]]]:
    """The packed modules that an adapter may update, and the columns of each part of them."""
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
    x, places, addresses, ranks, small, first,
    targets: tl.constexpr, deltas: tl.constexpr, most: tl.constexpr, inner: tl.constexpr,
    part: tl.constexpr, lanes: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
    early: tl.constexpr,
):  # fmt: skip
    """One row times some columns of the first matrix of its adapter."""
    if early:
        gdc_launch_dependents()
        gdc_wait()
    row, delta, column = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = tl.load(places + row)
    if place >= 0:
        rank = tl.load(ranks + place)
        address = tl.load(addresses + (place.to(tl.int64) * targets + first + delta) * 2)
        if (address != 0) & (column * block_n < rank):
            matrix = tl.multiple_of(address, 16).to(x.dtype)
            n, k = column * block_n + tl.arange(0, block_n), tl.arange(0, block_k)
            lane = tl.arange(0, lanes)
            some, real = (lane == 0)[:, None], (n < rank)[None, :]
            lines = x + row.to(tl.int64) * inner + lane[:, None] * 0 + k[None, :]
            columns = matrix + n[None, :] * inner + k[:, None]
            total = tl.zeros((lanes, block_n), tl.float32)
            total = _part(lines, columns, some, real, 0, part, total, inner, block_k)
            if inner > part:
                for begin in range(part, inner, part):
                    summed = tl.zeros((lanes, block_n), tl.float32)
                    end = begin + part
                    total += _part(lines, columns, some, real, begin, end, summed, inner, block_k)
            out = small + (row * deltas + delta) * most + lane[:, None] * 0 + n[None, :]
            tl.store(out, total.to(small.dtype.element_ty), mask=some & real)


@triton.jit(do_not_specialize=["first"])
def _expand(
    small, places, addresses, ranks, scales, spans, out, first, width,
    targets: tl.constexpr, deltas: tl.constexpr, most: tl.constexpr, lanes: tl.constexpr,
    block_n: tl.constexpr, block_k: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    """Some columns of one row: what its adapter's second matrix makes of it is added."""
    if early:
        gdc_launch_dependents()
        gdc_wait()
    column, delta, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    place = tl.load(places + row)
    if place >= 0:
        target = first + delta
        start, size = tl.load(spans + target * 2), tl.load(spans + target * 2 + 1)
        address = tl.load(addresses + (place.to(tl.int64) * targets + target) * 2 + 1)
        if (address != 0) & (column * block_n < size):
            rank = tl.load(ranks + place)
            kind = out.dtype.element_ty
            n, lane = column * block_n + tl.arange(0, block_n), tl.arange(0, lanes)
            some, real = (lane == 0)[:, None], (n < size)[None, :]
            line = small + (row * deltas + delta) * most + lane[:, None] * 0
            columns = tl.multiple_of(address, 16).to(out.dtype) + n[None, :] * rank
            total = tl.zeros((lanes, block_n), tl.float32)
            for term in tl.static_range(0, most, block_k):
                k = term + tl.arange(0, block_k)
                inside = k < rank
                values = tl.load(line + k[None, :], mask=some & inside[None, :], other=0.0)
                matrix = tl.load(columns + k[:, None], mask=real & inside[:, None], other=0.0)
                total = tl.dot(values, matrix, total, input_precision="ieee")
            added = (total.to(kind).to(tl.float32) * tl.load(scales + place)).to(kind)
            cell = out + row.to(tl.int64) * width + start + lane[:, None] * 0 + n[None, :]
            old = tl.load(cell, mask=some & real, other=0.0).to(tl.float32)
            tl.store(cell, (old + added.to(tl.float32)).to(kind), mask=some & real)
