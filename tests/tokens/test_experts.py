"""RoutedExperts: bytes whose shape, dtype and size agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.tokens import RoutedExperts
from lockstep.tokens.errors import BadExperts

ARRAY = np.arange(24, dtype=np.uint16).reshape(4, 3, 2)


def experts(start: int = 0) -> RoutedExperts:
    return RoutedExperts(ARRAY.tobytes(), (4, 3, 2), "uint16", start)


def test_the_array_is_a_view_of_the_bytes() -> None:
    held = experts()
    assert (held.numpy() == ARRAY).all()
    assert held.numpy().dtype == np.uint16
    assert not held.numpy().flags.owndata


@pytest.mark.failure_mode("F38")
@pytest.mark.parametrize(
    ("data", "shape", "dtype", "start", "says"),
    [
        (bytes(24), (4, 3, 2), "uint16", 0, "take 48 bytes, but 24 came"),
        (bytes(25), (4, 3, 2), "uint8", 0, "take 24 bytes, but 25 came"),
        (bytes(24), (4, 3, 2), "float32", 0, "dtype 'float32'"),
        (bytes(24), (4, 6), "uint8", 0, r"expected \(rows, layers, k\)"),
        (bytes(24), (-4, -3, 2), "uint8", 0, r"expected \(rows, layers, k\)"),
        (bytes(24), (4, 3, 2), "uint8", -1, "start at row -1"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(
    data: bytes, shape: tuple[int, int, int], dtype: str, start: int, says: str
) -> None:
    with pytest.raises(BadExperts, match=says):
        RoutedExperts(data, shape, dtype, start)


@pytest.mark.failure_mode("F38")
@given(start=st.integers(0, 6), first=st.integers(0, 12), second=st.integers(0, 12))
def test_rows_are_trimmed_by_position_once_or_twice_alike(
    start: int, first: int, second: int
) -> None:
    held = experts(start)
    end = start + 4
    if not start <= first <= end:
        with pytest.raises(BadExperts, match=f"rows from {first} were requested"):
            held.from_row(first)
        return
    cut = held.from_row(first)
    assert (cut.start, cut.rows) == (first, end - first)
    assert (cut.numpy() == ARRAY[first - start :]).all()
    if first <= second <= end:
        twice = cut.from_row(second)
        assert (twice.numpy() == held.from_row(second).numpy()).all()


def test_any_buffer_will_do() -> None:
    for buffer in (bytearray(ARRAY.tobytes()), memoryview(ARRAY)):
        held = RoutedExperts(buffer, (4, 3, 2), "uint16")
        assert (held.numpy() == ARRAY).all()
        assert (held.from_row(2).numpy() == ARRAY[2:]).all()
