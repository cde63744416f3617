"""Blocks of the documentation that need a real engine do what their page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, pages, runnable
from tests.docs.page_runner import reading
from tests.engines.vllm_servers import Slot

pytestmark = pytest.mark.timeout(900)
CASES = [
    (page, engine) for engine in ("vllm", "dynamo") for page in pages() if runnable(page, engine)
]


@pytest.mark.parametrize(("page", "engine"), CASES)
def test_the_page_does_what_it_says(
    page: str, engine: str, tmp_path: Path, vllm_slot: Slot
) -> None:
    if not (ROOT / f".venv-{engine}").exists():
        pytest.skip(f".venv-{engine} is not there: run scripts/install-{engine}.sh")
    vllm_slot.stop()  # its memory is needed
    with reading(tmp_path) as reader:
        for block in runnable(page, engine):
            reader.run(block)
