"""Tests that rest on undeclared close arithmetic fail, wherever an engine or trainer fell back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
SELF_TESTS = ROOT / "tests" / "engine" / "numerics" / "test_selftest.py"
MARKER = re.compile(r"^@pytest\.mark\.close_arithmetic\(.*\)\n", re.M)
CONFTEST = """
pytest_plugins = ["tests.exactness.guard"]
from tests.engine.conftest import *
"""
CONFIG = """
[pytest]
addopts = -q --strict-markers -p no:cacheprovider
asyncio_default_fixture_loop_scope = function
markers = failure_mode(id): a failure mode
"""
BROKEN_ENGINE = """
import subprocess, sys
import pytest
from lockstep.engine import exact
from lockstep.engine.model import arithmetic
from tests.engine.rig import Rig

CHILD = '''
from lockstep.engine.numerics import trainer_path
from lockstep.models import bundled
from tests.engine.rig import Rig
right = trainer_path.segment_attention
trainer_path.segment_attention = lambda *arguments: right(*arguments) * (1 + 2.0**-20)
Rig(bundled("tiny"))
'''

def fall_back(directory, **options):
    right = arithmetic.exact_attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            arithmetic, "exact_attention",
            lambda q, *rest: right(q, *rest) * (1 + q.shape[2] * 2.0**-22),
        )
        return Rig(directory, **options)
"""
UNDECLARED = """
def test_in_the_test(tiny):
    fall_back(tiny)

def test_in_a_child():
    subprocess.run([sys.executable, "-c", CHILD], check=True)

def test_in_a_trainer(tiny, monkeypatch):
    from tests.engine.checkpoints import trainer
    model = trainer(tiny)
    monkeypatch.setattr(exact, "why_unfit", lambda *_: "rows differ")
    exact.prepare(model, strict=False)

def test_in_the_plan_of_a_trainer(tiny, monkeypatch):
    monkeypatch.setattr(exact, "why_unfit", lambda *_: "rows differ")
    assert not exact.own_plan(tiny).is_exact

@pytest.fixture(scope="module")
def engine(tiny):
    return fall_back(tiny)

def test_in_a_fixture(engine):
    pass

def test_in_a_fixture_of_an_earlier_test(engine):
    pass

def test_that_fails_itself(engine):
    assert engine.core.plan.is_exact
"""
DECLARED = """
def test_without_a_fallback(tiny):
    assert Rig(tiny).core.plan.is_exact

@pytest.mark.parametrize("options", [{"arithmetic": "close"}, {"dtype": "bfloat16"}])
def test_where_close_was_requested_or_exact_is_not_offered(tiny, options):
    assert not fall_back(tiny, **options).core.plan.is_exact

@pytest.fixture(scope="module")
def engine(tiny):
    return fall_back(tiny)

@pytest.mark.close_arithmetic("the fixture replaces attention")
def test_in_a_fixture(engine):
    assert not engine.core.plan.is_exact

def test_beside_a_fixture_that_it_does_not_use(tiny):
    Rig(tiny)

@pytest.mark.close_arithmetic("the child replaces attention")
def test_in_a_child():
    subprocess.run([sys.executable, "-c", CHILD], check=True)

@pytest.mark.exact_arithmetic
def test_that_needs_exact_arithmetic(tiny):
    assert Rig(tiny).core.plan.is_exact
"""
ANY_MACHINE = """
@pytest.mark.exact_arithmetic
@pytest.mark.parametrize("number", [1, 2, 3])
def test_that_needs_exact_arithmetic(number):
    raise AssertionError("it must not run")

def test_of_any_machine(tiny):
    assert not Rig(tiny).core.plan.is_exact

def test_of_any_machine_in_a_child():
    code = "from lockstep.engine.numerics import selftest; print(selftest.run('tiny').problem)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "a row of a matrix product has other bits" in child.stdout

def test_of_any_machine_that_trains(tiny):
    assert not exact.own_plan(tiny).is_exact
"""
REASON = "no exact arithmetic here: the self-test failed: a row of a matrix product has other bits"


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder of tests under the guard, with the fixtures of the engine's tests."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("TESTS_FALLBACKS")
    monkeypatch.delenv("TESTS_NO_EXACT", raising=False)
    pytester.makeconftest(CONFTEST)
    pytester.makeini(CONFIG)
    return pytester


@pytest.mark.exact_arithmetic
def test_an_undeclared_fallback_fails_the_test_with_its_reason(project: pytest.Pytester) -> None:
    project.makepyfile(BROKEN_ENGINE + UNDECLARED)
    result = project.runpytest_subprocess()
    result.assert_outcomes(failed=7)
    result.stdout.re_match_lines_random([
        r"the test fell back to close arithmetic: logits differ by up to .* companions",
        r"the test fell back .* in process \d+: logits differ .* between engine and trainer",
        r"the test fell back to close arithmetic: exact arithmetic does not hold .* rows differ",
        r"the module fixture 'engine', which the test uses, fell back .*: logits differ",
        r".*declare with @pytest\.mark\.close_arithmetic\(\"reason\"\) why it is not",
        r"-+ Captured arithmetic call -+",
    ])  # fmt: skip
    # Where CI is set, pytest repeats whole messages in its summary.
    shown = result.stdout.str().partition("short test summary info")[0]
    assert shown.count("the module fixture 'engine'") == 3, "once for each test that uses it"
    assert shown.count("declare with") == 6, "a test that fails itself keeps its own message"


@pytest.mark.exact_arithmetic
def test_declared_and_requested_close_arithmetic_passes(project: pytest.Pytester) -> None:
    project.makepyfile(BROKEN_ENGINE + DECLARED)
    project.runpytest_subprocess().assert_outcomes(passed=7)


@pytest.mark.exact_arithmetic
def test_removing_a_marker_makes_the_guard_fail_the_test(project: pytest.Pytester) -> None:
    text = SELF_TESTS.read_text()
    assert len(MARKER.findall(text)) == 2
    project.makepyfile(test_declared=text, test_undeclared=MARKER.sub("", text))
    result = project.runpytest_subprocess("-k", "falls_back or trainer_with_other_bits")
    result.assert_outcomes(passed=3, failed=3)
    assert result.stdout.str().count("FAILED test_undeclared.py") == 3


def test_a_machine_without_exact_arithmetic_skips_what_needs_it(project: pytest.Pytester) -> None:
    project.makepyfile(BROKEN_ENGINE + ANY_MACHINE)
    result = project.runpytest_subprocess("--no-exact")
    result.assert_outcomes(passed=3, skipped=3)
    result.stdout.fnmatch_lines([f"3 exact-only tests skipped: {REASON}*"])


def test_a_marker_without_a_reason_is_an_error(project: pytest.Pytester) -> None:
    project.makepyfile("import pytest\n@pytest.mark.close_arithmetic\ndef test_it(): pass")
    result = project.runpytest_subprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*::test_it: close_arithmetic has no reason: write*"])
