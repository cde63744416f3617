"""Output of commands: JSON for programs, tables with one line per row for people."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPED_COLUMNS = 4000
"""Columns in a pipe or a file, so that nothing is cut there."""


def print_json(value: Any) -> None:
    """Print one line of JSON and flush it: a program may wait for it."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def table_console() -> Console:
    """Return a console on standard output, as wide as its terminal or as COLUMNS says."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=PIPED_COLUMNS if piped else None, highlight=False)


def one_line_table(columns: Sequence[str], rows: Iterable[Sequence[Text | str]]) -> Table:
    """Return a table with one line per row: cells of the last column that do not fit are cut."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns[:-1]:
        table.add_column(column, no_wrap=True)
    # The only column that may shrink; its cells do not wrap, so they are cut.
    table.add_column(columns[-1])
    for row in rows:
        last = row[-1].plain if isinstance(row[-1], Text) else row[-1]
        cell = Text(" ".join(last.split()), no_wrap=True, overflow="ellipsis")
        table.add_row(*[_cell(value) for value in row[:-1]], cell)
    return table


def _cell(value: Text | str) -> Text:
    return value if isinstance(value, Text) else Text(value)
