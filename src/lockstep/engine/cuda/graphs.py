"""Decoding on a CUDA device: one captured graph per batch size, replayed for every token.

Launching and collecting a step are separate, so that the next step can be in flight while the host
handles the tokens of the last one. The tokens it continues from never leave the device.
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
    """Memory pool shared by captured graphs.

    Sharing is safe because graphs run one after the other, and results that outlive a run are
    stored outside the pool.
    """

    def __init__(self) -> None:
        self._handle = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None

    def capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Run `run` once, which compiles its kernels, then capture it and return the graph."""
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread may stage weights, and its allocations must not fail here.
        with torch.cuda.graph(graph, pool=self._handle, capture_error_mode="thread_local"):
            run()
        return graph


def supported(model: Model, cache: SlotCache) -> bool:
    """Return whether the kernels support this device, dtype and architecture."""
    c = model.config
    # fp32 needs the exact kernels: the others use matrix units, which round to TF32.
    exact = model.arithmetic.name == "exact"
    typed = cache.k.dtype in (torch.bfloat16, torch.float16) or exact
    # Triton's ranges are powers of two.
    square = c.head_dim >= 32 and c.head_dim & (c.head_dim - 1) == 0
    experts_fit = not c.moe_layers or exact
    return cache.k.is_cuda and typed and square and experts_fit and c.traits.has_kernels


class Decoder:
    """Runner of decode steps over the slots of one cache, with adapters if there is a bank.

    Graphs hold the addresses of the weights they were captured with. An update writes its values to
    the same addresses (`ServedWeights.commit`), so the graphs serve every version.
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
        """Start one step for these rows, each under its adapter if it has one."""
        adapted = any(adapter is not None for adapter in adapters)
        table = self.table(weights, len(rows), adapted=adapted)
        table.fill(rows, self._cache.scratch)
        self._adapters = adapters if adapted else ()
        self._place_adapters(len(table.slots))
        return self._replay(table, rows)

    def follow(self, step: StepInFlight, uniforms: Seq[float]) -> StepInFlight:
        """Start the next step of the same rows before `step` has been read."""
        step.table.refill(uniforms)
        if self.bank is not None and self.bank.changes != self._changes:
            # A prompt scored in between may have evicted an adapter of this batch from its place.
            self._place_adapters(len(step.table.slots))
        return self._replay(step.table, step.rows)

    def _place_adapters(self, size: int) -> None:
        """Copy to the device which rows of the batch use which adapter."""
        if self.bank is None or not self._adapters:
            return
        blocks = self.bank.blocks(((adapter, 1) for adapter in self._adapters), size)
        self._changes = self.bank.changes
        self._blocks[:size].copy_(index_on(blocks, self._blocks.device))

    def table(self, weights: Weights, rows: int, *, adapted: bool = False) -> Table:
        """Return the table for so many rows, capturing its graph if necessary."""
        # Graphs hold the addresses of the memory they were captured with.
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
                # Capture runs the step: let it write to the scratch slot, not to a sequence's.
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
        """Compute one token for every row. The next call continues from the sampled tokens."""
        weights, model = self._weights, self._model
        if weights is None:
            raise RuntimeError("a step was run before the decoder had weights")

        def attend(i: int, layer: Layer, product: Tensor) -> Tensor:
            cache, slots, positions = self._cache.layers[i], table.slots, table.positions
            eps, q_norm, k_norm = model.config.eps, layer.q_norm, layer.k_norm
            if not self._exact:
                return close_kernels.attend(
                    product, *cache, slots, positions, *model.rotation, model.scale,
                    q_norm=q_norm, k_norm=k_norm, eps=eps,
                )  # fmt: skip
            return exact_attention.attend_tokens(
                product,
                *cache,
                slots,
                positions,
                *self._turns,
                model.scale,
                q_norm=q_norm,
                k_norm=k_norm,
                eps=eps,
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
        # Part of the graph: a replay without new input continues at the next position.
        table.positions.add_(1)
