"""bf16 on a CPU that lists instructions it does not allow: no process crashes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lockstep.engine.numerics import bf16
from lockstep.tokens.errors import EngineFailure
from tests.engine.machine import child

CORE = """
import os
from lockstep.engine.options import EngineOptions
from lockstep.engine.core import Core
from lockstep.models import bundled
core = Core(bundled("tiny"), EngineOptions(dtype="bfloat16", max_model_len=64, max_seqs=2))
print(len(core.score(list(range(20)))), repr(core.plan.onednn), core.plan.arithmetic)
"""


SAVE = """
import sys
from transformers import AutoModelForCausalLM
from lockstep.engine.probe import save_checkpoint
from lockstep.models import bundled
model = AutoModelForCausalLM.from_pretrained(bundled("tiny"), dtype="bfloat16")
print(save_checkpoint(model, sys.argv[1]))
"""


def test_an_engine_in_bf16_survives_and_its_plan_names_the_limit() -> None:
    process = child(CORE)
    assert process.returncode == 0, process.stderr
    count, limit, arithmetic = process.stdout.split()
    assert (count, arithmetic) == ("19", "close")
    assert limit == "''" or "limiting oneDNN to" in process.stderr


def test_a_trainer_that_saves_a_bf16_model_survives_its_probe(tmp_path: Path) -> None:
    process = child(SAVE, str(tmp_path / "step"))
    assert process.returncode == 0, (process.returncode, process.stderr)
    assert (tmp_path / "step" / "STABLE").exists()


def test_a_tested_limit_is_not_tested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(bf16.VARIABLE, "AVX2")
    monkeypatch.setenv(bf16.CHECKED, "AVX2")
    monkeypatch.setattr(bf16, "_find_limit", lambda _: pytest.fail("tried again"))
    assert bf16.make_bf16_safe() == "AVX2"


def test_a_cpu_without_bf16_instructions_needs_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(bf16.CHECKED, raising=False)
    monkeypatch.delenv(bf16.VARIABLE, raising=False)
    monkeypatch.setattr(bf16, "cpu_flags", lambda: frozenset({"avx2", "fma"}))
    monkeypatch.setattr(bf16, "_find_limit", lambda _: pytest.fail("tried"))
    assert bf16.make_bf16_safe() == ""


def test_a_limit_is_set_for_this_process_and_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(bf16.VARIABLE, "ALL")
    monkeypatch.setenv(bf16.CHECKED, "")
    monkeypatch.setattr(bf16, "cpu_flags", lambda: frozenset({"amx_tile"}))
    monkeypatch.setattr(bf16, "_find_limit", lambda _: "AVX512_CORE")
    monkeypatch.setattr(bf16, "survives", lambda: True)
    assert bf16.make_bf16_safe() == "AVX512_CORE"
    assert os.environ[bf16.VARIABLE] == os.environ[bf16.CHECKED] == "AVX512_CORE"


@pytest.mark.parametrize("limit", [None, "AVX2"])
def test_bf16_is_rejected_when_no_limit_helps_or_it_is_too_late(
    limit: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(bf16.VARIABLE, "ALL")
    monkeypatch.setenv(bf16.CHECKED, "")
    monkeypatch.setattr(bf16, "cpu_flags", lambda: None)
    monkeypatch.setattr(bf16, "_find_limit", lambda _: limit)
    monkeypatch.setattr(bf16, "survives", lambda: False)
    with pytest.raises(EngineFailure, match="float32"):
        bf16.make_bf16_safe()


def test_a_fork_reports_whether_a_product_survives() -> None:
    process = child("from lockstep.engine.numerics.bf16 import survives; print(survives())",
                 ONEDNN_MAX_CPU_ISA="AVX2")  # fmt: skip
    assert process.stdout.strip() == "True", process.stderr
