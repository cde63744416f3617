"""A torch without MKL, as on ARM: the engine starts, proves its arithmetic, and says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.engine.numerics import mkl
from tests.engine.machine import SELF_TEST, child

WITHOUT_MKL = """
import sys, torch
installed, torch.__file__ = torch.__file__, sys.argv.pop()
from lockstep.engine.numerics import mkl
assert mkl.mode() == mkl.ABSENT  # the library is looked up once
torch.__file__ = installed
"""
MODES = """
import os, json
from lockstep.engine.numerics import mkl_choice, plan
from lockstep.tokens.numerics import PORTABLE_ENVIRONMENT
print(json.dumps({
    "preferred": mkl_choice.preferred_mode(), "reproducible": plan.make_reproducible(),
    "variable": os.environ.get(mkl.VARIABLE), "strict": mkl.set_mode(mkl.STRICT),
    "offers_strict": mkl.offers_strict(), "portable": plan.why_not_portable(),
}))
"""


@pytest.fixture
def torch_without_mkl(tmp_path: Path) -> str:
    """The path of a torch package whose library for the CPU has none of MKL's symbols."""
    libraries = tmp_path / "torch" / "lib"
    libraries.mkdir(parents=True)
    installed = Path(torch.__file__).parent / "lib"
    library = next(path for path in sorted(installed.iterdir()) if path.name.startswith("libc10."))
    (libraries / f"libtorch_cpu{library.suffix}").symlink_to(library)
    return str(tmp_path / "torch" / "__init__.py")


def run_without_mkl(code: str, package: str, *arguments: str) -> dict[str, Any]:
    """Return what the code prints, as JSON, in a process whose torch has no MKL."""
    process = child(WITHOUT_MKL + code, *arguments, package)
    assert process.returncode == 0, process.stderr
    printed: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return printed


@pytest.mark.failure_mode("F65")
@pytest.mark.close_arithmetic("MKL in its default mode is not exact on every CPU")
def test_an_engine_without_mkl_proves_its_arithmetic_and_its_plan_says_so(
    torch_without_mkl: str,
) -> None:
    report = run_without_mkl(SELF_TEST, torch_without_mkl, "tiny", "auto")
    assert report["mkl"] == mkl.ABSENT
    assert report["checks"][0] == "engine"
    if report["exact"]:
        assert len(report["checks"]) == 9, "four numbers of threads, autograd on and off"
        assert (report["arithmetic"], report["reason"]) == ("exact", "")
    else:
        assert (report["arithmetic"], report["reason"]) == ("close", report["problem"])
        assert report["problem"]


def test_no_mode_is_chosen_or_set_without_mkl(torch_without_mkl: str) -> None:
    modes = run_without_mkl(MODES, torch_without_mkl)
    assert modes["preferred"] is None
    assert modes["variable"] is None, "children must not be given a mode"
    assert modes["reproducible"] is True
    assert (modes["strict"], modes["offers_strict"]) == (False, False)
    assert "MKL computes in mode absent" in modes["portable"]
