"""The forward pass: rows of many sequences in, hidden states out, keys and values into slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.config import ModelConfig
from lockstep.engine.kv.cache import SlotCache
from lockstep.engine.model.arithmetic import (
    CLOSE_ROW_MULTIPLE,
    HIDDEN,
    Arithmetic,
    Close,
    gated,
    gelu_tanh,
    in_safe_pieces,
    mix_experts,
    rms_norm,
    round_up,
    route,
    silu,
)
from lockstep.engine.model.lora import HEAD_LAYER, Adapter, AdapterRows, adapter_rows
from lockstep.engine.model.rope import frequencies, rotate, window_frequencies
from lockstep.engine.numerics.block_shapes import MULTIPLES, row_multiple
from lockstep.engine.weights.weights import Layer, Weights


class Segment(NamedTuple):
    """Tokens of one sequence to compute, at positions from `start` on, in `slot`.

    The hidden states of the last `outputs` tokens are returned.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    outputs: int
    adapter: Adapter | None = None

    @classmethod
    def whole(
        cls, slot: int, start: int, tokens: Sequence[int], adapter: Adapter | None = None
    ) -> Segment:
        """Return a segment whose hidden states are all returned."""
        return cls(slot, start, tokens, len(tokens), adapter)


@dataclass(frozen=True, slots=True)
class Decode:
    """The segments of one token, which attend in one call over the first `width` slots.

    `rows` is None in the usual case, when they are the first rows of the batch, in slot order.
    """

    rows: Tensor | None
    slots: Tensor
    positions: Tensor
    width: int
    keys: int
    bias: Tensor
    window_bias: Tensor | None = None
    """The bias of layers in which a query sees only the last keys."""


