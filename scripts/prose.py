"""Fail on phrasings that the style guide rules out, in docstrings, comments and names of src/.

A line that must keep its wording ends in `# prose: allow`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPENING = re.compile(
    r"""^(#|r?["]{3}) *(Of|What|Has|Who|Whoever|Nobody|Somebody|Those)\b(?!.*\?)"""
)
PERSON = re.compile(
    r"\b(whoever|somebody|nobody|everybody|(is|are|was|were|be) told|is had)\b", re.IGNORECASE
)
PENDING = ()
"""Folders that are not rewritten yet."""
NAMES = {"asked", "each", "found", "given", "kept", "known", "one", "said", "shown", "told"}


def prose_lines(source: str) -> Iterator[tuple[int, str]]:
    """Yield number and text of every line of a docstring, and of every comment."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield from enumerate(lines[node.lineno - 1 : node.end_lineno], node.lineno)
    yield from ((at, line) for at, line in enumerate(lines, 1) if line.lstrip().startswith("#"))


def variables(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of every parameter and assigned variable."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def main() -> int:
    failures = 0
    for path in sorted((ROOT / "src").rglob("*.py")):
        if path.relative_to(ROOT / "src" / "lockstep").parts[0] in PENDING:
            continue
        source = path.read_text("utf-8")
        lines = source.splitlines()
        found = [(at, text.strip()) for at, text in prose_lines(source)]
        found = [(at, text) for at, text in found if OPENING.match(text) or PERSON.search(text)]
        found += [(at, f"variable {name}") for at, name in variables(source) if name in NAMES]
        for at, text in sorted(found):
            if "# prose: allow" not in lines[at - 1]:
                print(f"{path.relative_to(ROOT)}:{at}: {text}")
                failures += 1
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
