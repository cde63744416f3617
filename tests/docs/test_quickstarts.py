"""The pages that a newcomer reads first do what they say: every command and Python block is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import is_quickstart, pages, runnable
from tests.docs.page_runner import reading

PAGES = [page for page in pages() if is_quickstart(page) and runnable(page)]


@pytest.mark.parametrize("page", PAGES)
def test_the_page_does_what_it_says(page: str, tmp_path: Path) -> None:
    with reading(tmp_path) as reader:
        for block in runnable(page):
            reader.run(block)
