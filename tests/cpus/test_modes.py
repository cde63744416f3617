"""The MKL mode of a process: set to strict, inherited by children, tested in processes."""

from __future__ import annotations

import pytest

from lockstep.engine.numerics import mkl, mkl_choice
from tests.engine.machine import child

REPRODUCIBLE = (
    "from lockstep.engine.numerics import mkl, plan; import os; plan.make_reproducible(); "
)
MODE = REPRODUCIBLE + "print(mkl.mode())"


def test_mkl_is_strict_where_it_guarantees_the_mode() -> None:
    if mkl_choice.vendor() != "GenuineIntel" or not mkl.offers_strict():
        pytest.skip(f"MKL promises no strict mode on {mkl_choice.vendor()}")
    assert child(MODE).stdout.strip() == mkl.STRICT
    assert child(MODE, MKL_CBWR="AVX2").stdout.strip() == "AVX2", "a user's choice is kept"
    assert child(MODE, MKL_ENABLE_INSTRUCTIONS="SSE4_2").stdout.strip() == "OFF"


def test_children_inherit_the_mode() -> None:
    process = child(REPRODUCIBLE + "print(os.environ.get('MKL_CBWR', 'OFF'))")
    assert process.stdout.strip() == child(MODE).stdout.strip()


def test_a_mode_is_tested_in_a_separate_process(caplog: pytest.LogCaptureFixture) -> None:
    assert mkl_choice._try_mode(mkl.STRICT) in (0, 4, 8, 16, 32, 64)
    assert mkl_choice._try_mode("no such mode") == 0
    assert "trial of MKL mode" not in caplog.text, "0 must not be the child's failure to start"
