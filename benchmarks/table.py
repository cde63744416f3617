"""Benchmark rows, each a ratio between Lockstep and an alternative measured in the same run.

A section writes its rows as JSON together with the commit, the date and the machine they were
measured at, so that docs/benchmarks.md can be written again without measuring.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
OURS = ("torch", "transformers", "renderers", "msgspec", "uvicorn", "httptools")
"""Packages of Lockstep's environment whose versions a result records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison: `ours` and `theirs` in `unit`, and the target for the ratio ours / theirs.

    A row without `at_most` and `at_least` has no target. `headline` is the row's text in the table
    that opens the page; rows without one are shown in their section only. `note` says in a few
    words what differs between the two sides.
    """

    what: str
    against: str
    ours: float
    theirs: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""
    headline: str = ""

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs

    @property
    def target(self) -> str:
        """The target and whether it was met: "at most 1.00 x: missed by 9 %"."""
        if self.at_most is not None:
            excess = self.ratio / self.at_most - 1
            bound = f"at most {times(self.at_most)}"
        elif self.at_least is not None:
            excess = 1 - self.ratio / self.at_least
            bound = f"at least {times(self.at_least)}"
        else:
            return ""
        return f"{bound}: " + ("met" if excess <= 0 else f"**missed** by {100 * excess:.1f} %")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The rows of one section, and where they were measured."""

    commit: str
    date: str
    machine: str
    rows: list[Row]


def times(ratio: float) -> str:
    """1.24 x, or 1/8.1 where the fraction is easier to read."""
    return f"{ratio:.2f} x" if ratio >= 0.3 else f"1/{1 / ratio:.1f}"


def figure(value: float) -> str:
    """Three significant digits: 1,234, 56.7, 0.089."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


HEADINGS = ("what", "ours", "alternative", "theirs", "unit", "ratio", "target", "note")
SUMMARY_HEADINGS = ("what", "ours", "alternative", "ratio")


def cells(row: Row) -> tuple[str, ...]:
    figures = (figure(row.ours), row.against, figure(row.theirs), row.unit, times(row.ratio))
    return (row.what, *figures, row.target, row.note)


def markdown(rows: Iterable[Row]) -> str:
    """A table of a section; without the columns that are empty in all of its rows."""
    lines = [HEADINGS, *map(cells, rows)]
    columns = [at for at in range(len(HEADINGS)) if any(line[at] for line in lines[1:])]
    return _table([tuple(line[at] for at in columns) for line in lines])


def summary(rows: Iterable[Row]) -> str:
    """The table that opens the page, of the rows with a headline."""
    lines = [SUMMARY_HEADINGS]
    for row in rows:
        if row.headline:
            ratio = times(row.ratio) + (f" (target {row.target})" if row.target else "")
            theirs = f"{figure(row.theirs)} {row.unit}, {row.against}"
            lines.append((row.headline, f"{figure(row.ours)} {row.unit}", theirs, ratio))
    return _table(lines)


def _table(lines: Sequence[tuple[str, ...]]) -> str:
    marked = [lines[0], tuple("---" for _ in lines[0]), *lines[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in marked)


def plain(rows: Iterable[Row]) -> str:
    """The same for a terminal, in columns."""
    lines = [HEADINGS, *(tuple(cell.replace("**", "") for cell in cells(row)) for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def write(rows: Sequence[Row], path: Path) -> None:
    """Write the rows as JSON, with the commit of this source tree, the date and the machine."""
    head = ("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    commit = subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip()
    result = Result(
        commit=commit, date=str(datetime.now(UTC).date()), machine=machine(), rows=list(rows)
    )
    path.write_text(json.dumps(asdict(result), indent=1, ensure_ascii=False) + "\n")


def read(path: Path) -> Result:
    fields = json.loads(path.read_text())
    return Result(**fields | {"rows": [Row(**row) for row in fields["rows"]]})


def machine() -> str:
    """This machine and the versions of Lockstep's environment."""
    versions = ", ".join(f"{name} {version(name)}" for name in OURS)
    return (
        f"{os.cpu_count()} cores of {processor()}, Linux {platform.release()}, "
        f"Python {platform.python_version()}, {versions}"
    )


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def main(section: Callable[..., list[Row]], doc: str | None, *, rounds: int | None = None) -> None:
    """The command line of one benchmark: print its rows, and write them with --json.

    With `rounds`, which is then the default of --rounds, the section is called with that number.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds)
    options = parser.parse_args()
    rows = section() if rounds is None else section(options.rounds)
    print(plain(rows))
    if options.json:
        write(rows, options.json)
