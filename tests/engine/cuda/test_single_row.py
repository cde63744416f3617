"""A product that norms its one row itself, run by Triton's interpreter beside plain torch."""

from __future__ import annotations

import pytest
import torch

from lockstep.engine.cuda import single_row


@pytest.mark.parametrize(
    ("width", "splits", "biased", "gated"),
    [(100, 0, True, False), (64, 1, False, True), (48, 3, False, False), (200, 2, False, True)],
)
def test_one_row_is_added_up_normed_and_multiplied(
    width: int, splits: int, biased: bool, gated: bool
) -> None:
    torch.manual_seed(0)
    x, norm = torch.randn(1, width).half(), torch.randn(width).half()
    parts = torch.randn(splits, 1, width) if splits else None
    weight = (torch.randn(2 * 35, width) / 8).half()
    bias = torch.randn(70).half() if biased else None
    before = x.clone()
    left, out = single_row.norm_linear(x, parts, norm, weight, bias, eps=1e-6, gated=gated)
    assert torch.equal(x, before)  # programs that come later still read it
    expected_left, expected = single_row.norm_linear_reference(
        x, parts, norm, weight, bias, eps=1e-6, gated=gated
    )
    assert torch.equal(left, expected_left)
    torch.testing.assert_close(out.float(), expected.float(), rtol=2**-7, atol=2**-7)


def test_only_one_row_that_is_not_too_wide_fits() -> None:
    assert single_row.fits(torch.empty(1, single_row.WIDEST))
    assert not single_row.fits(torch.empty(1, single_row.WIDEST + 1))
    assert not single_row.fits(torch.empty(2, 8))
