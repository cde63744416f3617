"""Adapters that would end an SGLang server are rejected before it sees them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.backends.sglang.adapter_calls import check_fused
from lockstep.models import bundled
from lockstep.tokens.errors import AdapterError
from tests.engines.vllm_models import adapter
from tests.worker.adapters import write_adapter


@pytest.mark.failure_mode("F68")
def test_an_adapter_of_half_a_fused_module_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"up_proj\..* and not gate_proj"):
        check_fused(write_adapter(tmp_path / "half"))


def test_other_adapters_are_not(tmp_path: Path) -> None:
    source = bundled("tiny")
    assert source is not None
    check_fused(adapter(source, tmp_path / "whole", seed=1))
