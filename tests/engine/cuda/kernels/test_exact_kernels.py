"""Comparison of the exact kernels, run by Triton's interpreter, with plain torch and each other.

The interpreter computes with numpy, whose sums have another order. An engine proves on the device,
at every start, that bits do not depend on the batch. Here each kernel is compared with its
reference, in fp16, because numpy has no bf16.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lockstep.engine.cuda.kernels import exact_attention as attention
from lockstep.engine.cuda.kernels import exact_kernels as exact
from lockstep.engine.cuda.kernels import prefill_kernels
from lockstep.engine.cuda.kernels.close_kernels import LOG2_E
from lockstep.engine.cuda.kernels.exact_gated import linear_gated
from lockstep.engine.cuda.kernels.prefill_kernels import tokens_per_block
from lockstep.engine.cuda.kernels.sampling_kernels import token_logprobs
from tests.engine.cuda.kernels import references

ROUNDED = {"rtol": 2**-9, "atol": 2**-9}
"""About one step of fp16: what is rounded from sums of another order."""
GATED = {"rtol": 2**-7, "atol": 2**-7}
"""What is left of it after a gate, which is steep where numbers are large."""
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "KEYS", 16)
    monkeypatch.setattr(attention, "SPLIT", 32)
    monkeypatch.setattr(exact, "PART", 128)
    monkeypatch.setattr(attention, "QUERIES", 32)
    monkeypatch.setattr(prefill_kernels, "ROWS", 32)
    torch.manual_seed(0)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape).half()


@pytest.mark.parametrize(("rows", "inner"), [(1, 300), (20, 64), (70, 48)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_one_sum(rows: int, inner: int, biased: bool) -> None:
    x, weight = numbers(rows, inner), numbers(40, inner)
    bias = numbers(40) if biased else None
    expected = references.linear(x, weight, bias)
    torch.testing.assert_close(exact.linear(x, weight, bias), expected, **ROUNDED)


@pytest.mark.parametrize("rows", [3, 70])
def test_parts_of_a_product_are_rounded_as_one(rows: int) -> None:
    x, weight = numbers(rows, 300), numbers(40, 300)
    parts = exact.linear_parts(x, weight)
    assert parts.shape == (3 if rows == 3 else 1, rows, 40)
    assert torch.equal(parts.sum(0).half(), exact.linear(x, weight))


@pytest.mark.parametrize("added", [False, True])
def test_a_norm_reads_what_a_trainer_would_have_rounded(added: bool) -> None:
    x, weight = numbers(3, 100), numbers(100)
    parts = torch.randn(2, 3, 100) if added else None
    delta = None if parts is None else parts.sum(0).half()
    expected, left = references.add_norm(x, delta, weight, 1e-6), x.clone()
    torch.testing.assert_close(exact.add_norm(x, parts, weight, 1e-6), expected, **ROUNDED)
    assert torch.equal(x, left if delta is None else left + delta)


def test_each_head_is_normed_separately() -> None:
    x, weight = numbers(19, 32), numbers(32)
    expected = references.add_norm(x, None, weight, 1e-6)
    torch.testing.assert_close(exact.head_norm(x, weight, 1e-6), expected, **ROUNDED)


def test_a_gate_rounds_where_a_module_does() -> None:
    both = numbers(3, 2 * 70)
    torch.testing.assert_close(exact.gate(both), references.gate(both), **ROUNDED)
    first, second = both.chunk(2, -1)
    assert torch.equal(exact.silu(first.contiguous()) * second, exact.gate(both))


@pytest.mark.parametrize(("rows", "inner"), [(1, 300), (20, 64), (17, 300), (32, 128), (70, 48)])
def test_a_gated_product_equals_a_product_then_a_gate(rows: int, inner: int) -> None:
    x, weight = numbers(rows, inner), numbers(2 * 40, inner)
    expected = references.gate(references.linear(x, weight))
    torch.testing.assert_close(linear_gated(x, weight), expected, **GATED)


def test_tokens_attend_equally_in_a_prompt_and_one_by_one() -> None:
    kv_heads, group, dim, length = 2, 2, 32, 40
    keys, values = numbers(2, 3, kv_heads, 48, dim)
    q = numbers(length, kv_heads * group * dim)
    most = tokens_per_block(group)
    blocks = torch.tensor(
        [(at, min(most, length - at), 1, at) for at in range(0, length, most)], dtype=torch.int32
    )
    whole = attention.attend_ragged(q, keys, values, blocks, 0.2)
    scaled = (q.float() * 0.2 * LOG2_E).to(torch.float32)
    expected = references.attend_ragged(scaled, keys.float(), values.float(), blocks)
    torch.testing.assert_close(whole.float(), expected, rtol=2e-2, atol=2e-2)
    some = torch.tensor([0, 15, 16, 39], dtype=torch.int32)
    own = [cache[1, :, some.long()].transpose(0, 1).flatten(1) for cache in (keys, values)]
    keys[1, :, some.long()] = 0
    values[1, :, some.long()] = 0
    # One after the other: later tokens see what earlier ones wrote.
    for at, position in enumerate(some):
        alone = attention.attend_tokens(
            torch.cat((q[position], own[0][at], own[1][at]))[None],
            keys, values, torch.tensor([1], dtype=torch.int32), position[None],
            torch.ones(48, dim).half(), torch.zeros(48, dim).half(), 0.2,
            q_norm=None, k_norm=None, eps=0.0,
        )  # fmt: skip
        torch.testing.assert_close(alone[0], whole[position], **ROUNDED)
        assert torch.equal(keys[1, :, position].flatten(), own[0][at])
        assert torch.equal(values[1, :, position].flatten(), own[1][at])


@pytest.mark.parametrize("norms", [False, True])
def test_heads_are_rotated_as_in_transformers(norms: bool) -> None:
    heads, kv_heads, dim, capacity = 3, 2, 32, 10
    qkv = numbers(3, (heads + 2 * kv_heads) * dim)
    keys, values = torch.zeros(2, 3, kv_heads, capacity, dim).half()
    slots = torch.tensor([0, 2, -1], dtype=torch.int32)
    positions = torch.tensor([9, 0, 5], dtype=torch.int32)
    angles = torch.rand(capacity, dim // 2).repeat(1, 2) * 6
    cos, sin = angles.cos().half(), angles.sin().half()
    norm = numbers(dim) if norms else None
    queries = exact.store_heads(
        qkv, keys, values, slots, positions, cos, sin, q_norm=norm, k_norm=norm, eps=1e-6
    )

    def turned(x: Tensor) -> Tensor:
        if norm is not None:
            x = references.add_norm(x.reshape(-1, dim), None, norm, 1e-6).view_as(x)
        low, high = x.chunk(2, -1)
        at = positions.long()
        return x * cos[at, None] + torch.cat((-high, low), -1) * sin[at, None]

    q, k, v = qkv.view(3, -1, dim).split((heads, kv_heads, kv_heads), 1)
    torch.testing.assert_close(queries, turned(q).flatten(1), **ROUNDED)
    for row in range(2):
        place = slots[row], slice(None), positions[row]
        torch.testing.assert_close(keys[place], turned(k)[row], **ROUNDED)
        assert torch.equal(values[place], v[row])
    assert not keys[1].any()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_scored_token_has_the_logprob_it_was_sampled_with(temperature: float) -> None:
    logits = (torch.randn(3, 9000) * 4).half()
    tokens = torch.tensor([5, 0, 8999])
    expected = references.token_logprobs(logits, tokens, temperature)
    scores = token_logprobs(logits, tokens, temperature)
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
