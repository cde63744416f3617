"""Experts and adapters in kernels that a graph can capture, run by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lockstep.engine.config import ModelConfig
from lockstep.engine.cuda import selftest
from lockstep.engine.cuda.kernels import exact_kernels, experts
from lockstep.engine.cuda.kernels.adapters import AdapterBank, Run, block_count
from lockstep.engine.cuda.start import FEWEST_PLACES
from lockstep.engine.model.arithmetic import route
from lockstep.engine.model.lora import HEAD_LAYER, Adapter, AdapterRows, LoraDelta
from tests.engine.cuda.kernels import references

ROUNDED = {"rtol": 2**-8, "atol": 2**-8}
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_kernels, "PART", 32)
    torch.manual_seed(0)


def numbers(*shape: int) -> Tensor:
    return (torch.randn(shape) / 4).half()


@pytest.mark.parametrize(("rows", "few"), [(1, 16), (9, 16), (40, 4)])
def test_every_row_gets_the_weighted_sum_of_its_experts(
    rows: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "FEW", few)
    monkeypatch.setattr(experts, "MANY", 16)
    monkeypatch.setattr(experts, "PAIRS", 16)
    x, router = numbers(rows, 48), numbers(6, 48)
    gate_up, down = numbers(6, 2 * 40, 48), numbers(6, 48, 40)
    shares, chosen = route(x @ router.T, 3, True)
    expected = references.mix(x, chosen, shares, gate_up, down)
    torch.testing.assert_close(experts.mix(x, chosen, shares, gate_up, down), expected, **ROUNDED)


def test_experts_are_added_in_order_of_their_numbers_not_of_their_shares() -> None:
    mixed = torch.tensor([2048.0, 1.0, -2048.0]).half()[:, None].repeat(1, 16)
    out, shares = numbers(1, 16), torch.ones(1, 3).half()
    experts._weigh_up[(1,)](
        mixed, torch.tensor([[5, 0, 3]]), shares, out, 16, top=3, lanes=4, block=16, early=False
    )
    assert out.unique().tolist() == [1.0]  # 2048 + 1 would have been rounded to 2048


def adapter(config: ModelConfig, rank: int, keys: list[tuple[int, str, int, int, int]]) -> Adapter:
    deltas: dict[tuple[int, str], tuple[LoraDelta, ...]] = {}
    for layer, module, start, inner, outer in keys:
        delta = LoraDelta(numbers(rank, inner), numbers(outer, rank), start)
        deltas[layer, module] = (*deltas.get((layer, module), ()), delta)
    return Adapter(f"of rank {rank}", Path(), "", 1.7 / rank, deltas)


@pytest.fixture
def config(tiny: Path) -> ModelConfig:
    return ModelConfig.read(tiny)


def test_each_row_adds_the_update_of_its_own_adapter(config: ModelConfig) -> None:
    c = config
    some = [
        (0, "qkv", 0, c.hidden, c.q_size),
        (0, "qkv", c.q_size + c.kv_size, c.hidden, c.kv_size),
        (1, "down", 0, c.intermediate, c.hidden),
    ]
    one = adapter(c, 3, some)
    other = adapter(c, 20, [*some[:1], (HEAD_LAYER, "head", 0, c.hidden, c.vocab_size)])
    bank = AdapterBank(c, 4, 24, numbers(1))
    runs: list[Run] = [(one, 1), (None, 1), (other, 18), (other, 1), (one, 2)]
    table = bank.blocks(runs, 6)
    assert block_count(runs) == 4
    assert table.tolist() == [[0, 1, 0], [2, 16, 1], [18, 3, 1], [21, 2, 0], [0, 0, 0], [0, 0, 0]]
    blocks = torch.from_numpy(table)
    for layer, module, inner, outer in (
        (0, "qkv", c.hidden, c.q_size + 2 * c.kv_size),
        (1, "down", c.intermediate, c.hidden),
        (1, "out", c.q_size, c.hidden),
        (HEAD_LAYER, "head", c.hidden, c.vocab_size),
    ):
        x, out = numbers(23, inner), numbers(23, outer)
        expected = out.clone()
        for lora, rows in ((one, [0, 21, 22]), (other, [*range(2, 21)])):
            chosen = AdapterRows(lora, torch.tensor(rows), 1)
            chosen.add_to(expected, x, layer, module, references.linear)
        bank.add_to(out, x, blocks, layer, module)
        torch.testing.assert_close(out, expected, **ROUNDED)


def test_an_adapter_is_evicted_only_after_its_batch(config: ModelConfig) -> None:
    keys = [(0, "out", 0, config.q_size, config.hidden)]
    first, second, third = (adapter(config, 2, keys) for _ in range(3))
    bank = AdapterBank(config, 2, 8, numbers(1))
    assert bank.blocks([(first, 1), (second, 1)], 2)[:, 2].tolist() == [0, 1]
    assert bank.changes == 0
    blocks = torch.from_numpy(bank.blocks([(third, 1), (first, 1)], 2))
    assert blocks[:, 2].tolist() == [1, 0]
    assert bank.changes == 1
    with pytest.raises(RuntimeError, match="more than 2 adapters"):
        bank.blocks([(first, 1), (second, 1), (third, 1)], 3)
    blocks = torch.from_numpy(bank.blocks([(third, 1), (first, 1)], 2))
    x = numbers(2, config.q_size)
    out = numbers(2, config.hidden)
    expected = out.clone()
    for at, lora in enumerate((third, first)):
        rows = AdapterRows(lora, torch.tensor([at]), 1)
        rows.add_to(expected, x, 0, "out", references.linear)
    bank.add_to(out, x, blocks, 0, "out")
    torch.testing.assert_close(out, expected, **ROUNDED)


@pytest.mark.parametrize("wrong", [False, True])
def test_adapters_with_other_bits_in_a_graph_are_computed_without_it(
    config: ModelConfig, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = AdapterBank(config, FEWEST_PLACES, 8, numbers(1))
    # By the interpreter, whose sums have another order in every shape: exact for these numbers.
    monkeypatch.setattr(selftest, "_numbers", lambda _device, kind, *shape: whole(kind, *shape))
    if wrong:
        monkeypatch.setattr(type(bank), "add_to", lambda *_: None)
    problem = selftest.why_not_adapted(config, bank, numbers(1))
    assert (problem is not None) == wrong


def whole(kind: torch.dtype, *shape: int) -> Tensor:
    """Return small whole numbers, whose products and sums are exact."""
    return (torch.arange(torch.tensor(shape).prod()) * 7 % 3 - 1).view(shape).to(kind)
