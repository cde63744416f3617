"""Prints the package at a glance: folders, modules, lines, and which folder imports which.

python scripts/package_map.py            the table
python scripts/package_map.py --write    puts the graph into CONTRIBUTING.md
python scripts/package_map.py --check    fails when that graph is not the one of the code
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "lockstep"
DOCUMENT = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- package map: begin -->", "<!-- package map: end -->"
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
LAYERS = [layer.split(" | ") for layer in CONTRACTS["contracts"][0]["layers"]]
"""From top to bottom, from the import contract "imports only go down", which lists all packages."""


def folder_of(path: Path) -> str:
    """The folder of the package that a file belongs to, "" for the package itself."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def folder_of_module(name: str) -> str | None:
    """The folder that a dotted name of this package belongs to."""
    parts = name.split(".")
    if parts[0] != "lockstep":
        return None
    folder = parts[1] if len(parts) > 1 else ""
    return folder if (PACKAGE / folder).is_dir() else ""


def imports(path: Path) -> set[str]:
    """The folders that a module imports from, also those that it imports when it is called."""
    folders = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        folders |= {folder for name in names if (folder := folder_of_module(name))}
    return folders


def table() -> list[tuple[str, int, int, int, int]]:
    """For each folder: its modules, its lines, its longest module, most modules in one folder."""
    rows = []
    files = sorted(PACKAGE.rglob("*.py"))
    for folder in sorted({folder_of(path) for path in files}):
        own = [path for path in files if folder_of(path) == folder]
        lines = [len(path.read_text("utf-8").splitlines()) for path in own]
        crowd = Counter(path.parent for path in own if path.name != "__init__.py")
        rows.append((folder, len(own), sum(lines), max(lines), max(crowd.values(), default=0)))
    return rows


def edges() -> Counter[tuple[str, str]]:
    """How many modules of one folder import from another."""
    counts: Counter[tuple[str, str]] = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        here = folder_of(path)
        counts.update((here, there) for there in imports(path) if there != here and here)
    return counts


def graph() -> str:
    """The folders and their imports as a mermaid graph, in the order of the layers.

    It holds no figures: it is compared with the document, and would differ after every commit.
    """
    lines = ["```mermaid", "graph TD"]
    folders = [name for layer in LAYERS for name in layer if (PACKAGE / name).is_dir()]
    lines += [f"    {folder}" for folder in folders]
    order = {folder: at for at, folder in enumerate(folders)}
    pairs = list(edges())
    for here, there in sorted(pairs, key=lambda pair: (order[pair[0]], order[pair[1]])):
        lines.append(f"    {here} --> {there}")
    return "\n".join([*lines, "```"])


def shown() -> str:
    """The table as people read it in a terminal."""
    rows = table()
    lines = [f"{'folder':<14}{'modules':>8}{'lines':>8}{'longest':>9}{'most in one folder':>20}"]
    for folder, modules, size, longest, crowd in rows:
        lines.append(f"{folder or '(top)':<14}{modules:>8}{size:>8}{longest:>9}{crowd:>20}")
    total = f"{sum(row[1] for row in rows):>8}{sum(row[2] for row in rows):>8}"
    lines += [f"{'all':<14}{total}", "", "imports (modules of the first that import the second):"]
    counts = edges()
    for folder in sorted({here for here, _ in counts}):
        to = [(there, n) for (here, there), n in counts.items() if here == folder]
        names = ", ".join(f"{there} {n}" for there, n in sorted(to, key=lambda one: -one[1]))
        lines.append(f"  {folder:<12} -> {names}")
    return "\n".join(lines)


def document(text: str) -> str:
    """The document with the graph of the code between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{graph()}\n{END}{after}"


def main(arguments: list[str]) -> int:
    """Returns the exit code: 1 where `--check` finds another graph."""
    if not arguments:
        print(shown())
        return 0
    text = DOCUMENT.read_text("utf-8")
    new = document(text)
    if arguments == ["--write"]:
        DOCUMENT.write_text(new, "utf-8")
    elif arguments == ["--check"]:
        if new != text:
            print(f"{DOCUMENT.name} shows another package: run scripts/package_map.py --write")
            return 1
        folders = {row[0] for row in table()} - {""}
        if missing := sorted(name for name in folders if f"| `{name}/` |" not in text):
            print(f"{DOCUMENT.name} has no line in its table of folders for {', '.join(missing)}")
            return 1
    else:
        print(f"unknown arguments {arguments}: expected none, --write or --check")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
