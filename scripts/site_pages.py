"""Puts pages that live elsewhere in the repository into the site, and leads links of docs/ to them.

A hook of mkdocs (see mkdocs.yml). On a code host the same links lead to the files themselves.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "src/lockstep/models/tiny/README.md": "models/tiny.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"\]\(([^)#\s]+\.md)(#[^)\s]*)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the pages that are not under docs/."""
    for source, page in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Links between docs/ and the rest of the repository become links inside the site."""
    here = page.file.src_uri
    source = next((path for path, uri in ELSEWHERE.items() if uri == here), f"docs/{here}")

    def led(match: re.Match[str]) -> str:
        if "://" in match[1]:
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        inside = ELSEWHERE.get(target) or target.removeprefix("docs/")
        relative = posixpath.relpath(inside, posixpath.dirname(here) or ".")
        return f"]({relative}{match[2] or ''})"

    return LINK.sub(led, markdown)
