"""The KV cache: a slot per running sequence, and a prefix cache of blocks to start from."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from math import isfinite

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lockstep.engine.config import ModelConfig
from lockstep.engine.options import EngineOptions
from lockstep.tokens.errors import BadRequest

BLOCK = 16
"""Tokens per cached block."""


class SlotCache:
    """Keys and values of `slots` sequences, contiguous per sequence.

    Decoding therefore copies nothing. Each slot holds `capacity` tokens. One additional slot,
    `scratch`, is used to score sequences while others run. For MoE models the experts of each token
    are stored next to its keys.
    """

    def __init__(
        self, config: ModelConfig, options: EngineOptions, capacity: int, dtype: torch.dtype
    ) -> None:
        per_slot = 2 * config.layers * config.kv_size * capacity * dtype.itemsize
        self.slots = min(options.max_seqs, options.kv_bytes // per_slot - 1)
        if self.slots < 1:
            raise BadRequest(
                f"kv_bytes is {options.kv_bytes}, but one sequence of {capacity} tokens takes "
                f"{per_slot} bytes and at least two slots are needed: raise kv_bytes or lower "
                "max_model_len",
                param="kv_bytes",
            )
        self.scratch = self.slots
        shape = (config.layers, 2, self.slots + 1, config.kv_heads, capacity, config.head_dim)
        self._kv = torch.zeros(shape, dtype=dtype, device=options.device)
        self.k, self.v = self._kv.unbind(1)
        self.layers = tuple(zip(self.k, self.v, strict=True))
        """Keys and values by layer, as views made once instead of once per token."""
        self._rows = self._kv.flatten(1, 4).unbind()
        # Row of the first token of slot 0 within a layer, for each head of k and v.
        heads = torch.arange(2 * config.kv_heads, device=options.device)
        self._heads = (
            heads // config.kv_heads * shape[2] * config.kv_heads + heads % config.kv_heads
        ) * capacity
        self.experts: Tensor | None = None
        if config.moe_layers:
            self.experts = torch.zeros(
                (self.slots + 1, capacity, len(config.moe_layers), config.experts_per_token),
                dtype=torch.uint8 if config.experts <= 256 else torch.int16,
                device=options.device,
            )

    def places(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return the indices of these tokens' keys and values, as `write` takes them."""
        _, _, _, kv_heads, capacity, _ = self._kv.shape
        first = torch.add(positions, slots, alpha=kv_heads * capacity)
        return (first[:, None] + self._heads).flatten()

    def write(self, layer: int, places: Tensor, kv: Tensor) -> None:
        """Write kv (tokens, 2 * kv_heads, d), the heads of the keys first, to their places."""
        self._rows[layer].index_copy_(0, places, kv.reshape(-1, kv.shape[-1]))

    def write_run(self, layer: int, slot: int, start: int, kv: Tensor) -> None:
        """Write the keys and values of consecutive tokens from `start` on."""
        target = self._kv[layer, :, slot, :, start : start + len(kv)]
        target.copy_(kv.view(len(kv), *target.shape[:2], -1).permute(1, 2, 0, 3))

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one slot to another."""
        self.k[:, target, :, :length] = self.k[:, source, :, :length]
        self.v[:, target, :, :length] = self.v[:, source, :, :length]
        if self.experts is not None:
            self.experts[target, :length] = self.experts[source, :length]

    def finite(self, slot: int, start: int, end: int) -> bool:
        """Return whether the last layer's keys and values of tokens [start, end) are finite."""
        span = self._kv[-1, :, slot, :, start:end]
        # A finite sum implies finite terms. An infinite sum may come from large finite terms, so
        # that case is checked term by term.
        return isfinite(span.sum().item()) or bool(torch.isfinite(span).all())

    def wipe(self, slot: int) -> None:
        """Zero a slot.

        Stale finite values are harmless behind a mask, but 0 * NaN is NaN, which would reach the
        next sequence in the slot.
        """
        self.k[:, slot] = 0
        self.v[:, slot] = 0