@dataclass(frozen=True, slots=True)
class ModelBatch:
    """Segments as tensors, built once per step. Rows are padded to the row multiple."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    count: int
    decode: Decode | None
    prefills: tuple[tuple[int, Segment], ...]
    adapters: tuple[AdapterRows, ...]
    tail: BatchTail | None = None


@dataclass(frozen=True, slots=True)
class BatchTail:
    """The rows whose hidden states are returned. Other rows skip most of the last layer."""

    rows: Tensor
    batch: ModelBatch


class RaggedPrefill(Protocol):
    """A faster implementation of whole segments, over the slots of one cache."""

    cache: SlotCache

    def fits(self, segments: Sequence[Segment]) -> bool:
        """Return whether it can compute these segments in one run."""
        ...

    def run(self, weights: Weights, segments: Sequence[Segment]) -> tuple[Tensor, Tensor]:
        """Return normed hidden states and the sum of each, valid until the next run."""
        ...

    def on(self, cache: SlotCache) -> RaggedPrefill:
        """Return the same implementation over another cache."""
        ...

    def logits(
        self, weights: Weights, hidden: Tensor, adapters: Sequence[Adapter | None] = ()
    ) -> Tensor:
        """Return the logits of these hidden states, each under its adapter."""
        ...

    def scores(
        self,
        weights: Weights,
        hidden: Tensor,
        targets: Tensor,
        adapters: Sequence[Adapter | None] = (),
    ) -> Tensor:
        """Return the logprob of one token per hidden state, with the bits it has when sampled."""
        ...


class Model:
    """The forward pass of one architecture. Weights and caches are arguments of each call."""

    def __init__(self, config: ModelConfig, max_len: int, device: str, dtype: torch.dtype) -> None:
        self.config = config
        self.arithmetic: Arithmetic = Close()
        self.device = torch.device(device)
        self.prefiller: RaggedPrefill | None = None
        self.scale = config.traits.attention_scale or config.head_dim**-0.5
        self._activation = silu if config.traits.activation == "silu" else gelu_tanh
        self.row_multiple = CLOSE_ROW_MULTIPLE
        """Rows of a batch are padded to a multiple of this."""
        cos, sin = _rotation(frequencies(config), max_len)
        if config.rope_long is not None:
            cos, sin = (part * config.rope_long.attention_factor for part in (cos, sin))
        self.rotation = cos.to(device), sin.to(device)
        """Cosines and sines by position, each (max_len, rotated width of a head), fp32."""
        self._turns = _turns(cos, sin).to(device=device, dtype=dtype)
        local = window_frequencies(config)
        self.window_rotation = self.rotation if local is None else _rotation(local, max_len)
        """The same for layers with a window."""
        self._window_turns = None
        if local is not None:
            self._window_turns = _turns(*self.window_rotation).to(device=device, dtype=dtype)
        self._embedding_scale: Tensor | None = None
        if config.traits.embedding_scale != 1.0:
            factor = config.traits.embedding_scale
            self._embedding_scale = torch.tensor(factor, dtype=dtype, device=device)
        # A window into this vector starting at `max_len` - p hides all keys after position p, so
        # no mask is built per step.
        self.max_len = max_len
        self._bias = torch.zeros(3 * max_len + 1024, device=device, dtype=dtype)
        self._bias[max_len + 1 :] = HIDDEN

    def batch(self, segments: Sequence[Segment]) -> ModelBatch:
        """Return the tensors for one step over `segments`, whose rows keep that order."""
        singles = [len(segment.tokens) == 1 for segment in segments]
        batch = self._batch(segments, singles)
        if all(segment.outputs == len(segment.tokens) for segment in segments):
            return batch
        # A prefill needs the keys and values of every token, but the last layer's output only for
        # rows that are sampled or scored. The rest of that layer and the head skip the others.
        rows: list[int] = []
        tails: list[Segment] = []
        end = 0
        for segment in segments:
            end += len(segment.tokens)
            rows += range(end - segment.outputs, end)
            cut = len(segment.tokens) - segment.outputs
            tails.append(segment._replace(start=segment.start + cut, tokens=segment.tokens[cut:]))
        rows += [0] * (-len(rows) % self.row_multiple)
        return replace(batch, tail=BatchTail(self._tensor(rows), self._batch(tails, singles)))

    def _batch(self, segments: Sequence[Segment], singles: Sequence[bool]) -> ModelBatch:
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        decodes: list[int] = []
        prefills: list[tuple[int, Segment]] = []
        for segment, single in zip(segments, singles, strict=True):
            row, count = len(ids), len(segment.tokens)
            if single:
                decodes.append(row)
            elif count:
                prefills.append((row, segment))
            ids += segment.tokens
            positions += range(segment.start, segment.start + count)
            slots += [segment.slot] * count
        count, padding = len(ids), [0] * (-len(ids) % self.row_multiple)
        table = self._tensor([ids + padding, positions + padding, slots + padding])
        return ModelBatch(
            ids=table[0],
            positions=table[1],
            slots=table[2, :count],
            count=count,
            decode=self._decode(decodes, positions, slots, table) if decodes else None,
            prefills=tuple(prefills),
            adapters=tuple(
                adapter_rows(
                    ((segment.adapter, len(segment.tokens)) for segment in segments),
                    self.device,
                    self._adapter_row_multiple,
                )
            ),
        )

    def _decode(
        self, rows: list[int], positions: list[int], slots: list[int], table: Tensor
    ) -> Decode:
        """Return what these rows, of one token each, need to attend. `table` holds all rows."""
        starts, into = [positions[row] for row in rows], [slots[row] for row in rows]
        width, keys = max(into) + 1, self.arithmetic.keys(max(starts) + 1)
        windows = [self.max_len] * width
        for slot, start in zip(into, starts, strict=True):
            windows[slot] -= start
        if rows == into == list(range(width)):
            selected, at = table[:, :width], None
        else:
            at = self._tensor(rows)
            selected = table[:, at]
        bias = self._bias.unfold(0, keys, 1).index_select(0, self._tensor(windows))
        return Decode(
            rows=at,
            slots=selected[2],
            positions=selected[1],
            width=width,
            keys=keys,
            bias=bias,
            window_bias=self._hide_old(bias, [self.max_len - start for start in windows]),
        )

    def _hide_old(self, bias: Tensor, positions: list[int]) -> Tensor | None:
        """Return the bias with the keys before the window of each query hidden, if there is one."""
        window = self.config.traits.window
        if not window:
            return None
        last_hidden = self._tensor(positions)[:, None] - window
        keys = torch.arange(bias.shape[1], device=self.device)
        return bias.masked_fill(keys <= last_hidden, HIDDEN)

    def hidden_states(
        self, weights: Weights, cache: SlotCache, segments: Sequence[Segment]
    ) -> Tensor:
        """Return the normed hidden states of all tokens of whole segments."""
        fast = self.prefiller
        if fast is not None and fast.fits(segments):
            fast = fast if fast.cache is cache else fast.on(cache)
            return fast.run(weights, segments)[0]
        return self.forward(weights, cache, self.batch(segments))

    def forward(self, weights: Weights, cache: SlotCache, batch: ModelBatch) -> Tensor:
        """Return the normed hidden states of each segment's `outputs`.

        Writes keys, values and routed experts of all rows to their slots. In the last layer, only
        the experts of the outputs are written.
        """
        c, t, decode = self.config, self.config.traits, batch.decode
        x = weights.embed.index_select(0, batch.ids)
        if self._embedding_scale is not None:
            x.mul_(self._embedding_scale)
        turns = self._turns.index_select(0, batch.positions).unbind(1)
        window_turns = turns
        if self._window_turns is not None:
            window_turns = self._window_turns.index_select(0, batch.positions).unbind(1)
        places = None if decode is None else cache.places(decode.slots, decode.positions)
        for i, layer in enumerate(weights.layers):
            h = x if t.norms == "outputs" else self._norm(x, layer.attention_norm)
            qkv = F.linear(h, layer.qkv, layer.qkv_bias)
            self._adapt(batch, qkv, h, i, "qkv")
            heads = qkv.view(qkv.shape[0], -1, c.head_dim)
            # Queries and keys are adjacent in the product, so one call norms and rotates both.
            qk = heads[:, : c.heads + c.kv_heads]
            normed = self._norm_heads(qk, layer)
            if i not in t.unrotated:
                cos, sin = window_turns if i in t.windowed else turns
                width = cos.shape[-1]
                rotate(normed[..., :width], cos, sin, out=qk[..., :width])
            elif normed is not qk:
                qk.copy_(normed)
            self._write_kv(cache, i, heads[:, c.heads :], batch, places)
            q = heads[:, : c.heads]
            if batch.tail is not None and i == c.layers - 1:
                rows, batch = batch.tail.rows, batch.tail.batch
                x, q = x.index_select(0, rows), q.index_select(0, rows)
            attended = self._attend(q, *cache.layers[i], batch, t.window if i in t.windowed else 0)
            out = F.linear(attended, layer.out)
            self._adapt(batch, out, attended, i, "out")
            x = self._norm_output(out, layer.attention_norm, layer.attention_out_norm).add_(x)
            h = x if t.norms == "outputs" else self._norm(x, layer.mlp_norm)
            out = self._mlp(h, weights, cache, batch, i)
            x = self._norm_output(out, layer.mlp_norm, layer.mlp_out_norm).add_(x)
        return self._norm(x, weights.norm)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        offset = self.config.traits.norm_offset
        return rms_norm(x, weight + offset if offset else weight, self.config.eps)

    def _norm_output(self, x: Tensor, only: Tensor, own: Tensor | None) -> Tensor:
        """Norm what is added to the residual stream, in architectures that do."""
        if self.config.traits.norms == "outputs":
            return self._norm(x, only)
        return x if own is None else self._norm(x, own)

    def _norm_heads(self, qk: Tensor, layer: Layer) -> Tensor:
        """Return queries and keys (rows, heads + kv_heads, d), normed if the architecture does."""
        kind = self.config.traits.qk_norm
        if kind is None or layer.q_norm is None or layer.k_norm is None:
            return qk
        if kind == "head" and layer.qk_norm is not None:
            return self._norm(qk, layer.qk_norm)
        split = qk.split((self.config.heads, self.config.kv_heads), 1)
        weights = layer.q_norm, layer.k_norm
        parts = (
            self._norm(part.flatten(1).contiguous(), weight).view(part.shape)
            for part, weight in zip(split, weights, strict=True)
        )
        return torch.cat(tuple(parts), 1)

    def logits(
        self,
        weights: Weights,
        hidden: Tensor,
        rows: Sequence[int],
        adapters: Sequence[Adapter | None] = (),
    ) -> Tensor:
        """Return the fp32 logits (len(rows), vocab) of these rows, which must be ascending.

        `adapters` holds the adapter of each row, or is empty when no row has one.
        """
        count, first = len(rows), rows[0]
        if self.prefiller is not None:
            selected = hidden[first : first + count]
            if rows[-1] - first != count - 1:
                selected = hidden[list(rows)]
            return self.prefiller.logits(weights, selected, adapters).float()
        padded = round_up(count, self.row_multiple)
        if rows[-1] - first == count - 1 and first + padded <= hidden.shape[0]:
            selected = hidden[first : first + padded]
        else:
            selected = F.pad(hidden[list(rows)], (0, 0, 0, padded - count))
        logits = F.linear(selected, weights.head)[:count]
        self._adapt_head(logits, selected, adapters)
        return logits.float()

    def _adapt_head(
        self, logits: Tensor, hidden: Tensor, adapters: Sequence[Adapter | None]
    ) -> None:
        runs = ((adapter, 1) for adapter in adapters)
        for rows in adapter_rows(runs, self.device, self._adapter_row_multiple):
            rows.add_to(logits, hidden, HEAD_LAYER, "head")

    def scores(
        self,
        weights: Weights,
        hidden: Tensor,
        first: int,
        targets: Sequence[int],
        adapter: Adapter | None = None,
    ) -> Tensor:
        """Return the logprob of each target at the rows from `first` on."""
        ids = torch.tensor(targets, device=hidden.device)
        rows = range(first, first + len(targets))
        adapters = [adapter] * len(targets)
        if self.prefiller is not None:
            return self.prefiller.scores(weights, hidden[rows.start : rows.stop], ids, adapters)
        logprobs = torch.log_softmax(self.logits(weights, hidden, rows, adapters), dim=-1)
        return logprobs.gather(-1, ids[:, None]).squeeze(-1)

    def _write_kv(
        self, cache: SlotCache, layer: int, kv: Tensor, batch: ModelBatch, places: Tensor | None
    ) -> None:
        """Write the keys and values of all rows to their slots."""
        if batch.decode is not None and places is not None:
            rows = batch.decode.rows
            cache.write(layer, places, kv[: batch.decode.width] if rows is None else kv[rows])
        for row, segment in batch.prefills:
            run = kv[row : row + len(segment.tokens)]
            cache.write_run(layer, segment.slot, segment.start, run)

    def _attend(
        self, q: Tensor, keys: Tensor, values: Tensor, batch: ModelBatch, window: int
    ) -> Tensor:
        decode, rows = batch.decode, q.shape[0]
        if decode is not None and window and decode.window_bias is not None:
            decode = replace(decode, bias=decode.window_bias)
        if decode is not None and decode.rows is None and not batch.prefills:
            out = self._attend_decode(q[: decode.width], keys, values, decode)
            missing = rows - decode.width
            return torch.constant_pad_nd(out, (0, 0, 0, missing)) if missing else out
        out = q.new_zeros((rows, self.config.q_size))
        if decode is not None and decode.rows is None:
            out[: decode.width] = self._attend_decode(q[: decode.width], keys, values, decode)
        elif decode is not None:
            # Attention reads slots 0 to width - 1, so put the queries into slot order first.
            queries = q.new_zeros((decode.width, *q.shape[1:]))
            queries[decode.slots] = q[decode.rows]
            decoded = self._attend_decode(queries, keys, values, decode)
            out[decode.rows] = decoded[decode.slots]
        for row, segment in batch.prefills:
            count = len(segment.tokens)
            out[row : row + count] = self.arithmetic.prefill(
                q[row : row + count], keys[segment.slot], values[segment.slot],
                segment.start, self.scale, window,
            )  # fmt: skip
        return out

    def _attend_decode(self, q: Tensor, keys: Tensor, values: Tensor, decode: Decode) -> Tensor:
        """Return the attention of one query for each of the first slots."""
        width, length = decode.width, decode.keys
        return self.arithmetic.decode(
            q, keys[:width, :, :length], values[:width, :, :length], decode.bias, self.scale
        )

    def _mlp(
        self, h: Tensor, weights: Weights, cache: SlotCache, batch: ModelBatch, i: int
    ) -> Tensor:
        layer, c = weights.layers[i], self.config
        if layer.router is None:
            both = F.linear(h, layer.gate_up)
            self._adapt(batch, both, h, i, "gate_up")
            inner = gated(both, self._activation)
            out = F.linear(inner, layer.down)
            self._adapt(batch, out, inner, i, "down")
            return out
        shares, ids = route(F.linear(h, layer.router), c.experts_per_token, c.normalize_top_k)
        if cache.experts is not None:
            column = c.moe_layers.index(i)
            selected = ids[: batch.count].to(cache.experts.dtype)
            cache.experts[batch.slots, batch.positions[: batch.count], column] = selected
        return mix_experts(h, ids, shares, layer.gate_up, layer.down, self.row_multiple)

    def _adapter_row_multiple(self, adapter: Adapter) -> int:
        """Return the row multiple of an adapter's products, which may be larger for low ranks."""
        if self.arithmetic.name == "close":
            return self.row_multiple
        return row_multiple(self.config.products.with_lora(adapter.rank)) or MULTIPLES[-1]

    def _adapt(self, batch: ModelBatch, out: Tensor, x: Tensor, layer: int, module: str) -> None:
        for rows in batch.adapters:
            rows.add_to(out, x, layer, module)

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)


def _rotation(frequencies: Tensor, max_len: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of all positions, each (max_len, head_dim)."""
    angles = torch.outer(torch.arange(max_len).float(), frequencies)
    halves = (in_safe_pieces(turn, angles) for turn in (torch.cos, torch.sin))
    cos, sin = (torch.cat((half, half), -1) for half in halves)
    return cos, sin


def _turns(cos: Tensor, sin: Tensor) -> Tensor:
    """Return the factors that `rotate` takes, (max_len, 2, 1, head_dim)."""
    # `rotate` negates one half of a head; the sign is stored in the sines.
    half = sin.shape[-1] // 2
    signed = torch.cat((-sin[:, :half], sin[:, half:]), -1)
    return torch.stack((cos, signed), 1)[:, :, None]
