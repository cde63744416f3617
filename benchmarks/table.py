"""What every benchmark hands in: rows of one table, each a ratio beside a peer in the same run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison: `ours` and `theirs` in `unit`, and the ratio ours / theirs to reach.

    A row with neither bound is for information. `note` says what a reader must know to read
    the figures rightly, in a few words.
    """

    what: str
    against: str
    ours: float
    theirs: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs

    @property
    def reached(self) -> bool | None:
        """Whether the ratio lies within its bound; None without one."""
        if self.at_most is not None:
            return self.ratio <= self.at_most
        if self.at_least is not None:
            return self.ratio >= self.at_least
        return None

    @property
    def bound(self) -> str:
        if self.at_most is not None:
            return f"<= {times(self.at_most)}"
        return "" if self.at_least is None else f">= {times(self.at_least)}"


def times(ratio: float) -> str:
    """1.24 x, or 1/8.1 where the fraction is easier to read."""
    return f"{ratio:.2f} x" if ratio > 0.75 else f"1/{1 / ratio:.1f}"


def figure(value: float) -> str:
    """Three digits that matter: 1,234, 56.7, 0.089."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


HEADINGS = ("what", "ours", "against", "theirs", "unit", "ratio", "goal", "")


def cells(row: Row) -> tuple[str, ...]:
    mark = {True: "reached", False: "**missed**", None: ""}[row.reached]
    return (
        row.what,
        figure(row.ours),
        row.against,
        figure(row.theirs),
        row.unit,
        times(row.ratio),
        row.bound,
        "; ".join(part for part in (mark, row.note) if part),
    )


def markdown(rows: Iterable[Row]) -> str:
    lines = [HEADINGS, tuple("---" for _ in HEADINGS), *map(cells, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plain(rows: Iterable[Row]) -> str:
    """The same for a terminal, in columns."""
    lines = [HEADINGS, *(tuple(cell.replace("**", "") for cell in cells(row)) for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def write(rows: Sequence[Row], path: Path) -> None:
    path.write_text(json.dumps([asdict(row) for row in rows]))


def read(path: Path) -> list[Row]:
    return [Row(**fields) for fields in json.loads(path.read_text())]


def main(section: Callable[..., list[Row]], doc: str | None, *, rounds: int | None = None) -> None:
    """The command line of one benchmark: prints its rows, and writes them with --json.

    With `rounds`, which are then the default of --rounds, the section is called with so many.
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
