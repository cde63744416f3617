"""Every section of `python -m benchmarks` is a module that exists, also after a rename."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
from benchmarks.__main__ import DOCUMENT, SECTIONS, page, stored
from benchmarks.table import Row, markdown, summary


@pytest.mark.parametrize("name", SECTIONS)
def test_every_section_has_a_module_that_measures_rows(name: str) -> None:
    assert importlib.util.find_spec(f"benchmarks.{SECTIONS[name]}") is not None


def test_the_page_is_what_the_stored_results_say() -> None:
    text = DOCUMENT.read_text()
    assert page(text, stored()) == text, "run python -m benchmarks --page"


def test_the_page_opens_with_at_most_15_rows() -> None:
    rows = [row for result in stored().values() for row in result.rows]
    assert 0 < len(summary(rows).splitlines()) - 2 <= 15


@pytest.mark.parametrize(
    ("ours", "target"),
    [
        (0.9, "at most 1.00 x: met"),
        (1.09, "at most 1.00 x: **missed** by 9.0 %"),
    ],
)
def test_a_row_says_by_how_much_its_target_was_missed(ours: float, target: str) -> None:
    row = Row(what="a request", against="a peer", ours=ours, theirs=1.0, unit="ms", at_most=1.0)
    assert row.target == target
    assert f"| {target} |" in markdown([row])
    least = Row(what="turns", against="one", ours=1.53, theirs=1.0, unit="x", at_least=1.7)
    assert least.target == "at least 1.70 x: **missed** by 10.0 %"


def test_the_clock_of_the_demo_wraps_methods_that_exist() -> None:
    computes = importlib.import_module("benchmarks.clocked.sitecustomize").COMPUTES
    for module, (owner, methods) in computes.items():
        kind = getattr(importlib.import_module(module), owner)
        assert all(callable(getattr(kind, method)) for method in methods), module
