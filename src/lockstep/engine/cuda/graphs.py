"""Decoding on a CUDA device: one captured graph per batch size, replayed for every token.

A step is launched and collected apart, so that the next one can be in flight while the host handles
the tokens of the last: those it continues from never leave the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from lockstep.engine.cuda.forward import forward, head, recorder
from lockstep.engine.cuda.kernels import close_kernels, exact_attention
from lockstep.engine.cuda.kernels.adapters import AdapterBank
from lockstep.engine.cuda.table import GraphRow, StepInFlight, Table, bucket
from lockstep.engine.kv.cache import SlotCache, index_on
from lockstep.engine.model.lora import HEAD_LAYER, Adapter
from lockstep.engine.model.model import Model
from lockstep.engine.weights.weights import Layer, Weights


class GraphPool:
    """Captures graphs that share their memory: they run one after the other, and what outlives a
    run lies outside of it."""

    def __init__(self) -> None:
        self._handle = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None

    def capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """The graph of `run`, which is run once before: kernels are compiled then."""
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile: they stage weights.
        with torch.cuda.graph(graph, pool=self._handle, capture_error_mode="thread_local"):
            run()
        return graph


def supported(model: Model, cache: SlotCache) -> bool:
    """Whether the kernels fit this device, number format and architecture."""
    c = model.config
    # In fp32 only the exact kernels: the others would take the matrix units, which round to tf32.
    exact = model.arithmetic.name == "exact"
    typed = cache.k.dtype in (torch.bfloat16, torch.float16) or exact
    square = c.head_dim >= 32 and c.head_dim & (c.head_dim - 1) == 0
    known = not c.moe_layers or exact
    return cache.k.is_cuda and typed and square and known


class Decoder:
    """Runs decode steps over the slots of one cache, under adapters too where there is a bank.

    Graphs hold the addresses of the weights they were captured with. An update leaves its numbers
    at the same addresses (`ServedWeights.commit`), so they serve every version.
    """

    def __init__(
        self, model: Model, cache: SlotCache, pool: GraphPool, bank: AdapterBank | None = None
    ) -> None:
        self._model = model
        self._cache = cache
        self._pool = pool
        self.bank = bank
        self._exact = model.arithmetic.name == "exact"
        cos, sin = model.rotation
        self._turns = cos.to(cache.k.dtype), sin.to(cache.k.dtype)
        self._tables: dict[tuple[int, bool], Table] = {}
        self._blocks = torch.zeros(
            (bucket(cache.slots), 3), dtype=torch.int32, device=cache.k.device
        )
        self._adapters: Seq[Adapter | None] = ()
        self._changes = 0
        self._weights: Weights | None = None
        self._packed: Mapping[str, Tensor] | None = None
        self._logits: Tensor | None = None

    def launch(
        self, weights: Weights, rows: Seq[GraphRow], adapters: Seq[Adapter | None] = ()
    ) -> StepInFlight:
        """Starts one step for these rows, each under its adapter if there are any."""
        adapted = any(each is not None for each in adapters)
        table = self.table(weights, len(rows), adapted=adapted)
        table.fill(rows, self._cache.scratch)
        self._adapters = adapters if adapted else ()
        self._place(len(table.slots))
        return self._replay(table, rows)

    def follow(self, step: StepInFlight, uniforms: Seq[float]) -> StepInFlight:
        """Starts the next step of the same rows, before `step` was read."""
        step.table.refill(uniforms)
        if self.bank is not None and self.bank.changes != self._changes:
            # A prompt that was scored in between may have taken the place of an adapter.
            self._place(len(step.table.slots))
        return self._replay(step.table, step.rows)

    def _place(self, size: int) -> None:
        """Tells the device which rows of the batch are under which adapter."""
        if self.bank is None or not self._adapters:
            return
        blocks = self.bank.blocks(((each, 1) for each in self._adapters), size)
        self._changes = self.bank.changes
        self._blocks[:size].copy_(index_on(blocks, self._blocks.device))

    def table(self, weights: Weights, rows: int, *, adapted: bool = False) -> Table:
        """The table that serves so many rows, captured if it was not yet."""
        if weights.packed is not self._packed:
            self._tables.clear()
        self._weights, self._packed = weights, weights.packed
        if self._logits is None:
            shape = bucket(self._cache.slots), self._model.config.vocab_size
            self._logits = torch.empty(shape, dtype=weights.head.dtype, device=weights.head.device)
        size = bucket(rows)
        if (size, adapted) not in self._tables:
            self._tables[size, adapted] = table = Table(self._logits[:size])
            if self._cache.k.is_cuda:
                table.slots.fill_(self._cache.scratch)
                self._blocks.zero_()
                table.graph = self._pool.capture(lambda: self._step(table, adapted))
                table.positions.zero_()
        return self._tables[size, adapted]

    def _replay(self, table: Table, rows: Seq[GraphRow]) -> StepInFlight:
        if table.graph is None:
            self._step(table, self._tables.get((len(table.slots), True)) is table)
        else:
            table.graph.replay()
        return table.fetch(rows)

    def _step(self, table: Table, adapted: bool) -> None:
        """One token for every row; the next call continues from the tokens it draws."""
        weights, model = self._weights, self._model
        if weights is None:
            raise RuntimeError("a step was run before the decoder had weights")

        def attend(i: int, layer: Layer, product: Tensor) -> Tensor:
            cache, slots, positions = self._cache.layers[i], table.slots, table.positions
            norms = {"q_norm": layer.q_norm, "k_norm": layer.k_norm}
            eps = model.config.eps
            if not self._exact:
                return close_kernels.attend(
                    product, *cache, slots, positions, *model.rotation, model.scale,
                    eps=eps, **norms,
                )  # fmt: skip
            return exact_attention.attend_tokens(
                product, *cache, slots, positions, *self._turns, model.scale, eps=eps, **norms
            )

        blocks, bank = self._blocks[: len(table.slots)], self.bank if adapted else None

        def adapt(out: Tensor, x: Tensor, layer: int, module: str) -> None:
            if bank is not None:
                bank.add_to(out, x, blocks, layer, module)

        hidden = forward(
            model.config,
            weights,
            table.tokens,
            attend,
            exact=self._exact,
            adapt=adapt if bank is not None else None,
            record=recorder(model.config, self._cache, table.slots, table.positions),
        )
        head(hidden, weights, table.logits, exact=self._exact)
        adapt(table.logits, hidden, HEAD_LAYER, "head")
        table.draw()
        table.positions.add_(1)
