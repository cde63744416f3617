"""Comparison of the CUDA kernels, run by Triton's interpreter, with plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.engine.cuda.kernels import close_kernels
from lockstep.engine.cuda.kernels import sampling_kernels as drawing
from lockstep.engine.sampler import SamplingRow, sample
from lockstep.tokens import Sampling

CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit splits to two: the interpreter runs programs one by one."""
    monkeypatch.setattr(close_kernels, "SPLIT_TARGET", 16)
    torch.manual_seed(0)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


@pytest.mark.parametrize(("rows", "inner"), [(1, 1500), (5, 200), (32, 700), (33, 64)])
@pytest.mark.parametrize("biased", [False, True])
def test_parts_of_a_product_add_up(rows: int, inner: int, biased: bool) -> None:
    x, weight = torch.randn(rows, inner), torch.randn(70, inner)
    bias = torch.randn(70) if biased else None
    parts = close_kernels.linear(x, weight, bias)
    assert parts.shape[1:] == (rows, 70)
    torch.testing.assert_close(parts.sum(0), F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)


def test_a_long_inner_dimension_is_cut_into_no_more_parts_than_allowed() -> None:
    x, weight = torch.randn(2, 256 * 9 + 3), torch.randn(8, 256 * 9 + 3)
    parts = close_kernels.linear(x, weight)
    assert 1 < parts.shape[0] <= close_kernels.MOST_SPLITS
    torch.testing.assert_close(parts.sum(0), x @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("splits", [0, 1, 3])
def test_add_norm_stores_the_sum_in_x_and_returns_its_norm(splits: int) -> None:
    x, weight, parts = torch.randn(3, 96), torch.randn(96), torch.randn(splits, 3, 96)
    expected = x + parts.sum(0)
    out = close_kernels.add_norm(x, parts if splits else None, weight, 1e-6)
    torch.testing.assert_close(x, expected, **CLOSE)
    torch.testing.assert_close(out, normed(expected, weight), **CLOSE)


def test_a_gate_is_silu_of_one_half_times_the_other() -> None:
    parts = torch.randn(2, 3, 2 * 600)
    first, second = parts.sum(0).chunk(2, -1)
    torch.testing.assert_close(
        close_kernels.gate(parts, torch.float32), F.silu(first) * second, **CLOSE
    )


@pytest.mark.parametrize(
    ("rows", "kv_heads", "group", "dim", "norms"),
    [(1, 2, 2, 32, True), (4, 1, 3, 64, True), (17, 1, 1, 32, False)],
)
def test_a_new_token_attends_to_itself_and_all_before_it(
    rows: int, kv_heads: int, group: int, dim: int, norms: bool
) -> None:
    capacity, heads = 100, kv_heads * group
    keys, values = torch.randn(2, rows + 1, kv_heads, capacity, dim)
    before = keys.clone(), values.clone()
    qkv = torch.randn(2, rows, (heads + 2 * kv_heads) * dim)
    q_norm, k_norm = (torch.rand(dim), torch.rand(dim)) if norms else (None, None)
    slots = torch.randperm(rows, dtype=torch.int32)
    positions = torch.randint(0, capacity, (rows,), dtype=torch.int32)
    positions[0] = 0 if rows > 1 else 64
    positions[-1] = capacity - 1 if rows > 1 else 64
    angles = torch.rand(capacity, dim // 2).repeat(1, 2) * 6
    cos, sin = angles.cos(), angles.sin()

    out = close_kernels.attend(
        qkv, keys, values, slots, positions, cos, sin, dim**-0.5,
        q_norm=q_norm, k_norm=k_norm, eps=1e-6,
    )  # fmt: skip

    def turned(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        at = positions.long()
        return x * cos[at, None] + torch.cat((-high, low), -1) * sin[at, None]

    whole = qkv.sum(0).view(rows, -1, dim)
    q, k, v = whole.split((heads, kv_heads, kv_heads), 1)
    q = turned(q if q_norm is None else normed(q, q_norm))
    k = turned(k if k_norm is None else normed(k, k_norm))
    places = slots.long(), slice(None), positions.long()
    for cache, old, new in ((keys, before[0], k), (values, before[1], v)):
        torch.testing.assert_close(cache[places], new, **CLOSE)
        old[places] = new
        torch.testing.assert_close(cache, old, **CLOSE)
    for row in range(rows):
        seen = slice(0, int(positions[row]) + 1)
        expected = F.scaled_dot_product_attention(
            q[row][:, None],
            before[0][slots[row], :, seen].repeat_interleave(group, 0),
            before[1][slots[row], :, seen].repeat_interleave(group, 0),
        )
        torch.testing.assert_close(out[row], expected.flatten(), **CLOSE)


def drawn(logits: Tensor, rows: list[SamplingRow]) -> tuple[list[int], list[float], list[int]]:
    tokens = torch.empty(len(rows), dtype=torch.int32)
    logprobs, ranks = torch.empty(len(rows)), torch.empty_like(tokens)
    highest, logs = torch.empty(2, len(rows))
    drawing.draw(
        logits,
        torch.tensor([row.uniform for row in rows]),
        torch.tensor([row.sampling.temperature for row in rows]),
        torch.tensor([row.mode == "processed" for row in rows], dtype=torch.int32),
        tokens,
        logprobs,
        ranks,
        highest,
        logs,
    )
    return tokens.tolist(), logprobs.tolist(), ranks.tolist()


@pytest.mark.parametrize("vocab", [512, 9000])
def test_tokens_are_drawn_as_the_sampler_draws_them(vocab: int) -> None:
    logits = torch.randn(8, vocab) * 3
    temperatures = [1.0, 0.5, 0.0, 2.0, 1.0, 1.0, 0.7, 1.0]
    uniforms = [0.3, 0.9, 0.5, 0.1, 0.0, 1 - 2**-24, 0.6, 0.99]
    rows = [
        SamplingRow(Sampling(temperature=t), "processed" if at in (3, 6) else "raw", u)
        for at, (t, u) in enumerate(zip(temperatures, uniforms, strict=True))
    ]
    tokens, logprobs, ranks = drawn(logits, rows)
    for at, expected in enumerate(sample(logits, rows)):
        if at != 5:  # the last share of all: where rounding ends is not the same
            assert (tokens[at], ranks[at]) == (expected.token_id, expected.rank)
            assert logprobs[at] == pytest.approx(expected.logprob, abs=1e-5)
    assert logits[5, tokens[5]] > float("-inf")


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.failure_mode("F15")
def test_a_row_that_is_not_a_distribution_gets_nan_and_affects_no_other_row() -> None:
    logits = torch.randn(5, 600)
    logits[0, 7] = float("nan")
    logits[1] = float("-inf")
    logits[2, 3] = float("inf")
    logits[3] = float("-inf")
    logits[3, 599] = 1.0
    rows = [SamplingRow(Sampling(), "raw", 0.5)] * 5
    tokens, logprobs, _ = drawn(logits, rows)
    assert all(value != value for value in logprobs[:3])
    assert (tokens[3], logprobs[3]) == (599, 0.0)
    assert logprobs[4] == pytest.approx(sample(logits[4:], rows[4:])[0].logprob, abs=1e-5)
    assert all(0 <= token < 600 for token in tokens)