class PrefixCache:
    """LRU cache of blocks of keys and values, keyed by the input that produced them.

    The name of a block is a hash chain over everything that determines its contents: the weights'
    epoch, the adapter, the cache salt and all tokens up to its end.
    """

    def __init__(self, cache: SlotCache, budget: int) -> None:
        layers, _, kv_heads, _, dim = cache.k.shape
        block_bytes = 2 * layers * kv_heads * BLOCK * dim * cache.k.element_size()
        self.capacity = budget // block_bytes
        self.hits = self.queries = 0
        self._cache = cache
        self._where: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(self.capacity))
        shape = (layers, self.capacity, kv_heads, BLOCK, dim)
        self._k = torch.empty(shape, dtype=cache.k.dtype, device=cache.k.device)
        self._v = torch.empty_like(self._k)
        self._experts: Tensor | None = None
        if cache.experts is not None:
            self._experts = cache.experts.new_empty(
                (self.capacity, BLOCK, *cache.experts.shape[2:])
            )

    def __len__(self) -> int:
        return len(self._where)

    def load(self, root: bytes, tokens: Sequence[int], slot: int) -> int:
        """Copy the longest cached prefix of `tokens` into `slot`; return its length.

        At least one token is left to compute, because its logits are needed.
        """
        found_blocks: dict[bytes, int] = {}
        for name in block_names(root, tokens, (len(tokens) - 1) // BLOCK):
            at = self._where.get(name)
            if at is None:
                break
            found_blocks[name] = at
        self._touch(list(found_blocks))
        self.queries += len(tokens)
        self.hits += len(found_blocks) * BLOCK
        if found_blocks:
            self._to_slot(list(found_blocks.values()), slot)
        return len(found_blocks) * BLOCK

    def store(self, root: bytes, tokens: Sequence[int], slot: int) -> None:
        """Store the whole blocks of `tokens`, whose keys and values are all in `slot`."""
        names = list(block_names(root, tokens, len(tokens) // BLOCK))[: self.capacity]
        # Touch the cached part of the chain first, so that adding its rest does not evict it.
        self._touch(names)
        blocks: list[int] = []
        targets: list[int] = []
        for block, name in enumerate(names):
            if name in self._where:
                continue
            at = self._free.pop() if self._free else self._where.popitem(last=False)[1]
            self._where[name] = at
            blocks.append(block)
            targets.append(at)
        # Again, with the new blocks: they were added at the end, so that the first block of the
        # chain would be evicted before them.
        self._touch(names)
        if blocks:
            self._from_slot(blocks, targets, slot)

    def clear(self) -> None:
        self._where.clear()
        self._free = list(range(self.capacity))

    def _touch(self, names: Sequence[bytes]) -> None:
        """Mark a chain as used, its first block last, so that it is evicted last.

        A block cannot be found once an earlier block of its chain has been evicted.
        """
        for name in reversed(names):
            if name in self._where:
                self._where.move_to_end(name)

    def _to_slot(self, blocks: list[int], slot: int) -> None:
        length = len(blocks) * BLOCK
        places = index_on(blocks, self._k.device)
        for pool, target in ((self._k, self._cache.k), (self._v, self._cache.v)):
            layers, _, kv_heads, _, dim = pool.shape
            taken = pool[:, places].transpose(1, 2).reshape(layers, kv_heads, length, dim)
            target[:, slot, :, :length] = taken
        if self._experts is not None and self._cache.experts is not None:
            rows = self._experts[blocks]
            self._cache.experts[slot, :length] = rows.reshape(length, *rows.shape[2:])

    def _from_slot(self, blocks: list[int], targets: list[int], slot: int) -> None:
        length = (blocks[-1] + 1) * BLOCK
        places = index_on(targets, self._k.device)
        for pool, source in ((self._k, self._cache.k), (self._v, self._cache.v)):
            layers, _, kv_heads, _, dim = pool.shape
            cut = source[:, slot, :, :length].view(layers, kv_heads, -1, BLOCK, dim)
            run = len(blocks) == blocks[-1] + 1 - blocks[0]  # usual case: one copy
            new = cut[:, :, blocks[0] :] if run else cut[:, :, blocks]
            pool[:, places] = new.transpose(1, 2)
        if self._experts is not None and self._cache.experts is not None:
            rows = self._cache.experts[slot, :length]
            self._experts[targets] = rows.view(-1, BLOCK, *rows.shape[1:])[blocks]


def index_on(
    numbers: Sequence[int] | npt.NDArray[np.signedinteger], device: torch.device
) -> Tensor:
    """Return these numbers on a device, without waiting for its queued work."""
    # A copy from pageable memory would block until the device has finished its queue.
    index = torch.tensor(numbers)
    if device.type != "cuda":
        return index
    return index.pin_memory().to(device, non_blocking=True)


def root_name(epoch: int, adapter: int | None, salt: str | None) -> bytes:
    """Return the name from which all block chains of these weights, adapter and salt start."""
    return blake2b(repr((epoch, adapter, salt)).encode(), digest_size=16).digest()


def block_names(root: bytes, tokens: Sequence[int], blocks: int) -> Iterator[bytes]:
    name = root
    for block in range(blocks):
        contents = array("i", tokens[block * BLOCK : (block + 1) * BLOCK]).tobytes()
        name = blake2b(name + contents, digest_size=16).digest()
        yield name
