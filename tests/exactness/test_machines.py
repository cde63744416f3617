"""Exact-only tests on other kinds of CPU, and the other tests on one without exact arithmetic."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.machine import DECIDING, FORCED

ROOT = Path(__file__).parents[2]
WHOLE_RUNS = ("replay/", "stores/", "trainers/", "train/ranks/", "train/test_")
"""Tests that start runs of many processes: minutes for each kind of CPU, and no arithmetic that the
tests within one process do not cover."""
EXACT_ONLY = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "tests").rglob("test_*.py")
    if "mark.exact_arithmetic" in path.read_text()
    and path.parent != Path(__file__).parent
    and not str(path.relative_to(ROOT / "tests")).startswith(WHOLE_RUNS)
)
"""Files with exact-only tests; their other tests are a sample of those for any machine."""
CPUS = {
    name: environ for name, environ in FORCED.items()
    if environ.keys() & {"MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY"}
}  # fmt: skip
"""Kinds of CPU with other instructions for float32 than this one."""
SKIPPED = "exact-only tests skipped: no exact arithmetic here: "


def run_tests(*arguments: str, **environ: str) -> str:
    """Return what pytest prints of these tests in a process on another kind of CPU."""
    inherited = {name: value for name, value in os.environ.items() if name not in DECIDING}
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments, *EXACT_ONLY],
        cwd=ROOT, env={**inherited, **environ}, capture_output=True, text=True, timeout=290,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.timeout(300)
@pytest.mark.failure_mode("F65")
@pytest.mark.parametrize("environ", CPUS.values(), ids=CPUS)
def test_exact_only_tests_pass_or_are_skipped_with_the_reason(environ: dict[str, str]) -> None:
    printed = run_tests("-m", "exact_arithmetic", **environ)
    assert (" passed" in printed) != (SKIPPED in printed), printed


@pytest.mark.timeout(300)
@pytest.mark.failure_mode("F65")
def test_any_other_test_passes_without_exact_arithmetic() -> None:
    printed = run_tests("--no-exact")
    assert f"{SKIPPED}the self-test failed: a row of a matrix product has other bits" in printed
    assert " passed" in printed
