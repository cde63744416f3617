"""Decoding on a CUDA device: one captured graph per batch size, replayed for every token.

A step is launched and collected apart, so that the next one can be in flight while the host handles
the tokens of the last: those it continues from never leave the device.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.cuda import kernels
from lockstep.engine.cuda.sampling_kernels import draw
from lockstep.engine.kv.cache import SlotCache
from lockstep.engine.model.model import Model
from lockstep.engine.weights.weights import Weights


class GraphRow(NamedTuple):
    """One sequence of a step: its last token, where that goes, and how the next is drawn."""

    slot: int
    position: int
    token: int
    uniform: float
    temperature: float
    processed: bool


class DrawnToken(NamedTuple):
    """What one row of a step sampled."""

    token: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A launched step: `read` waits for its tokens."""

    table: Table
    rows: int
    host: Tensor
    finished: torch.cuda.Event | None

    def read(self) -> list[DrawnToken]:
        """The token of each row, in the order of the launch."""
        if self.finished is not None:
            self.finished.synchronize()
        tokens, _, ranks = self.host[:, : self.rows].tolist()
        logprobs = self.host[1, : self.rows].view(torch.float32).tolist()
        return list(map(DrawnToken, tokens, logprobs, ranks))


class Table:
    """What one batch size reads and writes on the device, and its graph.

    One matrix of 32-bit words: positions, slots, processed, temperatures, uniforms, tokens,
    logprobs, ranks. The tokens are what a step starts from and what it draws, so that another step
    can follow at once.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.words = torch.zeros((8, rows), dtype=torch.int32, device=device)
        self.positions, self.slots, self.processed = self.words[:3]
        self.temperatures, self.uniforms = self.words[3:5].view(torch.float32)
        self.tokens, logprobs, self.ranks = self.words[5:]
        self.logprobs = logprobs.view(torch.float32)
        self.graph: torch.cuda.CUDAGraph | None = None
        # Two of each: the copy of the step before may still be in flight.
        pinned = device.type == "cuda"
        self._up = [torch.zeros((6, rows), dtype=torch.int32, pin_memory=pinned) for _ in "ab"]
        self._down = [torch.zeros((3, rows), dtype=torch.int32, pin_memory=pinned) for _ in "ab"]

    def fill(self, rows: Seq[GraphRow], spare: int) -> None:
        """Puts a fresh batch on the device; rows beyond it do their work in the slot `spare`."""
        self._up.reverse()
        slots, positions, tokens, uniforms, temperatures, processed = zip(*rows, strict=True)
        up, n = self._up[0], len(rows)
        up.zero_()
        up[1] = spare
        up[0, :n] = torch.tensor(positions)
        up[1, :n] = torch.tensor(slots)
        up[2, :n] = torch.tensor(processed)
        up[3, :n] = torch.tensor(temperatures, dtype=torch.float32).view(torch.int32)
        up[4, :n] = torch.tensor(uniforms, dtype=torch.float32).view(torch.int32)
        up[5, :n] = torch.tensor(tokens)
        self.words[:6].copy_(up, non_blocking=True)

    def refill(self, uniforms: Seq[float]) -> None:
        """New random numbers for a batch that goes on as it is."""
        self._up.reverse()
        up = self._up[0][4]
        up[: len(uniforms)] = torch.tensor(uniforms, dtype=torch.float32).view(torch.int32)
        self.words[4].copy_(up, non_blocking=True)

    def fetch(self, rows: int) -> StepInFlight:
        """Starts to copy what the step writes to the host."""
        self._down.reverse()
        host = self._down[0]
        host.copy_(self.words[5:], non_blocking=True)
        finished = None
        if self.words.is_cuda:
            finished = torch.cuda.Event()
            finished.record()
        return StepInFlight(self, rows, host, finished)


class Decoder:
    """Runs decode steps of a dense model over the slots of one cache.

    Graphs hold the addresses of the weights they were captured with: after a swap each batch size
    is captured anew when it is next used.
    """

    def __init__(self, model: Model, cache: SlotCache) -> None:
        self._model = model
        self._cache = cache
        self._tables: dict[int, Table] = {}
        self._weights: Weights | None = None

    @staticmethod
    def supports(model: Model, cache: SlotCache) -> bool:
        """Whether the kernels fit this device, number format and architecture."""
        c = model.config
        half = cache.k.dtype in (torch.bfloat16, torch.float16)
        square = c.head_dim >= 32 and c.head_dim & (c.head_dim - 1) == 0
        return cache.k.is_cuda and half and square and not c.moe_layers

    def launch(self, weights: Weights, rows: Seq[GraphRow]) -> StepInFlight:
        """Starts one step for these rows."""
        table = self._table(weights, len(rows))
        table.fill(rows, self._cache.scratch)
        return self._replay(table, len(rows))

    def follow(self, step: StepInFlight, uniforms: Seq[float]) -> StepInFlight:
        """Starts the next step of the same rows, before `step` was read."""
        step.table.refill(uniforms)
        return self._replay(step.table, step.rows)

    def _replay(self, table: Table, rows: int) -> StepInFlight:
        if table.graph is None:
            self._step(table)
        else:
            table.graph.replay()
        return table.fetch(rows)

    def _table(self, weights: Weights, rows: int) -> Table:
        if weights is not self._weights:
            self._tables.clear()
            self._weights = weights
        size = bucket(rows)
        if size not in self._tables:
            self._tables[size] = table = Table(size, self._cache.k.device)
            if self._cache.k.is_cuda:
                self._capture(table)
        return self._tables[size]

    def _capture(self, table: Table) -> None:
        table.slots.fill_(self._cache.scratch)
        self._step(table)  # compiles the kernels, which a capture must not
        torch.cuda.synchronize()
        table.graph = torch.cuda.CUDAGraph()
        table.positions.zero_()
        with torch.cuda.graph(table.graph):
            self._step(table)

    def _step(self, table: Table) -> None:
        """One token for every row; the next call continues from the tokens it draws."""
        weights, c = self._weights, self._model.config
        if weights is None:
            raise RuntimeError("a step was run before the decoder had weights")
        x = F.embedding(table.tokens, weights.embed)
        delta: Tensor | None = None
        for i, layer in enumerate(weights.layers):
            h = kernels.add_norm(x, delta, layer.input_norm, c.eps)
            attended = kernels.attend(
                kernels.linear(h, layer.qkv, layer.qkv_bias),
                self._cache.k[i],
                self._cache.v[i],
                table.slots,
                table.positions,
                *self._model.rotation,
                self._model.scale,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=c.eps,
            )
            h = kernels.add_norm(x, kernels.linear(attended, layer.out), layer.post_norm, c.eps)
            inner = kernels.gate(kernels.linear(h, layer.gate_up), x.dtype)
            delta = kernels.linear(inner, layer.down)
        h = kernels.add_norm(x, delta, weights.norm, c.eps)
        draw(
            F.linear(h, weights.head),
            table.uniforms,
            table.temperatures,
            table.processed,
            table.tokens,
            table.logprobs,
            table.ranks,
        )
        table.positions.add_(1)


def bucket(rows: int) -> int:
    """The batch size that serves so many rows: powers of two, and multiples of 32 from there."""
    return 1 << (rows - 1).bit_length() if rows <= 32 else -(-rows // 32) * 32
