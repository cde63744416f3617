"""Reject phrasings that the style guide rules out, in docstrings, comments and names of src/.

python scripts/prose.py            print every violation and fail if there is one

A line that must keep its wording ends in `# prose: allow`.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALLOW = "# prose: allow"
OPENING = re.compile(r"(?:^|[.:] )(Of|Whoever|Nobody|Somebody|Everybody|Those who|What those)\b|^(What|Has|Who)\b(?!.*\?)")
PERSON = re.compile(r"\b(whoever|somebody|nobody|everybody|(?:is|are|was|were|be) told|has come|is had)\b", re.I)
PARTICIPLES = {"asked", "each", "found", "given", "kept", "known", "one", "said", "shown", "told"}
"""Words that do not name a value; `seen`, `done` and `chosen` are common idioms and stay."""


def prose(path: Path, source: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and text of every docstring and comment sentence start."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = getattr(statement, "value", None)
            if isinstance(statement, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield from enumerate(value.value.splitlines(), statement.lineno)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def names(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and name of every assigned variable, parameter and loop variable."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def main() -> int:
    failures = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        source = path.read_text("utf-8")
        lines = source.splitlines()
        bad = [(at, text.strip()) for at, text in prose(path, source) if OPENING.search(text.strip()) or PERSON.search(text)]
        bad += [(at, f"variable `{name}`") for at, name in names(source) if name in PARTICIPLES]
        failures += [f"{path.relative_to(ROOT)}:{at}: {text}" for at, text in bad if ALLOW not in lines[at - 1]]
    print("\n".join(failures) or "no phrasing that the style guide rules out")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
