"""Search for shapes that keep the bits, on this machine and on simulated ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.engine import exact
from lockstep.engine.config import ModelConfig
from lockstep.engine.numerics import block_shapes as module
from lockstep.engine.numerics import mkl
from lockstep.engine.numerics.block_shapes import (
    BLOCK,
    AttentionShapes,
    attention_shapes,
    products,
    row_multiple,
    shared_products_hold,
    steady_products,
    why_unfit,
)
from lockstep.tokens.errors import EngineFailure
from tests.engine.checkpoints import trainer
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
def test_the_shapes_found_hold_for_other_values(dim: int) -> None:
    made = attention_shapes(dim)
    source = torch.Generator().manual_seed(99)
    q, k, v = (torch.randn(1, 1, 2 * BLOCK, dim, generator=source) for _ in range(3))
    bias = torch.full((2 * BLOCK, 2 * BLOCK), float("-inf")).triu_(1)
    whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    for start in range(0, 2 * BLOCK - made.queries, 37):
        rows = slice(start, start + made.queries)
        keys = made.keys(rows.stop)
        actual = torch.nn.functional.scaled_dot_product_attention(
            q[:, :, rows], k[:, :, :keys], v[:, :, :keys], attn_mask=bias[rows, :keys]
        )
        assert torch.equal(actual, whole[:, :, rows]), (start, keys)


def test_a_shape_with_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a CPU whose kernel sums 128 keys, or few queries, in another order."""
    right = torch.nn.functional.scaled_dot_product_attention

    def odd(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        out = right(q, k, v, **options)
        return out * (1 + 2.0**-20) if k.shape[2] == 128 or q.shape[2] < 8 else out

    monkeypatch.setattr(module.F, "scaled_dot_product_attention", odd)
    made = attention_shapes(32)
    assert made.queries == 8
    assert 128 not in made.tails
    assert made.tails[-1] == BLOCK


def test_exact_is_rejected_when_even_whole_blocks_differ(
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


# Rows of matrix products


SMALL = products(hidden=64, q_size=64, kv_size=32, vocab=128, intermediate=192)


@pytest.fixture
def odd_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulate a CPU that computes fewer than 16 rows, or a share of a product, in another
    order."""
    right = torch.nn.functional.linear

    def odd(x: Tensor, weight: Tensor) -> Tensor:
        out = right(x, weight)
        return out * (1 + 2.0**-20) if x.shape[0] % 16 or torch.get_num_threads() > 2 else out

    monkeypatch.setattr(module.F, "linear", odd)
    clear()
    yield
    clear()


def clear() -> None:
    for cached in (module.row_multiple, module._rows_hold, module.shared_products_hold):
        cached.cache_clear()


@pytest.mark.exact_arithmetic
@pytest.mark.usefixtures("odd_products")
def test_the_row_multiple_is_the_smallest_that_keeps_the_bits() -> None:
    assert row_multiple(SMALL) == 16
    assert why_unfit(32, SMALL) is None


@pytest.mark.usefixtures("odd_products")
def test_products_that_threads_change_use_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(mkl, "share_products", calls.append)
    assert not shared_products_hold(SMALL)
    with steady_products(SMALL):
        assert calls == [False]
    assert calls == [False, True]


@pytest.mark.failure_mode("F65")
def test_the_reason_names_a_missing_row_multiple(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.nn.functional.linear
    monkeypatch.setattr(module.F, "linear", lambda x, w: right(x, w) * (1 + len(x) * 2.0**-22))
    clear()
    assert row_multiple(SMALL) == 0
    assert "other bits in another number of rows" in str(why_unfit(32, SMALL))
    monkeypatch.undo()
    clear()


@pytest.mark.parametrize(("width", "fewest"), [(384, 4), (72, 4), (100, 8), (50, 16)])
def test_a_small_multiple_requires_loops_that_end_with_whole_registers(
    width: int, fewest: int
) -> None:
    actual = row_multiple(products(hidden=64, q_size=64, kv_size=64, vocab=64, intermediate=width))
    assert actual % fewest == 0


@pytest.mark.exact_arithmetic
def test_engine_and_trainer_find_the_same_products(tiny: Path, moe: Path) -> None:
    for directory in (tiny, moe):
        config = ModelConfig.read(directory)
        assert exact.products_of(trainer(directory).config) == config.products
        assert exact.row_multiple_of(trainer(directory)) == row_multiple(config.products)
