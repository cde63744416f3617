"""The forward pass: rows of many sequences in, hidden states out, keys and values into slots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.arithmetic import (
    KEYS,
    ROWS,
    Arithmetic,
    gated,
    mix_experts,
    rms_norm,
    round_up,
    route,
)
from lockstep.engine.cache import SlotCache
from lockstep.engine.config import Llama3Rope, ModelConfig
from lockstep.engine.lora import Adapter, AdapterRows
from lockstep.engine.weights import Weights


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one sequence to run: `tokens` at positions from `start`, into `slot`."""

    slot: int
    start: int
    tokens: Sequence[int]
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Segments as tensors, made once per step. Rows are padded to a multiple of ROWS."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    count: int
    decode_rows: Tensor
    decode_slots: Tensor
    decode_width: int
    decode_keys: int
    decode_mask: Tensor
    prefills: tuple[tuple[int, Segment], ...]
    adapters: tuple[AdapterRows, ...]


class Model:
    """The architecture's constants; weights and caches are given to each call."""

    def __init__(
        self, config: ModelConfig, arithmetic: Arithmetic, max_len: int, device: str
    ) -> None:
        self.config = config
        self.arithmetic = arithmetic
        self.device = torch.device(device)
        self.scale = config.head_dim**-0.5
        angles = torch.outer(torch.arange(round_up(max_len, KEYS)).float(), frequencies(config))
        angles = torch.cat((angles, angles), dim=-1)
        self._cos, self._sin = angles.cos().to(device), angles.sin().to(device)

    def batch(self, segments: Sequence[Segment]) -> Batch:
        """The tensors for one step over `segments`, which lie in that order in its rows."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        singles: list[tuple[int, Segment]] = []
        prefills: list[tuple[int, Segment]] = []
        by_adapter: dict[int, tuple[Adapter, list[int]]] = {}
        for segment in segments:
            row, count = len(ids), len(segment.tokens)
            (singles if count == 1 else prefills).append((row, segment))
            ids += segment.tokens
            positions += range(segment.start, segment.start + count)
            slots += [segment.slot] * count
            if segment.adapter is not None:
                rows = by_adapter.setdefault(segment.adapter.uid, (segment.adapter, []))[1]
                rows += range(row, row + count)
        padding = round_up(len(ids), ROWS) - len(ids)
        width = max((s.slot + 1 for _, s in singles), default=0)
        lengths = torch.zeros(width, dtype=torch.long)
        decode_slots = torch.tensor([s.slot for _, s in singles], dtype=torch.long)
        lengths[decode_slots] = torch.tensor([s.start for _, s in singles], dtype=torch.long)
        keys = round_up(max((s.start + 1 for _, s in singles), default=0), KEYS)
        mask = torch.arange(keys)[None, :] > lengths[:, None]
        return Batch(
            ids=self._tensor(ids + [0] * padding),
            positions=self._tensor(positions + [0] * padding),
            slots=self._tensor(slots),
            count=len(ids),
            decode_rows=self._tensor([row for row, _ in singles]),
            decode_slots=decode_slots.to(self.device),
            decode_width=width,
            decode_keys=keys,
            decode_mask=mask.to(self.device),
            prefills=tuple(prefills),
            adapters=tuple(
                AdapterRows(adapter, self._tensor(rows)) for adapter, rows in by_adapter.values()
            ),
        )

    def forward(self, weights: Weights, cache: SlotCache, batch: Batch) -> Tensor:
        """Normed hidden states of all rows; writes keys, values and routed experts to the slots."""
        c, n = self.config, batch.count
        x = weights.embed[batch.ids]
        cos, sin = self._cos[batch.positions, None], self._sin[batch.positions, None]
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        for i, layer in enumerate(weights.layers):
            h = rms_norm(x, layer.input_norm, c.eps)
            qkv = F.linear(h, layer.qkv, layer.qkv_bias)
            self._adapt(batch, qkv, h, i, "qkv")
            q, k, v = qkv.split((c.q_size, c.kv_size, c.kv_size), dim=-1)
            q, k = q.view(-1, c.heads, c.head_dim), k.view(-1, c.kv_heads, c.head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = rms_norm(q, layer.q_norm, c.eps), rms_norm(k, layer.k_norm, c.eps)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            at = batch.slots, slice(None), batch.positions[:n]
            cache.k[i][at] = k[:n]
            cache.v[i][at] = v.view(-1, c.kv_heads, c.head_dim)[:n]
            attended = self._attend(q, cache.k[i], cache.v[i], batch)
            out = F.linear(attended, layer.out)
            self._adapt(batch, out, attended, i, "out")
            x = x + out
            x = x + self._mlp(rms_norm(x, layer.post_norm, c.eps), weights, cache, batch, i)
        return rms_norm(x, weights.norm, c.eps)

    def logits(self, weights: Weights, hidden: Tensor, rows: Tensor) -> Tensor:
        """fp32 logits of the given rows, (len(rows), vocab)."""
        chosen = F.pad(hidden[rows], (0, 0, 0, round_up(len(rows), ROWS) - len(rows)))
        return F.linear(chosen, weights.head)[: len(rows)].float()

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, batch: Batch) -> Tensor:
        out = q.new_zeros((q.shape[0], self.config.q_size))
        if batch.decode_width:
            width, length = batch.decode_width, batch.decode_keys
            queries = q[batch.decode_rows]
            whole = len(queries) == width
            if not whole:
                queries = q.new_zeros((width, *q.shape[1:])).index_copy(
                    0, batch.decode_slots, queries
                )
            decoded = self.arithmetic.decode(
                queries,
                keys[:width, :, :length],
                values[:width, :, :length],
                batch.decode_mask,
                self.scale,
            )
            out[batch.decode_rows] = decoded if whole else decoded[batch.decode_slots]
        for row, segment in batch.prefills:
            count = len(segment.tokens)
            length = round_up(segment.start + count, KEYS)
            out[row : row + count] = self.arithmetic.prefill(
                q[row : row + count],
                keys[segment.slot, :, :length],
                values[segment.slot, :, :length],
                segment.start,
                self.scale,
            )
        return out

    def _mlp(self, h: Tensor, weights: Weights, cache: SlotCache, batch: Batch, i: int) -> Tensor:
        layer, c = weights.layers[i], self.config
        if layer.router is None:
            both = F.linear(h, layer.gate_up)
            self._adapt(batch, both, h, i, "gate_up")
            inner = gated(both)
            out = F.linear(inner, layer.down)
            self._adapt(batch, out, inner, i, "down")
            return out
        shares, ids = route(h, layer.router, c.experts_per_token, c.normalize_top_k)
        if cache.experts is not None:
            column = c.moe_layers.index(i)
            chosen = ids[: batch.count].to(cache.experts.dtype)
            cache.experts[batch.slots, batch.positions[: batch.count], column] = chosen
        return mix_experts(h, ids, shares, layer.gate_up, layer.down)

    def _adapt(self, batch: Batch, out: Tensor, x: Tensor, layer: int, module: str) -> None:
        for rows in batch.adapters:
            rows.add_to(out, x, layer, module)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x (rows, heads, d)."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def frequencies(config: ModelConfig) -> Tensor:
    """The rotary frequencies, fp32, in the operation order of transformers."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    plain = 1.0 / (config.rope_theta**exponents)
    return plain if config.rope_llama3 is None else _stretched(plain, config.rope_llama3)


def _stretched(plain: Tensor, rope: Llama3Rope) -> Tensor:
    wavelength = 2 * math.pi / plain
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    slow = torch.where(wavelength > longest, plain / rope.factor, plain)
    blend = (rope.original_context / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - blend) * slow / rope.factor + blend * slow
    between = ~(wavelength < shortest) & ~(wavelength > longest)
    return torch.where(between, blended, slow)
