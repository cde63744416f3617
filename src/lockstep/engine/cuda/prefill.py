"""Prefill on a CUDA device: all tokens of a step in one ragged batch, by captured graphs."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.cuda.forward import Attend, forward, head, recorder
from lockstep.engine.cuda.graphs import GraphPool
from lockstep.engine.cuda.kernels import exact_attention, exact_kernels
from lockstep.engine.cuda.kernels.adapters import AdapterBank, Run, block_count
from lockstep.engine.cuda.kernels.prefill_kernels import (
    attend_ragged,
    store_heads,
    tokens_per_block,
)
from lockstep.engine.cuda.kernels.sampling_kernels import token_logprobs
from lockstep.engine.cuda.table import GraphRow, StepInFlight, Table, powers
from lockstep.engine.kv.cache import SlotCache
from lockstep.engine.model.lora import HEAD_LAYER, Adapter, AdapterRows, adapter_rows
from lockstep.engine.model.model import Model, Segment
from lockstep.engine.weights.weights import Layer, Weights

SMALLEST = 32
"""Tokens of the smallest captured batch."""
SPARE_BLOCKS = 16
"""Blocks of a batch in addition to one per 16 tokens."""
NOWHERE = -1
"""Slot of padding rows, whose keys and values are not stored."""


class TokenTable:
    """The tokens of one ragged batch on the device: ids, positions, slots, and two kinds of blocks.

    Blocks of queries are for `attend_ragged`, blocks of rows with an adapter for `AdapterBank`.
    There are more than the token count needs, because every sequence may end with a partial block.
    """

    def __init__(self, tokens: int, hidden: Tensor, sums: Tensor) -> None:
        self.tokens, self.blocks_max = tokens, most_blocks(tokens)
        self.hidden, self.sums = hidden[:tokens], sums[:tokens]
        size = 3 * tokens + (4 + 3) * self.blocks_max
        self._words = torch.zeros(size, dtype=torch.int32, device=hidden.device)
        self.ids, self.positions, self.slots = self._words[: 3 * tokens].view(3, tokens)
        queries, adapted = self._words[3 * tokens :].split(
            (4 * self.blocks_max, 3 * self.blocks_max)
        )
        self.blocks, self.adapted_blocks = queries.view(-1, 4), adapted.view(-1, 3)
        self.graph: torch.cuda.CUDAGraph | None = None
        pinned = hidden.is_cuda
        self._up = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in "ab"]
        self._copied: list[torch.cuda.Event | None] = [None, None]

    def fill(
        self, segments: Seq[Segment], per_block: int, adapted: npt.NDArray[np.int32] | None
    ) -> None:
        """Copy these segments to the device, one after the other. The remaining rows are padding.

        `adapted` are the blocks of rows with adapters, if there are any.
        """
        # Two host buffers take turns, so that a batch can be written while the last one is copied.
        self._up.reverse()
        self._copied.reverse()
        if (copied := self._copied[0]) is not None:
            copied.synchronize()
        words = self._up[0].numpy()
        ids, positions, slots = words[: 3 * self.tokens].reshape(3, -1)
        blocks: list[tuple[int, int, int, int]] = []
        ids[:], positions[:], slots[:] = 0, 0, NOWHERE
        row = 0
        for segment in segments:
            count = len(segment.tokens)
            ids[row : row + count] = segment.tokens
            positions[row : row + count] = np.arange(segment.start, segment.start + count)
            slots[row : row + count] = segment.slot
            blocks += [
                (row + at, min(per_block, count - at), segment.slot, segment.start + at)
                for at in range(0, count, per_block)
            ]
            row += count
        words[3 * self.tokens :] = 0
        end = 3 * self.tokens + 4 * self.blocks_max
        table = words[3 * self.tokens : end].reshape(-1, 4)
        table[: len(blocks)] = blocks
        if adapted is not None:
            words[end:] = adapted.ravel()
        self._words.copy_(self._up[0], non_blocking=True)
        if self._words.is_cuda:
            event = self._copied[0] = torch.cuda.Event()
            event.record()


class Prefiller:
    """Runner of prefills over the slots of one cache, with all layers in one graph.

    A run takes at most `budget` tokens. Graphs apply to weights in the memory they were captured
    with; staged weights are computed without graphs. Adapters need exact arithmetic, and are
    applied one by one without a bank. Without a pool nothing is captured.
    """

    def __init__(
        self,
        model: Model,
        cache: SlotCache,
        pool: GraphPool | None,
        budget: int,
        bank: AdapterBank | None = None,
    ) -> None:
        self.cache = cache
        self.bank = bank
        self._pool = pool
        self.sizes = token_sizes(budget)
        self._model = model
        self._budget = budget
        self.exact = model.arithmetic.name == "exact"
        self._turns = [turn.to(cache.k.dtype) for turn in model.rotation]
        self._per_block = tokens_per_block(model.config.group)
        device, kind = cache.k.device, cache.k.dtype
        largest = self.sizes[-1]
        self._hidden = torch.empty((largest, model.config.hidden), dtype=kind, device=device)
        self._sums = torch.empty(largest, dtype=torch.float32, device=device)
        self._logits: Tensor | None = None
        self._tables: dict[tuple[int, bool], TokenTable] = {}
        self._heads: dict[int, Table] = {}
        self._packed: Mapping[str, Tensor] | None = None

    def run(self, weights: Weights, segments: Seq[Segment]) -> tuple[Tensor, Tensor]:
        """Return the normed hidden states of all tokens, and the sum of each.

        A sum is finite if all its values are. Writes keys and values to the slots. The next run
        overwrites both tensors.
        """
        count = sum(len(segment.tokens) for segment in segments)
        runs = _runs(segments)
        bank = self.bank if any(adapter is not None for adapter, _ in runs) else None
        adapted = bank is not None
        table = self.table(weights, self._size(segments, count), adapted=adapted)
        blocks = None if bank is None else bank.blocks(runs, table.blocks_max)
        table.fill(segments, self._per_block, blocks)
        # Without a bank the rows of adapters differ from batch to batch, which no graph can hold.
        if self.bank is None and (rows := adapter_rows(runs, table.ids.device)):
            self._step(table, weights, count, rows)
        elif table.graph is not None and self._is_captured(weights):
            table.graph.replay()
        else:
            self._step(table, weights, adapted=adapted)
        return table.hidden[:count], table.sums[:count]

    def draw(
        self, weights: Weights, rows: Seq[GraphRow], adapters: Seq[Adapter | None] = ()
    ) -> StepInFlight:
        """Draw a token for each of these rows of the last run's hidden states."""
        table = self.head(weights, len(rows))
        table.fill(rows, 0)
        if any(adapter is not None and adapter.adapts_head for adapter in adapters):
            self._finish(table, weights, adapters)
        elif table.graph is not None and self._is_captured(weights):
            table.graph.replay()
        else:
            self._finish(table, weights)
        return table.fetch(rows)

    def on(self, cache: SlotCache) -> Prefiller:
        """Return a prefiller over another cache, without graphs, that may run in parallel."""
        bank = self.bank and self.bank.another()
        return Prefiller(self._model, cache, None, self._budget, bank)

    def logits(
        self, weights: Weights, hidden: Tensor, adapters: Seq[Adapter | None] = ()
    ) -> Tensor:
        """Return the logits of these hidden states, each under its adapter."""
        out = hidden.new_empty((len(hidden), weights.head.shape[0]))
        self._logits_to(out, weights, hidden, adapters)
        return out

    def _logits_to(
        self, out: Tensor, weights: Weights, hidden: Tensor, adapters: Seq[Adapter | None]
    ) -> None:
        head(hidden, weights, out, exact=self.exact)
        product = exact_kernels.linear if self.exact else F.linear
        for rows in adapter_rows(((adapter, 1) for adapter in adapters), hidden.device):
            rows.add_to(out, hidden, HEAD_LAYER, "head", product)

    def scores(
        self,
        weights: Weights,
        hidden: Tensor,
        targets: Tensor,
        adapters: Seq[Adapter | None] = (),
    ) -> Tensor:
        """Return the logprob of one token per hidden state, with the bits it has when sampled."""
        return token_logprobs(self.logits(weights, hidden, adapters), targets)

    def fits(self, segments: Seq[Segment]) -> bool:
        """Return whether one run can take all of these segments."""
        count = sum(len(segment.tokens) for segment in segments)
        adapted = any(segment.adapter is not None for segment in segments)
        return (self.exact or not adapted) and self._fitting(segments, count) is not None

    def table(self, weights: Weights, size: int, *, adapted: bool = False) -> TokenTable:
        """Return the table of this size, captured with the first weights ever used."""
        self._packed = self._packed or weights.packed
        if (size, adapted) not in self._tables:
            self._tables[size, adapted] = table = TokenTable(size, self._hidden, self._sums)
            if self._pool is not None and self.cache.k.is_cuda and self._is_captured(weights):
                table.slots.fill_(NOWHERE)
                run = partial(self._step, table, weights, adapted=adapted)
                table.graph = self._pool.capture(run)
        return self._tables[size, adapted]

    def head(self, weights: Weights, rows: int) -> Table:
        """Return the table that samples so many rows, captured with the first weights ever used."""
        self._packed = self._packed or weights.packed
        size = powers(rows)[-1]
        if size not in self._heads:
            if self._logits is None:
                shape = powers(self.cache.slots)[-1], self._model.config.vocab_size
                self._logits = self._hidden.new_empty(shape)
            self._heads[size] = table = Table(self._logits[:size])
            if self._pool is not None and self.cache.k.is_cuda and self._is_captured(weights):
                table.graph = self._pool.capture(lambda: self._finish(table, weights))
        return self._heads[size]

    def _is_captured(self, weights: Weights) -> bool:
        """Return whether these weights are in the memory that the graphs read."""
        return weights.packed is self._packed

    def _size(self, segments: Seq[Segment], count: int) -> int:
        size = self._fitting(segments, count)
        if size is None:
            raise RuntimeError(
                f"{len(segments)} sequences of {count} tokens do not fit into one prefill"
            )
        return size

    def _fitting(self, segments: Seq[Segment], count: int) -> int | None:
        blocks = sum(-(-len(segment.tokens) // self._per_block) for segment in segments)
        if self.bank is not None:
            blocks = max(blocks, block_count(_runs(segments)))
        return next(
            (size for size in self.sizes if size >= count and most_blocks(size) >= blocks), None
        )

    def _step(
        self,
        table: TokenTable,
        weights: Weights,
        count: int | None = None,
        rows_by_adapter: Seq[AdapterRows] = (),
        *,
        adapted: bool = False,
    ) -> None:
        """Compute all rows, with the bank's adapters if `adapted`.

        With `count` and `rows_by_adapter`, compute only the first `count` rows and apply adapters
        one by one.
        """
        count = count or table.tokens
        bank = self.bank if adapted else None

        def adapt(out: Tensor, x: Tensor, layer: int, module: str) -> None:
            if bank is not None:
                bank.add_to(out, x, table.adapted_blocks, layer, module)
            for rows in rows_by_adapter:
                rows.add_to(out, x, layer, module, exact_kernels.linear)

        config = self._model.config
        hidden = forward(
            config,
            weights,
            table.ids[:count],
            self._attention(table, count),
            exact=self.exact,
            adapt=adapt if bank is not None or rows_by_adapter else None,
            # Padding rows have slot -1, which is the last slot here: no sequence uses it.
            record=recorder(config, self.cache, table.slots[:count], table.positions[:count]),
        )
        table.hidden[:count] = hidden
        torch.sum(hidden, -1, dtype=torch.float32, out=table.sums[:count])

    def _attention(self, table: TokenTable, count: int) -> Attend:
        """Return the attention function for the first `count` rows."""
        model, cache = self._model, self.cache

        def attend(i: int, layer: Layer, product: Tensor) -> Tensor:
            slots, positions, blocks = table.slots[:count], table.positions[:count], table.blocks
            eps, q_norm, k_norm = model.config.eps, layer.q_norm, layer.k_norm
            if not self.exact:
                q = store_heads(
                    product, *cache.layers[i], slots, positions, *model.rotation, model.scale,
                    q_norm=q_norm, k_norm=k_norm, eps=eps,
                )  # fmt: skip
                return attend_ragged(q, *cache.layers[i], blocks)
            q = exact_kernels.store_heads(
                product,
                *cache.layers[i],
                slots,
                positions,
                *self._turns,
                q_norm=q_norm,
                k_norm=k_norm,
                eps=eps,
            )
            return exact_attention.attend_ragged(q, *cache.layers[i], blocks, model.scale)

        return attend

    def _finish(self, table: Table, weights: Weights, adapters: Seq[Adapter | None] = ()) -> None:
        hidden = self._hidden.index_select(0, table.positions)
        self._logits_to(table.logits, weights, hidden, adapters)
        table.draw()


def _runs(segments: Seq[Segment]) -> list[Run]:
    return [(segment.adapter, len(segment.tokens)) for segment in segments]


def most_blocks(tokens: int) -> int:
    """Return the maximum number of query blocks of a batch of so many tokens."""
    return tokens // 16 + SPARE_BLOCKS


def token_sizes(budget: int) -> list[int]:
    """Return the token counts that batches are padded to.

    They are powers of two, with one size between neighbours from 256 on.
    """
    sizes, size = [], SMALLEST
    while size < budget:
        sizes += [size] if size < 256 else [size, size + size // 2]
        size *= 2
    return [size for size in sizes if size < budget] + [-(-budget // 32) * 32]
