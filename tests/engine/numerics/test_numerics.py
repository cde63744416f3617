"""How a process computes: MKL's mode, the plan that processes compare, and portable bits."""

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
from lockstep.tokens.numerics import PORTABLE_ENVIRONMENT
from tests.engine.machine import child, self_test
from tests.engine.rig import Rig

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
REPRODUCIBLE = (
    "from lockstep.engine.numerics import mkl, plan; import os; plan.make_reproducible(); "
)
MODE = REPRODUCIBLE + "print(mkl.mode())"


@pytest.mark.usefixtures("requires_exact")
def test_the_engines_plan_is_the_trainers(tiny: Path, moe: Path) -> None:
    for directory in (tiny, moe):
        plan, own = Rig(directory).core.plan, exact.own_plan(directory)
        assert plan == own
        exact.check_plan(plan, own)
        assert msgspec.convert(json.loads(json.dumps(plan.to_json())), type(plan)) == plan


@pytest.mark.usefixtures("requires_exact")
@pytest.mark.failure_mode("F70")
def test_a_worker_that_computes_other_bits_is_named_before_the_first_step(tiny: Path) -> None:
    own = exact.own_plan(tiny)
    there = replace(own, fingerprint="0" * 16, isa="AVX2", mkl="OFF")
    with pytest.raises(NotExact, match=r"isa .*'AVX2' there") as raised:
        exact.check_plan(there, replace(own, arithmetic="exact", reason=""))
    assert "portable" in raised.value.message


@pytest.mark.failure_mode("F70")
def test_the_bits_of_another_cpu_have_another_fingerprint() -> None:
    plain, other = self_test("tiny"), self_test("tiny", ATEN_CPU_CAPABILITY="default")
    assert plain["fingerprint"] != other["fingerprint"]


def test_a_fingerprint_does_not_depend_on_threads() -> None:
    numerics.fingerprint.cache_clear()
    with threads(3):
        many = numerics.fingerprint()
    numerics.fingerprint.cache_clear()
    assert numerics.fingerprint() == many


def test_mkl_is_made_strict_where_it_promises_to_be() -> None:
    if mkl_choice.vendor() != "GenuineIntel" or not mkl.offers_strict():
        pytest.skip(f"MKL promises no strict mode on {mkl_choice.vendor()}")
    assert child(MODE).stdout.strip() == mkl.STRICT
    assert child(MODE, MKL_CBWR="AVX2").stdout.strip() == "AVX2", "a user's choice is kept"
    assert child(MODE, MKL_ENABLE_INSTRUCTIONS="SSE4_2").stdout.strip() == "OFF"


def test_children_inherit_the_mode() -> None:
    process = child(REPRODUCIBLE + "print(os.environ.get('MKL_CBWR', 'OFF'))")
    assert process.stdout.strip() == child(MODE).stdout.strip()


def test_on_another_make_the_modes_are_tried_once_and_the_answer_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(mkl_choice, "vendor", lambda: "AuthenticAMD")
    tried = []

    def multiples(mode: str) -> int:
        tried.append(mode)
        return {"OFF": 8, mkl.STRICT: 4}[mode]

    monkeypatch.setattr(mkl_choice, "_tried", multiples)
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
def test_the_mode_that_holds_for_few_rows_is_taken(
    multiples: dict[str, int], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mkl_choice, "_tried", multiples.__getitem__)
    assert mkl_choice.tried_mode() == chosen


def test_a_mode_is_tried_in_a_process_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    assert mkl_choice._tried(mkl.STRICT) in (0, 4, 8, 16, 32, 64)
    assert mkl_choice._tried("no such mode") == 0
    assert "could not be tried" not in caplog.text, "0 must not be the child's failure to start"


@pytest.mark.parametrize("team", [2, 3, 7])
def test_elementwise_loops_keep_their_bits_in_any_number_of_threads(team: int) -> None:
    x = 8 * torch.randn(1100, 200)
    for function in (torch.nn.functional.silu, torch.cos, torch.sin):
        with threads(1):
            whole = function(x)
        with threads(team):
            assert torch.equal(arithmetic.in_safe_pieces(function, x), whole)


# Portable bits


SCORES = """
import json
from lockstep.engine.config import EngineOptions
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
    """They were measured on one make; where this CPU has others, the engine must say so."""
    golden = json.loads((GOLDEN / "compatible-default.json").read_text())
    forced = {"MKL_ENABLE_INSTRUCTIONS": advice} if advice else {}
    process = child(SCORES.format(arithmetic="portable"), **forced, **PORTABLE_ENVIRONMENT)
    assert process.returncode == 0, process.stderr
    plan, logprobs = json.loads(process.stdout.splitlines()[-1])
    same = logprobs == golden["logprobs_hex"]
    assert (plan["arithmetic"] == "portable") == same, (golden["cpu"], plan)
    if mkl_choice.vendor() == "GenuineIntel" and torch.__version__ == golden["torch"]:
        assert same, "the make and the torch that the golden bits come from"


@pytest.mark.parametrize("name", ["avx2strict-avx2", "compatible-avx2"])
def test_the_bits_of_one_machine_and_torch_stay_what_they_were(name: str) -> None:
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    if mkl_choice.vendor() != "GenuineIntel" or torch.__version__ != golden["torch"]:
        pytest.skip(f"golden bits of {golden['cpu']}, torch {golden['torch']}")
    process = child(SCORES.format(arithmetic="exact"), **golden["env"])
    assert json.loads(process.stdout.splitlines()[-1])[1] == golden["logprobs_hex"]


def test_portable_is_not_claimed_where_the_bits_are_others() -> None:
    environ = {**PORTABLE_ENVIRONMENT, "ATEN_CPU_CAPABILITY": "avx2"}
    report = self_test("tiny", arithmetic="portable", **environ)
    assert report["arithmetic"] == "exact"
    assert "not portable here" in report["reason"]
    assert "ATEN_CPU_CAPABILITY=default" in report["reason"]
