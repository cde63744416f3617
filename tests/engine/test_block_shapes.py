"""Which shapes keep the bits is asked of the machine, and what it answers is kept to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.engine import block_shapes as module
from lockstep.engine.block_shapes import BLOCK, AttentionShapes, attention_shapes
from lockstep.tokens.errors import EngineFailure
from tests.engine.rig import Rig


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    attention_shapes.cache_clear()
    yield
    attention_shapes.cache_clear()


@pytest.mark.parametrize("count", [1, 63, 64, 65, 300, 511, 512, 513, 1024, 1500])
def test_keys_are_enough_and_end_in_a_good_tail(count: int) -> None:
    made = AttentionShapes(4, (64, 128, 384, BLOCK))
    keys = made.keys(count)
    assert keys >= count
    assert keys % BLOCK in (0, *made.tails)
    assert made.keys(keys) == keys, "what is good stays as it is"
    assert not any(count <= whole + tail < keys for whole in (0, 512, 1024) for tail in made.tails)


@pytest.mark.parametrize("dim", [8, 32, 80, 128])
def test_what_it_finds_holds_for_other_numbers(dim: int) -> None:
    made = attention_shapes(dim)
    source = torch.Generator().manual_seed(99)
    q, k, v = (torch.randn(1, 1, 2 * BLOCK, dim, generator=source) for _ in range(3))
    bias = torch.full((2 * BLOCK, 2 * BLOCK), float("-inf")).triu_(1)
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    for start in range(0, 2 * BLOCK - made.queries, 37):
        rows = slice(start, start + made.queries)
        keys = made.keys(rows.stop)
        found = torch.nn.functional.scaled_dot_product_attention(
            q[:, :, rows], k[:, :, :keys], v[:, :, :keys], attn_mask=bias[rows, :keys]
        )
        assert torch.equal(found, whole[:, :, rows]), (start, keys)


def test_a_shape_with_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU whose kernel sums 128 keys, or few queries, in another order."""
    right = torch.nn.functional.scaled_dot_product_attention

    def odd(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        out = right(q, k, v, **options)
        return out * (1 + 2.0**-20) if k.shape[2] == 128 or q.shape[2] < 8 else out

    monkeypatch.setattr(module.F, "scaled_dot_product_attention", odd)
    made = attention_shapes(32)
    assert made.queries == 8
    assert 128 not in made.tails
    assert made.tails[-1] == BLOCK


def test_where_even_whole_blocks_differ_exact_is_refused(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = torch.nn.functional.scaled_dot_product_attention

    def odd(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        out = right(q, k, v, **options)
        # Only beyond the first block of keys, where a short self-test does not look.
        return out * (1 + 2.0**-20) if k.shape[2] > BLOCK and q.shape[2] < BLOCK else out

    monkeypatch.setattr(module.F, "scaled_dot_product_attention", odd)
    assert attention_shapes(32).tails == ()
    with pytest.raises(EngineFailure, match="few queries"):
        Rig(tiny, arithmetic="exact")
