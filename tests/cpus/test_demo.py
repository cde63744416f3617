"""The demo succeeds on every CPU: exact where possible, else close with the reason.

One module, so that a parallel test run executes these demos one after the other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.train.learning.exactness import CLOSE_BOUND
from tests.train.demo.test_demo import run

pytestmark = pytest.mark.close_arithmetic("some of the CPUs played here are not exact")
SHORT = ("--steps", "4", "--groups", "2", "--eval-prompts", "8", "--run-dir", "run")
CLOSE = ("--worker-args", "--arithmetic close")
FORCED = ("MKL_ENABLE_INSTRUCTIONS=AVX2", "MKL_ENABLE_INSTRUCTIONS=SSE4_2",
          "ATEN_CPU_CAPABILITY=default", "ONEDNN_MAX_CPU_ISA=AVX2")  # fmt: skip


def numerics(directory: Path) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads((directory / "run" / "run.json").read_text())["numerics"]
    return plan


@pytest.mark.failure_mode("F65")
@pytest.mark.parametrize("forced", FORCED)
def test_a_demo_succeeds_whatever_instructions_the_cpu_has(tmp_path: Path, forced: str) -> None:
    name, _, value = forced.partition("=")
    process, row = run(*SHORT, cwd=tmp_path, **{name: value})
    assert process.returncode == 0, process.stderr
    plan = numerics(tmp_path)
    # The plans say what this machine can do; where both are exact, nothing less will do.
    if {plan["trainer"]["arithmetic"], plan["workers"]["arithmetic"]} == {"exact"}:
        assert plan["mode"] == "exact", plan["reason"]
        assert (row["exact"], row["mismatch_max"]) == (True, 0.0)
        assert row["unequal_logprobs"] == 0
        assert row["compared_logprobs"] > 0
        expected = f"exactly 0, all {row['compared_logprobs']:,} tokens bit for bit"
        assert row["mismatch"] == expected
    else:
        assert row["mismatch"].startswith("close: max |Δ| ")


@pytest.mark.failure_mode("F65")
def test_a_demo_without_exact_arithmetic_is_close_with_the_reason(tmp_path: Path) -> None:
    process, row = run(*SHORT, *CLOSE, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert row["exact"] is False
    assert 0 < row["mismatch_max"] < CLOSE_BOUND["float32"]
    reason = f"close: max |Δ| {row['mismatch_max']:.1e} because the workers do not compute exactly"
    assert row["mismatch"].startswith(reason)
    assert "close was requested" in row["mismatch"]
    assert row["mismatch"] in process.stderr
    assert row["mismatch"] in Path(row["report"]).read_text()
    for shown in (process.stderr, Path(row["report"]).read_text().partition("<script")[0]):
        assert "exactly 0" not in shown
    plan = numerics(tmp_path)
    assert (plan["mode"], plan["bound"]) == ("close", CLOSE_BOUND["float32"])
    assert "close was requested" in plan["reason"]


@pytest.mark.failure_mode("F65")
def test_required_exactness_that_does_not_hold_fails_with_the_reason(tmp_path: Path) -> None:
    process, _ = run(*SHORT, *CLOSE, "--exact", cwd=tmp_path)
    assert process.returncode == 2
    reason = " ".join(process.stderr.split())
    assert "but this run cannot be exact: the workers do not compute exactly" in reason
    assert "Traceback" not in reason
