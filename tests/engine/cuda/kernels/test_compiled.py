"""Properties of exact kernels compiled for Hopper, which the interpreter cannot show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.cuda.kernels.fitted import LIMITS

STACK = 64
"""Bytes that a version of the compiler may keep outside of registers: a tile that is too large has
a thousand."""


def test_every_dot_takes_its_terms_in_the_same_order(tmp_path: Path) -> None:
    """If a thread holds four neighbouring terms instead of two, the matrix units sum them in
    another order: the attention of a token differed from that of a prompt in one of 50,000 values.
    """
    found = compiled(tmp_path)
    assert len(found) == 6
    for name, widths in found.items():
        assert set(widths) == {"2"}, (name, widths)


def test_products_in_fp32_are_chains_that_fit_in_registers(tmp_path: Path) -> None:
    """Matrix instructions would round to TF32. Sums in fp64, rounded here, have the compiler's
    order."""
    found = compiled(tmp_path, "fp32")
    assert len(found) == 11
    for name, (instructions, stack) in found.items():
        product = "fma.rn.f32" if name != "heads" else "add.rn.f32"
        assert product in instructions, (name, instructions)
        assert set(instructions) <= {"fma.rn.f32", "mul.rn.f32", "add.rn.f32"}, name
        assert stack <= STACK, (name, stack)


def test_a_norm_in_fp32_has_one_order_of_its_sum(tmp_path: Path) -> None:
    """A trainer's norm adds one part, an engine's as many as a product has."""
    (first, *others) = compiled(tmp_path, "norms").values()
    assert len(first) == 1
    assert len(others) == 2
    assert all(each == first for each in others), (first, others)


@pytest.mark.parametrize(
    ("capability", "arithmetic"), [(80, "close"), (89, "close"), (89, "exact"), (90, "close")]
)
def test_every_kernel_fits_on_gpus_before_hopper(
    tmp_path: Path, capability: int, arithmetic: str
) -> None:
    """A step that needed twice the shared memory of an A100 crashed a worker during warm-up."""
    found = compiled(tmp_path, str(capability), arithmetic, program="fitted")
    assert {"close": "close_kernels._linear", "exact": "exact_kernels._linear"}[arithmetic] in found
    for name, (needs, rows) in found.items():
        assert needs <= LIMITS[capability], (name, rows)


def compiled(tmp_path: Path, *arguments: str, program: str = "compiled") -> dict[str, Any]:
    """Return what the program prints about each kernel."""
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    run = subprocess.run(
        [sys.executable, "-m", f"tests.engine.cuda.kernels.{program}", *arguments],
        cwd=Path(__file__).parents[4],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return dict(json.loads(line) for line in run.stdout.splitlines())
