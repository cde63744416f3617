"""Every section of `python -m benchmarks` is a module that exists, also after a rename."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
from benchmarks.__main__ import SECTIONS


@pytest.mark.parametrize("name", SECTIONS)
def test_every_section_has_a_module_that_measures_rows(name: str) -> None:
    title, module = SECTIONS[name]
    assert title
    assert importlib.util.find_spec(f"benchmarks.{module}") is not None


def test_the_clock_of_the_demo_wraps_methods_that_exist() -> None:
    computes = importlib.import_module("benchmarks.clocked.sitecustomize").COMPUTES
    for module, (owner, methods) in computes.items():
        kind = getattr(importlib.import_module(module), owner)
        assert all(callable(getattr(kind, method)) for method in methods), module
