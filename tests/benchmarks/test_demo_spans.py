"""What the demo's benchmark takes for time outside engine and trainer."""

from __future__ import annotations

import pytest
from benchmarks.demo import uncovered


@pytest.mark.parametrize(
    ("spans", "outside"),
    [
        ([], 4.0),
        ([(2.0, 3.0)], 3.0),
        ([(2.0, 4.0), (3.0, 5.0)], 1.0),  # two at once count once
        ([(0.0, 2.0), (4.5, 9.0)], 2.5),  # only what lies within the step
        ([(6.0, 7.0)], 4.0),
        ([(0.0, 9.0), (2.0, 3.0)], 0.0),
    ],
)
def test_outside_is_what_no_span_covers(spans: list[tuple[float, float]], outside: float) -> None:
    assert uncovered((1.0, 5.0), spans) == pytest.approx(outside)
