"""Comparison of the prefill kernels, run by Triton's interpreter, with plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.engine.cuda.kernels import prefill_kernels as prefill
from lockstep.engine.cuda.kernels.close_kernels import LOG2_E
from tests.engine.cuda.kernels import references

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "ROWS", 32)
    monkeypatch.setattr(prefill, "KEYS", 16)
    torch.manual_seed(0)


@pytest.mark.parametrize(("kv_heads", "group"), [(2, 2), (1, 3)])
def test_tokens_of_many_sequences_attend_to_their_own_slots(kv_heads: int, group: int) -> None:
    """Sequences have different lengths, and one starts in the middle of its slot."""
    dim, most = 32, prefill.tokens_per_block(group)
    keys, values = torch.randn(2, 5, kv_heads, 64, dim)
    blocks, row = [], 0
    for slot, start, count in ((3, 0, 20), (0, 17, 5), (1, 31, most), (4, 0, 1)):
        blocks += [
            (row + at, min(most, count - at), slot, start + at) for at in range(0, count, most)
        ]
        row += count
    table = torch.tensor([*blocks, (0, 0, 0, 0)], dtype=torch.int32)
    q = torch.randn(row, kv_heads * group * dim)
    # What lies behind the last token is not read: another sequence may have left anything there.
    keys[3, :, 20:] = values[3, :, 20:] = float("nan")
    out = prefill.attend_ragged(q, keys, values, table)
    torch.testing.assert_close(out, references.attend_ragged(q, keys, values, table), **CLOSE)


@pytest.mark.parametrize("norms", [False, True])
def test_heads_are_rotated_and_stored_in_their_slots(norms: bool) -> None:
    heads, kv_heads, dim, capacity = 3, 2, 32, 10
    parts = torch.randn(2, 4, (heads + 2 * kv_heads) * dim)
    keys, values = torch.zeros(2, 3, kv_heads, capacity, dim)
    slots = torch.tensor([0, 2, 2, -1], dtype=torch.int32)
    positions = torch.tensor([9, 0, 1, 5], dtype=torch.int32)
    angles = torch.rand(capacity, dim // 2).repeat(1, 2) * 6
    q_norm, k_norm = (torch.rand(dim), torch.rand(dim)) if norms else (None, None)
    queries = prefill.store_heads(
        parts, keys, values, slots, positions, angles.cos(), angles.sin(), 0.25,
        q_norm=q_norm, k_norm=k_norm, eps=1e-6,
    )  # fmt: skip

    def turned(x: Tensor, norm: Tensor | None) -> Tensor:
        if norm is not None:
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * norm
        low, high = x.chunk(2, -1)
        angle = angles[positions.long(), None]
        return x * angle.cos() + torch.cat((-high, low), -1) * angle.sin()

    whole = parts.sum(0).view(4, -1, dim)
    q, k, v = whole.split((heads, kv_heads, kv_heads), 1)
    expected = (turned(q, q_norm) * 0.25 * LOG2_E).flatten(1)
    torch.testing.assert_close(queries, expected, **CLOSE)
    kept_k, kept_v = torch.zeros_like(keys), torch.zeros_like(values)
    for row in range(3):
        kept_k[slots[row], :, positions[row]] = turned(k, k_norm)[row]
        kept_v[slots[row], :, positions[row]] = v[row]
    torch.testing.assert_close(keys, kept_k, **CLOSE)
    torch.testing.assert_close(values, kept_v, **CLOSE)
