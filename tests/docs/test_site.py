"""The site builds from docs/, refuses broken links, and fetches nothing from elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

FETCHED = re.compile(r"<(?:script|img|link)[^>]* (?:src|href)=\"?(?:https?:)?//[^\s>\"]+")


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=root, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """What the site is made of."""
    root = tmp_path / "copy"
    for name in ("docs", "scripts", "src/lockstep/models/tiny"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("*.safetensors"))
    for name in ("mkdocs.yml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, root / name)
    return root


def test_the_site_builds_and_fetches_nothing(tmp_path: Path) -> None:
    built = build(ROOT, tmp_path)
    assert built.returncode == 0, built.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert {"install.html", "errors.html", "tiny.html", "changelog.html"} <= {p.name for p in pages}
    assert [(p.name, found) for p in pages for found in FETCHED.findall(p.read_text())] == []


def test_broken_links_and_pages_without_a_door_fail_the_build(copied: Path, tmp_path: Path) -> None:
    page = copied / "docs" / "index.md"
    page.write_text(page.read_text() + "\n[x](lost.md) [y](fleet.md#lost) ![z](lost.png)\n")
    (copied / "docs" / "forgotten.md").write_text("# Forgotten\n")
    built = build(copied, tmp_path / "site")
    assert built.returncode == 1
    warned = built.stderr.split("WARNING")
    for broken in ("'lost.md'", "'fleet.md#lost'", "'lost.png'", "forgotten.md"):
        # Up to the next level: what is only told would not fail the build by itself.
        assert any(broken in each.split("INFO")[0] for each in warned[1:]), broken
