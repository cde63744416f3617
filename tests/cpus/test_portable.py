"""Portable bits equal those measured once, or are not claimed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lockstep.engine.numerics import mkl_choice
from lockstep.engine.numerics.plan import PORTABLE_FINGERPRINTS
from lockstep.tokens.numerics import PORTABLE_ENVIRONMENT
from tests.engine.machine import child, self_test

pytestmark = pytest.mark.close_arithmetic("some of the CPUs played here are not exact")
GOLDEN = Path(__file__).parents[1] / "data" / "golden"
SCORES = """
import json
from lockstep.engine.options import EngineOptions
from lockstep.engine.core import Core
from lockstep.models import bundled
import torch; torch.set_num_threads(1)
core = Core(bundled("tiny"), EngineOptions(arithmetic="{arithmetic}", max_seqs=4))
lengths = ((1, 16), (2, 64), (3, 150), (4, 400))
ids = [[(i * 2654435761 + 12345 * k) % 512 for i in range(n)] for k, n in lengths]
print(json.dumps([core.plan.to_json(), [[x.hex() for x in row] for row in core.score_all(ids)]]))
"""


@pytest.mark.parametrize("advice", ["", "SSE4_2", "AVX2"])
def test_portable_bits_are_the_golden_ones(advice: str) -> None:
    """They were measured on one make. If this CPU computes others, the engine must report it."""
    golden = json.loads((GOLDEN / "compatible-default.json").read_text())
    forced = {"MKL_ENABLE_INSTRUCTIONS": advice} if advice else {}
    process = child(SCORES.format(arithmetic="portable"), **forced, **PORTABLE_ENVIRONMENT)
    assert process.returncode == 0, process.stderr
    plan, logprobs = json.loads(process.stdout.splitlines()[-1])
    same = logprobs == golden["logprobs_hex"]
    # Without a fingerprint for this torch, the engine must not claim portable bits.
    claimed = same and ".".join(torch.__version__.split(".")[:2]) in PORTABLE_FINGERPRINTS
    assert (plan["arithmetic"] == "portable") == claimed, (golden["cpu"], plan)
    if mkl_choice.vendor() == "GenuineIntel" and torch.__version__ == golden["torch"]:
        assert same, "the make and the torch that the golden bits come from"


@pytest.mark.parametrize("name", ["avx2strict-avx2", "compatible-avx2"])
def test_the_bits_of_one_machine_and_torch_do_not_change(name: str) -> None:
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    if mkl_choice.vendor() != "GenuineIntel" or torch.__version__ != golden["torch"]:
        pytest.skip(f"golden bits of {golden['cpu']}, torch {golden['torch']}")
    process = child(SCORES.format(arithmetic="exact"), **golden["env"])
    assert json.loads(process.stdout.splitlines()[-1])[1] == golden["logprobs_hex"]


def test_portable_is_not_claimed_when_the_bits_differ() -> None:
    environ = {**PORTABLE_ENVIRONMENT, "ATEN_CPU_CAPABILITY": "avx2"}
    report = self_test("tiny", arithmetic="portable", **environ)
    assert report["arithmetic"] == "exact"
    assert "not portable here" in report["reason"]
    assert "ATEN_CPU_CAPABILITY=default" in report["reason"]
