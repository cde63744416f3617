"""Arithmetic of a process: the MKL mode it selects, and the plan that processes compare.

Tests that need another process are in tests/cpus.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from lockstep.engine import exact
from lockstep.engine.model import arithmetic
from lockstep.engine.numerics import mkl, mkl_choice
from lockstep.engine.numerics import plan as numerics
from lockstep.engine.numerics.block_shapes import threads
from lockstep.tokens.errors import NotExact
from tests.engine.rig import Rig


@pytest.mark.exact_arithmetic
def test_engine_and_trainer_have_the_same_plan(tiny: Path, moe: Path) -> None:
    for directory in (tiny, moe):
        plan, own = Rig(directory).core.plan, exact.own_plan(directory)
        assert plan == own
        exact.check_plan(plan, own)
        assert msgspec.convert(json.loads(json.dumps(plan.to_json())), type(plan)) == plan


@pytest.mark.exact_arithmetic
@pytest.mark.failure_mode("F70")
def test_a_worker_with_other_bits_is_rejected_before_the_first_step(tiny: Path) -> None:
    own = exact.own_plan(tiny)
    there = replace(own, fingerprint="0" * 16, isa="AVX2", mkl="OFF")
    with pytest.raises(NotExact, match=r"isa .*'AVX2' there") as raised:
        exact.check_plan(there, replace(own, arithmetic="exact", reason=""))
    assert "portable" in raised.value.message


def test_a_fingerprint_does_not_depend_on_threads() -> None:
    numerics.fingerprint.cache_clear()
    with threads(3):
        many = numerics.fingerprint()
    numerics.fingerprint.cache_clear()
    assert numerics.fingerprint() == many


def test_modes_are_tested_once_on_other_cpus_and_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(mkl_choice, "vendor", lambda: "AuthenticAMD")
    tried = []

    def multiples(mode: str) -> int:
        tried.append(mode)
        return {"OFF": 8, mkl.STRICT: 4}[mode]

    monkeypatch.setattr(mkl_choice, "_try_mode", multiples)
    mkl_choice.preferred_mode.cache_clear()
    assert mkl_choice.preferred_mode() is None, "the default mode is never slower"
    mkl_choice.preferred_mode.cache_clear()
    assert mkl_choice.preferred_mode() is None
    assert tried == list(mkl_choice.MODES)
    mkl_choice.preferred_mode.cache_clear()


@pytest.mark.parametrize(
    ("multiples", "chosen"),
    [
        ({"OFF": 8, "AUTO,STRICT": 4}, "OFF"),
        ({"OFF": 64, "AUTO,STRICT": 4}, "AUTO,STRICT"),
        ({"OFF": 0, "AUTO,STRICT": 16}, "AUTO,STRICT"),
        ({"OFF": 64, "AUTO,STRICT": 0}, "OFF"),
        ({"OFF": 0, "AUTO,STRICT": 0}, "OFF"),
    ],
)
def test_a_mode_that_holds_for_few_rows_is_preferred(
    multiples: dict[str, int], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mkl_choice, "_try_mode", multiples.__getitem__)
    assert mkl_choice.find_mode() == chosen


@pytest.mark.parametrize("team", [2, 3, 7])
def test_elementwise_loops_keep_their_bits_in_any_number_of_threads(team: int) -> None:
    x = 8 * torch.randn(1100, 200)
    for function in (torch.nn.functional.silu, torch.cos, torch.sin):
        with threads(1):
            whole = function(x)
        with threads(team):
            assert torch.equal(arithmetic.in_safe_pieces(function, x), whole)
