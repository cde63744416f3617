"""Exactness, from engine to trainer, on every kind of x86 CPU that this one can emulate."""

from __future__ import annotations

import pytest

from lockstep.engine.numerics.mkl_choice import cpu_flags, vendor
from tests.engine.machine import FORCED, child, self_test

pytestmark = pytest.mark.close_arithmetic("some of the CPUs played here are not exact")


def measured_exact() -> bool:
    """Return whether every forced mode was measured to be exact on this kind of CPU."""
    return vendor() == "GenuineIntel" and "avx512f" in (cpu_flags() or ())


@pytest.mark.failure_mode("F65")
@pytest.mark.parametrize("environ", FORCED.values(), ids=FORCED)
def test_trainer_and_engine_agree_bit_for_bit_or_close_is_reported(
    environ: dict[str, str],
) -> None:
    report = self_test("tiny", **environ)
    if not report["exact"]:
        assert not measured_exact(), report["problem"]
        assert report["arithmetic"] == "close"
        assert report["reason"] == report["problem"] != ""
        return
    assert report["checks"][0] == "engine"
    assert len(report["checks"]) == 9, "four numbers of threads, autograd on and off"
    assert report["rows"] in (4, 8, 16, 32, 64)


@pytest.mark.parametrize("environ", [{}, {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}])
def test_a_mixture_of_experts_agrees_too(environ: dict[str, str]) -> None:
    report = self_test("tiny-moe", **environ)
    assert report["exact"] == self_test("tiny", **environ)["exact"], report["problem"]


@pytest.mark.failure_mode("F70")
def test_the_bits_of_another_cpu_have_another_fingerprint() -> None:
    plain, other = self_test("tiny"), self_test("tiny", ATEN_CPU_CAPABILITY="default")
    assert plain["fingerprint"] != other["fingerprint"]


def test_a_mode_set_by_the_user_is_kept() -> None:
    assert self_test("tiny", MKL_CBWR="COMPATIBLE")["mkl"] == "COMPATIBLE"
    assert self_test("tiny", MKL_CBWR="OFF")["mkl"] == "OFF"


@pytest.mark.failure_mode("F65")
def test_without_a_row_multiple_arithmetic_is_close_with_the_reason() -> None:
    report = self_test("tiny", MKL_ENABLE_INSTRUCTIONS="AVX2", MKL_CBWR="OFF")
    if report["exact"]:
        pytest.skip("MKL keeps the bits of AVX2 in its default mode on this CPU")
    assert report["arithmetic"] == "close"
    assert "other bits" in report["problem"]
    assert report["reason"] == report["problem"]


LATE = """
import torch
torch.ones(64, 64) @ torch.ones(64, 64)
from transformers import AutoModelForCausalLM
from lockstep.engine import exact
from lockstep.models import bundled
from lockstep.tokens.errors import NotExact
model = AutoModelForCausalLM.from_pretrained(bundled("tiny"))
try:
    exact.prepare(model)
    print("prepared")
except NotExact as error:
    print(error.message)
    exact.prepare(model, strict=False)
"""


@pytest.mark.failure_mode("F65")
def test_a_trainer_that_computed_too_early_gets_the_line_to_add() -> None:
    if self_test("tiny", MKL_ENABLE_INSTRUCTIONS="AVX2", MKL_CBWR="OFF")["exact"]:
        pytest.skip("MKL keeps the bits of AVX2 in its default mode on this CPU")
    late = child(LATE, MKL_ENABLE_INSTRUCTIONS="AVX2")
    assert "export MKL_CBWR=AUTO,STRICT" in late.stdout, late.stderr
    in_time = child(LATE, MKL_ENABLE_INSTRUCTIONS="AVX2", MKL_CBWR="AUTO,STRICT")
    assert in_time.stdout == "prepared\n", in_time.stderr


def test_a_trainer_that_computed_too_early_continues_if_its_mode_holds() -> None:
    late = child(LATE)
    if self_test("tiny", MKL_CBWR="OFF")["exact"]:
        assert late.stdout == "prepared\n", late.stderr
    else:
        assert "MKL_CBWR" in late.stdout
