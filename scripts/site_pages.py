"""MkDocs hook: add repository files outside docs/ to the site, and rewrite links to them.

On a code host the same links open the files themselves.
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
WORKER_SHIM = re.compile(r'<script src="https://[^"]*iframe-worker[^"]*">')
"""The script that the `offline` plugin loads from another host, replaced by docs/search_from_disk.js."""
LINK = re.compile(r"\]\(([^)#\s]+\.md)(#[^)\s]*)?\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages whose source is not under docs/."""
    for source, page in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Rewrite links between docs/ and the rest of the repository as links inside the site."""
    here = page.file.src_uri
    source = next((path for path, uri in ELSEWHERE.items() if uri == here), f"docs/{here}")

    def rewrite(match: re.Match[str]) -> str:
        if "://" in match[1]:
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        inside = ELSEWHERE.get(target) or target.removeprefix("docs/")
        relative = posixpath.relpath(inside, posixpath.dirname(here) or ".")
        return f"]({relative}{match[2] or ''})"

    return LINK.sub(rewrite, markdown)


def on_post_template(output: str, *, template_name: str, config: Any) -> str:
    """Load no script from another host on pages without Markdown, such as 404.html."""
    return _local_shim(output, "/")


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Load no script from another host."""
    return _local_shim(output, "../" * page.url.count("/"))


def _local_shim(html: str, root: str) -> str:
    return WORKER_SHIM.sub(f'<script src="{root}search_from_disk.js">', html)
