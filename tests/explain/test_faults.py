"""Injected faults are named first. `python -m tests.explain.collection` runs all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.explain.collection import run_fault
from tests.explain.faults import FAULTS, Fault
from tests.explain.held_out import HELD_OUT

IN_CI = (
    "update_was_skipped", "one_of_two_workers_is_stale", "one_tensor_is_stale",
    "prefix_cache_outlives_an_update", "adapter_is_not_applied", "numbers_are_raw",
    "engine_divides_by_another_temperature", "top_p_is_a_default_of_the_server",
    "a_token_is_banned", "choices_are_matched_by_position", "trainer_does_not_shift_its_labels",
    "weights_are_rounded_to_bf16", "engine_routes_otherwise",
)  # fmt: skip
"""One of each kind: all of them take ten minutes."""
pytestmark = pytest.mark.close_arithmetic(
    "the reference of an explanation is close where this machine is; its band allows for that"
)


@pytest.mark.failure_mode("F78")
@pytest.mark.parametrize("fault", [f for f in FAULTS if f.name in IN_CI], ids=lambda f: f.name)
def test_an_injected_fault_is_named_first(fault: object, tmp_path: Path) -> None:
    verdict = run_fault(fault, tmp_path)  # type: ignore[arg-type]
    assert verdict.cause in fault.causes, "\n".join(verdict.lines())  # type: ignore[attr-defined]
    assert fault.where in verdict.causes[0].location  # type: ignore[attr-defined]
    assert verdict.causes[0].evidence.mean_after < verdict.causes[0].evidence.mean_before / 2


@pytest.mark.parametrize("fault", HELD_OUT[1:3], ids=lambda f: f.name)
def test_a_fault_of_one_worker_is_named_with_the_worker(fault: Fault, tmp_path: Path) -> None:
    verdict = run_fault(fault, tmp_path)
    assert verdict.cause in fault.causes, "\n".join(verdict.lines())
    assert verdict.causes[0].location.startswith("worker w1")


def test_every_fault_of_the_list_for_ci_exists() -> None:
    assert set(IN_CI) <= {fault.name for fault in FAULTS}
