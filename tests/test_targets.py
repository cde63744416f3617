"""Every test is run by one make target, and CI runs every target."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]


def files_below(path: str) -> set[str]:
    place = ROOT / path
    files = [place] if place.is_file() else place.rglob("test_*.py")
    return {str(each.relative_to(ROOT)) for each in files}


def files_of(target: str) -> set[str]:
    """The test files that pytest is given by a target."""
    done = ("make", "--dry-run", "--old-file=.venv/.ready", target)
    shown = subprocess.run(done, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in shown.splitlines() if "/pytest " in line]
    words = shlex.split(line.partition("/pytest ")[2])
    paths = [word for word in words if word.startswith("tests")] or ["tests"]
    ignored = [word.removeprefix("--ignore=") for word in words if word.startswith("--ignore=")]
    return {file for path in paths for file in files_below(path)} - {
        file for path in ignored for file in files_below(path)
    }


def targets_of_ci() -> list[str]:
    return re.findall(r"^(?:within|beside) \d+ (test\S*)", (ROOT / ".ci" / "run").read_text(), re.M)


def test_every_test_is_run_once_by_ci() -> None:
    counted = Counter(file for target in targets_of_ci() for file in files_of(target))
    assert set(counted) == files_below("tests")
    assert [file for file, times in counted.items() if times > 1] == []


def test_contributing_names_every_target() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text()
    assert [target for target in targets_of_ci() if f"`make {target}`" not in table] == []
