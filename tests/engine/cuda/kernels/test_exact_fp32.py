"""Exact kernels in fp32, where a product is a chain of multiply-adds: no cut changes a bit.

Triton's interpreter computes products with numpy, whose sums have another order. These tests
replace them by chains, one term after the other, as the compiler generates for a GPU. What remains
are the kernels' own sums, parts, steps and blocks, which must agree bit for bit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime import interpreter

from lockstep.engine import exact as engine_exact
from lockstep.engine import probe
from lockstep.engine.config import ModelConfig
from lockstep.engine.cuda import graphs, prefill, selftest, start, trainer
from lockstep.engine.cuda.kernels import adapters, exact_kernels, experts, prefill_kernels
from lockstep.engine.cuda.kernels import exact_attention as attention
from lockstep.engine.cuda.kernels.close_kernels import LOG2_E
from lockstep.engine.forward_pass import ATTENTION_NAME
from lockstep.engine.model.arithmetic import mix_experts, route
from lockstep.engine.numerics import plan
from lockstep.engine.options import EngineOptions
from lockstep.tokens.errors import BadRequest, EngineFailure
from tests.engine.cuda.kernels import references
from tests.engine.cuda.test_exact_layers import on_kernels
from tests.engine.rig import Rig

pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def chained(a: Any, b: Any, d: Any, order: int = 1) -> Any:
    """Return a product as a chain: every term is multiplied and added in order, with one
    rounding."""
    total = d.data
    for k in range(a.data.shape[1])[::order]:
        product = a.data[:, k : k + 1].astype(np.float64) * b.data[k : k + 1].astype(np.float64)
        total = (product + total).astype(np.float32)
    return interpreter.TensorHandle(total, d.dtype.scalar)


@pytest.fixture(autouse=True)
def _chains_in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        interpreter.InterpreterBuilder, "create_dot", lambda _, a, b, d, *__: chained(a, b, d)
    )
    monkeypatch.setattr(attention, "SPLIT", 32)
    monkeypatch.setattr(attention, "KEYS_FP32", 16)
    monkeypatch.setattr(attention, "QUERIES", 32)
    monkeypatch.setattr(attention, "QUERIES_FP32", 16)
    monkeypatch.setattr(prefill_kernels, "ROWS", 32)
    monkeypatch.setattr(exact_kernels, "PART", 128)
    torch.manual_seed(0)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape)


def test_a_row_of_a_product_has_the_same_bits_in_every_tile() -> None:
    x, weight, bias = numbers(300, 200), numbers(40, 200), numbers(40)
    whole = exact_kernels.linear(x, weight, bias)
    torch.testing.assert_close(whole, references.linear(x, weight, bias), **CLOSE)
    for rows in (1, 2, 5, 20, 50, 100):
        assert torch.equal(exact_kernels.linear(x[:rows], weight, bias), whole[:rows]), rows
    parts = exact_kernels.linear_parts(x[:3], weight)
    assert parts.shape[0] == 2
    assert torch.equal(parts[0] + parts[1] + bias, whole[:3])


def test_heads_are_normed_equally_alone_and_when_stored() -> None:
    heads, dim, rows = 3, 64, 7
    qkv, weight = numbers(rows, (heads + 2) * dim), numbers(dim)
    keys, values = torch.zeros(2, 1, 1, rows, dim)
    positions = torch.arange(rows, dtype=torch.int32)
    still = torch.ones(rows, dim), torch.zeros(rows, dim)
    queries = exact_kernels.store_heads(
        qkv, keys, values, torch.zeros_like(positions), positions, *still,
        q_norm=weight, k_norm=weight, eps=1e-6,
    )  # fmt: skip
    alone = qkv[:, : (heads + 1) * dim].reshape(-1, dim)
    normed = exact_kernels.head_norm(alone, weight, 1e-6).view(rows, -1)
    assert torch.equal(queries, normed[:, : heads * dim])
    assert torch.equal(keys[0, 0], normed[:, heads * dim :])
    expected = references.add_norm(alone, None, weight, 1e-6)
    torch.testing.assert_close(normed.view(-1, dim), expected, **CLOSE)


@pytest.mark.parametrize("group", [1, 3, 16])
def test_a_query_has_the_same_bits_in_a_prompt_in_pieces_and_alone(group: int) -> None:
    kv_heads, dim, length = 2, 32, 50
    keys, values = numbers(2, 2, kv_heads, 64, dim)
    q = numbers(length, kv_heads * group * dim)
    most = prefill_kernels.tokens_per_block(group)

    def attended(first: int, count: int) -> Tensor:
        places = range(0, count, most)
        blocks = [(at, min(most, count - at), 1, first + at) for at in places]
        table = torch.tensor([*blocks, (0, 0, 0, 0)], dtype=torch.int32)
        return attention.attend_ragged(q[first : first + count], keys, values, table, 0.2)

    whole = attended(0, length)
    reference = references.attend_ragged(
        q * 0.2 * LOG2_E, keys, values, torch.tensor([(0, length, 1, 0)], dtype=torch.int32)
    )
    torch.testing.assert_close(whole, reference, **CLOSE)
    pieces = [attended(0, 7), attended(7, 33), attended(40, 10)]
    assert torch.equal(torch.cat(pieces), whole)
    positions = torch.tensor([0, 15, 16, 31, 32, 49], dtype=torch.int32)
    some = positions.long()
    own = [cache[1, :, some].transpose(0, 1).flatten(1) for cache in (keys, values)]
    alone = attention.attend_tokens(
        torch.cat((q[some], *own), 1), keys, values, torch.ones_like(positions), positions,
        torch.ones(64, dim), torch.zeros(64, dim), 0.2, q_norm=None, k_norm=None, eps=0.0,
    )  # fmt: skip
    assert torch.equal(alone, whole[some])


@pytest.mark.parametrize("rows", [1, 9, 40])
def test_experts_in_two_products_equal_experts_one_by_one(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "FEW", 4)
    monkeypatch.setattr(experts, "MANY", 16)
    x, router = numbers(rows, 150), numbers(6, 150)
    gate_up, down = numbers(6, 2 * 40, 150), numbers(6, 150, 40)
    shares, chosen = route(x @ router.T, 3, True)
    expected = mix_experts(
        x, chosen, shares, gate_up, down, product=exact_kernels.linear, gate=exact_kernels.gate
    )
    assert torch.equal(experts.mix(x, chosen, shares, gate_up, down), expected)


def test_adapters_in_a_graph_equal_adapters_one_by_one(tiny: Path) -> None:
    config = ModelConfig.read(tiny)
    bank = adapters.AdapterBank(config, 4, 40, numbers(1))
    assert selftest.why_not_adapted(config, bank, numbers(1)) is None


@pytest.fixture
def rig(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(attention, "SPLIT", 16)
    monkeypatch.setattr(prefill, "SMALLEST", 1)
    monkeypatch.setattr(prefill, "SPARE_BLOCKS", 3)
    monkeypatch.setattr(selftest, "LENGTH", 28)  # three of them are more than a step here takes
    monkeypatch.setattr(selftest, "SHORT", (3,))
    monkeypatch.setattr(selftest, "DECODE_TOKENS", 3)
    monkeypatch.setattr(selftest, "CUTS", ((7, 19, 1, 1),))
    return on_kernels(tiny)


def test_the_self_test_of_a_whole_engine_finds_no_bit_that_differs(rig: Rig) -> None:
    assert selftest.why_not_exact(rig.core) is None


def test_the_self_test_detects_a_product_whose_order_depends_on_the_tile(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:

    def of_the_tile(_: object, a: Any, b: Any, d: Any, *__: object) -> Any:
        return chained(a, b, d, -1 if a.data.shape[0] == 64 else 1)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", of_the_tile)
    assert "differ" in str(selftest.why_not_exact(rig.core))


@pytest.mark.close_arithmetic("the self-test is replaced by one that finds a difference")
@pytest.mark.parametrize("demanded", ["auto", "exact"])
def test_a_failed_self_test_falls_back_to_close_or_prevents_the_start(
    rig: Rig, demanded: Literal["auto", "exact"], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = rig.core
    core.options = replace(core.options, arithmetic=demanded)
    monkeypatch.setattr(selftest, "why_not_exact", lambda _: "logits differ by 1.0")
    if demanded == "exact":
        with pytest.raises(EngineFailure, match=r"logits differ by 1\.0"):
            start.prove(core)
        return
    start.prove(core)
    assert core.model.arithmetic.name == core.plan.arithmetic == "close"
    assert "logits differ by 1.0" in core.arithmetic_note
    assert core.overlapped is None


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["exact", "close"])
def test_fast_kernels_are_never_used_in_fp32(tiny: Path, kind: torch.dtype, name: str) -> None:
    model = SimpleNamespace(config=ModelConfig.read(tiny), arithmetic=SimpleNamespace(name=name))
    cache = SimpleNamespace(k=SimpleNamespace(dtype=kind, is_cuda=True))
    fit = graphs.supported(model, cache)  # type: ignore[arg-type]
    assert fit == (name == "exact" or kind != torch.float32)


def test_fp32_is_exact_on_a_gpu_too(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = EngineOptions(device="cuda", dtype="float32", arithmetic="exact")
    assert options.why_not_exact is None
    with pytest.raises(BadRequest, match="device cpu and dtype float32"):
        EngineOptions(device="cuda", dtype="float32", arithmetic="portable")
    monkeypatch.setattr(plan, "_fingerprint_on", lambda *_: "of this device")
    assert engine_exact.own_plan(tiny, device="cuda", dtype="float32").is_exact


@pytest.mark.parametrize(
    ("device", "kind", "expected"),
    [
        ("cuda", torch.float32, True),
        ("cuda", torch.bfloat16, True),
        ("cpu", torch.float32, True),
        ("cpu", torch.bfloat16, False),
    ],
)
def test_a_probe_of_a_prepared_model_is_exact(
    device: str, kind: torch.dtype, expected: bool
) -> None:
    text = SimpleNamespace(_attn_implementation=ATTENTION_NAME)
    config = SimpleNamespace(get_text_config=lambda: text)
    model = SimpleNamespace(config=config, device=torch.device(device), dtype=kind)
    assert probe.is_exact(model) == expected


@pytest.mark.parametrize(
    ("kind", "start", "flash"),
    [(torch.float32, 0, False), (torch.bfloat16, 3, False), (torch.bfloat16, 0, True)],
)
def test_a_backward_pass_uses_plain_products_without_flash_attention(
    kind: torch.dtype, start: int, flash: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    plain = F.scaled_dot_product_attention

    def attend(*args: Tensor, **options: Any) -> Tensor:
        cuda = torch.backends.cuda
        seen.append((cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()))
        seen.append((torch.are_deterministic_algorithms_enabled(),) * 2)
        return plain(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    q, k = torch.randn(1, 2, 4, 32, dtype=kind), torch.randn(1, 2, 4 + start, 32, dtype=kind)
    context = SimpleNamespace(saved_tensors=(q, k, k), starts=(start,), scale=0.2)
    trainer._Attention.backward(context, torch.ones_like(q))
    assert seen == [(flash, flash)] * 2
    assert not torch.are_deterministic_algorithms_enabled()
