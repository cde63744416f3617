"""The docs site in a browser: its search also works when the pages are opened from a disk."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built into a directory of its own."""
    directory = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(directory)],
        cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    return directory


def test_search_finds_pages_when_the_site_is_opened_from_a_disk(
    new_page: Callable[..., Any], site: Path
) -> None:
    page = new_page()
    page.goto(f"{(site / 'quickstart' / 'agents.html').as_uri()}?q=quarantine")
    page.wait_for_selector(".md-search-result__item")
    titles = page.locator(".md-search-result__item h1").all_inner_texts()
    assert "The fleet" in titles


def test_code_blocks_fit_the_page(new_page: Callable[..., Any], site: Path) -> None:
    page = new_page()
    for name in ("agents", "tinker", "scale"):
        page.goto((site / f"{name}.html").as_uri())
        overflow = page.evaluate(
            "[...document.querySelectorAll('pre > code')]"
            ".map((code) => code.scrollWidth - code.clientWidth)"
        )
        assert overflow, f"{name} has no code block"
        assert max(overflow) <= 1, f"{name}: a code block is {max(overflow)} px wider than its box"
