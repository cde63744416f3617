"""Attention over the sequences of a masked batch, each computed as if it were alone.

Left padding, several sequences packed into one row, a cache of earlier keys: all of these are runs
of keys in which a query sees the keys up to its own position. The engine computes such a run from
its first key, and this module does the same for each run, so that the bits do not depend on the
rest of the row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.model.arithmetic import HIDDEN, before_window, exact_attention, round_up
from lockstep.engine.numerics.block_shapes import attention_shapes
from lockstep.tokens.errors import NotExact


def segment_mask(**arguments: Any) -> Tensor | None:
    """Return the mask for transformers' AttentionMaskInterface: first and last key of each query.

    The shape is (batch, queries, 2), with first > last for a query that sees nothing. Returns None
    when every token sees all tokens before it, also with padding on the right.
    """
    from transformers.masking_utils import sdpa_mask

    visible = sdpa_mask(**arguments)
    return None if visible is None else key_ranges(visible)


def key_ranges(visible: Tensor) -> Tensor | None:
    """Return the first and last visible key of each query of a mask (batch, 1, queries, keys).

    The mask is true (or 0.0) where a key is visible. Returns None when it hides no earlier key of
    any sequence. Raises NotExact when a query sees keys with a gap between them, or not the run up
    to itself.
    """
    if visible.dim() != 4 or visible.shape[1] != 1:
        raise _not_exact(f"a mask of shape {tuple(visible.shape)}")
    seen = (visible if visible.dtype == torch.bool else visible == 0)[:, 0]
    queries, keys = seen.shape[1:]
    count = seen.sum(-1)
    first = seen.int().argmax(-1)
    last = first + count - 1
    positions = torch.arange(keys, device=seen.device)
    runs = (positions >= first[..., None]) & (positions <= last[..., None])
    if not torch.equal(runs, seen):
        raise _not_exact("a mask in which a query sees keys with a gap between them")
    if queries == keys:
        last_own = positions.expand_as(last)
        sees = count > 0
        if not torch.equal(last[sees], last_own[sees]):
            # Right padding: its queries see the sequence before them, and no query sees them.
            later = sees & (last < last_own)
            if not torch.equal(last[sees & ~later], last_own[sees & ~later]):
                raise _not_exact("a mask in which a query sees keys after its own")
            last, count = torch.where(later, first - 1, last), count.masked_fill(later, 0)
        if not first[count > 0].any():
            return None
    # In a sliding window the first key advances with every query. In packed sequences it advances
    # only at the first token of a sequence, which sees a single key.
    moved = (first.diff(dim=-1) > 0) & (last.diff(dim=-1) == 1) & (count[:, :-1] > 1)
    if moved[(count[:, 1:] > 1)].any():
        raise _not_exact("a sliding window")
    return torch.stack((first, last), dim=-1)


def segment_attention(
    query: Tensor, key: Tensor, value: Tensor, ranges: Tensor | None, scale: float, window: int = 0
) -> Tensor:
    """Return attention (batch, queries, heads, d), in the shapes that keep the bits.

    `query` is (batch, heads, queries, d); `key` and `value` are (batch, kv_heads, keys, d). A query
    that sees nothing gives zeros. `ranges` come from `key_ranges`; with None, the queries are the
    last ones of their row and each sees all keys up to its own.
    """
    batch, heads, queries, dim = query.shape
    if ranges is None:
        offset = key.shape[2] - queries
        positions = torch.arange(offset, offset + queries, device=query.device)
        out = attend(query, key, value, positions[None], scale, window)
        return out.transpose(1, 2).contiguous()
    first, last = ranges.unbind(-1)
    sees = last >= first
    rows = torch.arange(batch, device=query.device)[:, None].expand_as(first)
    # A sequence is identified by its row and its first key.
    names, index = torch.unique((rows * key.shape[2] + first)[sees], return_inverse=True)
    # Give every query a place within its sequence, and gather queries, keys and values into one
    # padded row per sequence. Each row is then computed as if its sequence were alone.
    counts = torch.bincount(index, minlength=len(names))
    order = torch.argsort(index, stable=True)
    place = torch.empty_like(order)
    starts = counts.cumsum(0) - counts
    place[order] = torch.arange(len(order), device=order.device) - starts[index[order]]
    most = int(counts.max()) if len(counts) else 0
    if not most:
        return query.new_zeros(batch, queries, heads, dim)
    of_query = torch.zeros(len(names), most, dtype=torch.long, device=query.device)
    positions = torch.zeros_like(of_query)
    where_row, where_query = torch.nonzero(sees, as_tuple=True)
    of_query[index, place] = where_query
    positions[index, place] = (last - first)[sees]
    row, begin = names // key.shape[2], names % key.shape[2]
    length = int(positions.max()) + 1
    of_key = begin[:, None] + torch.arange(length, device=query.device)
    of_key = of_key.clamp(max=key.shape[2] - 1)
    q, k, v = (
        part.transpose(1, 2)[row[:, None], at].transpose(1, 2)
        for part, at in ((query, of_query), (key, of_key), (value, of_key))
    )
    out = attend(q, k, v, positions, scale, window).transpose(1, 2)
    whole = query.new_zeros(batch, queries, heads, dim)
    return whole.index_put((where_row, where_query), out[index, place])


def attend(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float, window: int = 0
) -> Tensor:
    """Return the attention of each query over the keys up to its position, in the shape of q.

    `positions` is (batch, queries), or (1, queries) for every row. With a `window`, a query sees
    only so many keys, its own included.
    """
    if q.is_cuda:
        if window:
            raise _not_exact("a sliding window on a GPU")
        from lockstep.engine.cuda.trainer import attend

        return attend(q, k, v, positions, scale)
    batch, heads, queries, dim = q.shape
    kv_heads, length = k.shape[1:3]
    shapes = attention_shapes(dim)
    group, rows, keys = heads // kv_heads, round_up(queries, shapes.prefill), shapes.keys(length)
    # Key heads become batch entries and their query heads the heads, as in the engine's decode.
    shape = batch * kv_heads, group, keys, dim
    padded = F.pad(positions, (0, rows - queries))
    hidden = torch.arange(keys, device=q.device) > padded[..., None]
    if window:
        hidden |= before_window(padded, keys, window)
    bias = torch.zeros(hidden.shape, device=q.device).masked_fill_(hidden, HIDDEN)
    bias = bias[0] if len(positions) == 1 else bias.repeat_interleave(kv_heads, 0)[:, None]
    out = exact_attention(
        F.pad(q.reshape(batch * kv_heads, group, queries, dim), (0, 0, 0, rows - queries)),
        F.pad(k, (0, 0, 0, keys - length)).reshape(-1, 1, keys, dim).expand(shape),
        F.pad(v, (0, 0, 0, keys - length)).reshape(-1, 1, keys, dim).expand(shape),
        bias,
        scale,
    )
    return out[:, :, :queries].reshape(batch, heads, queries, dim)


def _not_exact(what: str) -> NotExact:
    return NotExact(
        f"a prepared model cannot compute {what} as the engine would: it takes whole causal "
        "sequences, padded on either side or packed with position_ids; for anything else use a "
        "model that was not prepared"
    )
