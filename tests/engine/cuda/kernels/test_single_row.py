"""Products that norm their single row, run by Triton's interpreter and compared with plain
torch."""

from __future__ import annotations

import pytest
import torch

from lockstep.engine.cuda.kernels import exact_kernels, single_row
from tests.engine.cuda.kernels import references

pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_kernels, "PART", 64)
    torch.manual_seed(0)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("width", "splits", "biased", "gated"),
    [(100, 0, True, False), (64, 1, False, True), (48, 3, False, False), (200, 2, False, True)],
)
def test_one_row_is_added_up_normed_and_multiplied(
    exact: bool, width: int, splits: int, biased: bool, gated: bool
) -> None:
    x, norm = torch.randn(1, width).half(), torch.randn(width).half()
    parts = torch.randn(splits, 1, width) if splits else None
    weight = (torch.randn(2 * 35, width) / 8).half()
    bias = torch.randn(70).half() if biased else None
    before = x.clone()
    left, out = single_row.norm_linear(
        x, parts, norm, weight, bias, eps=1e-6, gated=gated, exact=exact
    )
    expected_left, expected = references.norm_linear(
        x, parts, norm, weight, bias, eps=1e-6, gated=gated
    )
    assert torch.equal(x, before)  # programs that come later still read it
    # In close arithmetic the parts are not rounded before they are added.
    step = 0.0 if exact else 2**-9
    torch.testing.assert_close(left, expected_left, rtol=step, atol=step)
    torch.testing.assert_close(out.half(), expected, rtol=2**-6, atol=2**-6)


def test_only_a_single_narrow_row_of_16_bit_values_fits() -> None:
    widest = torch.empty(1, single_row.WIDEST).half()
    assert single_row.fits(widest)
    assert not single_row.fits(widest.float())
    assert not single_row.fits(torch.empty(1, single_row.WIDEST + 1).half())
    assert not single_row.fits(torch.empty(2, 8).half())
