"""Exactness is tested on the machine: what fails the test is not called exact."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.engine.model import arithmetic
from lockstep.engine.numerics import trainer_path
from lockstep.tokens.errors import BadRequest, EngineFailure
from tests.engine.rig import Rig, ids


@pytest.fixture(params=["keys summed in one go", "rows not padded"])
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arithmetic whose bits depend on the batch, as on an unsuitable CPU."""
    right = arithmetic.exact_attention

    def noisy(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
        # Stands for kernels that pick their order of summation by the shape of the product.
        wrong = k.shape[2] if request.param == "keys summed in one go" else q.shape[2]
        return right(q, k, v, bias, scale) * (1 + wrong * 2.0**-22)

    monkeypatch.setattr(arithmetic, "exact_attention", noisy)


@pytest.mark.close_arithmetic("attention is replaced by one whose bits depend on the batch")
@pytest.mark.usefixtures("broken")
def test_auto_falls_back_to_close_with_a_reason(
    tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        rig = Rig(tiny, arithmetic="auto")
    assert rig.core.model.arithmetic.name == "close"
    assert "self-test failed" in rig.core.arithmetic_note
    assert "falling back to close" in caplog.text
    assert len(rig.generate(ids(1, 20)).token_ids) == 8


@pytest.mark.usefixtures("broken")
def test_exact_refuses_to_start(tiny: Path) -> None:
    with pytest.raises(EngineFailure, match="does not hold on this CPU"):
        Rig(tiny, arithmetic="exact")


@pytest.mark.exact_arithmetic
def test_auto_is_exact_where_the_test_passes(tiny: Path, moe: Path) -> None:
    for directory in (tiny, moe):
        rig = Rig(directory, arithmetic="auto")
        assert rig.core.model.arithmetic.name == "exact"
        assert rig.core.arithmetic_note == ""


@pytest.mark.exact_arithmetic
def test_the_self_test_works_in_a_short_context_and_with_one_slot(tiny: Path) -> None:
    rig = Rig(tiny, arithmetic="exact", max_model_len=16, max_seqs=1)
    assert len(rig.generate(ids(1, 15)).token_ids) == 1


def test_exact_is_rejected_for_unsupported_devices_and_dtypes(tiny: Path) -> None:
    with pytest.raises(BadRequest, match="exact arithmetic needs"):
        Rig(tiny, arithmetic="exact", dtype="bfloat16")


@pytest.mark.parametrize(
    ("device", "arithmetic", "problem"),
    [
        ("cuda", "auto", "device is cuda, .* sees 0 GPUs here"),
        ("cuda:99", "exact", "device is cuda:99, .* sees 0 GPUs here"),
        ("gpu", "auto", "device is 'gpu', expected cpu, cuda or cuda:N"),
    ],
)
def test_a_missing_device_is_rejected(
    tiny: Path, device: str, arithmetic: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadRequest, match=problem):
        Rig(tiny, arithmetic=arithmetic, device=device)


def test_auto_in_bfloat16_is_close_with_a_reason(tiny: Path) -> None:
    rig = Rig(tiny, arithmetic="auto", dtype="bfloat16", max_model_len=64)
    assert rig.core.model.arithmetic.name == "close"
    assert "bfloat16" in rig.core.arithmetic_note
    assert len(rig.generate(ids(1, 20)).logprobs) == 8


@pytest.mark.parametrize("width", [24, 72, 100, 384])
def test_swiglu_has_the_bits_of_a_separate_gate(width: int) -> None:
    rows = torch.randn(16, 2 * width)
    gate, up = (half.contiguous() for half in rows.chunk(2, dim=-1))
    assert torch.equal(arithmetic.swiglu(rows), torch.nn.functional.silu(gate) * up)


@pytest.mark.exact_arithmetic
@pytest.mark.close_arithmetic("the trainer's attention is replaced by one with other bits")
@pytest.mark.failure_mode("F65")
def test_a_trainer_with_other_bits_is_found_at_start_up(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine agrees with itself here; only the trainer's order of operations differs."""
    right = trainer_path.segment_attention

    def other(*arguments: Any) -> Tensor:
        return right(*arguments) * (1 + 2.0**-20)

    monkeypatch.setattr(trainer_path, "segment_attention", other)
    rig = Rig(tiny, arithmetic="auto")
    assert rig.core.plan.arithmetic == "close"
    assert "between engine and trainer" in rig.core.plan.reason
