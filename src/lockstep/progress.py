"""Progress display of long work on a terminal; silent without one."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Progress:
    """One line on standard error that shows the current step while the block runs.

    Without a terminal, or with `visible` false, nothing is written and rich is not imported.
    `total` makes it a bar; without one it is a spinner with the elapsed seconds.
    """

    def __init__(self, title: str, total: float | None = None, *, visible: bool = True) -> None:
        self._title = title
        self._total = total
        self._shown = visible and sys.stderr.isatty()
        self._done = 0.0

    def __enter__(self) -> Progress:
        if self._shown:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                SpinnerColumn,
                TextColumn,
                TimeElapsedColumn,
            )
            from rich.progress import Progress as Bar

            counted = [] if self._total is None else [BarColumn(), MofNCompleteColumn()]
            self._bar = Bar(
                SpinnerColumn(), TextColumn("{task.description}"), *counted, TimeElapsedColumn(),
                console=Console(stderr=True), transient=True,
            )  # fmt: skip
            self._task = self._bar.add_task(self._title, total=self._total)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Show the current step."""
        if self._shown:
            self._bar.update(
                self._task, description=f"{self._title}: {text}" if text else self._title
            )

    def advance(self, amount: float = 1.0) -> None:
        """Advance by this amount."""
        self.reach(self._done + amount)

    def reach(self, done: float) -> None:
        """Set the completed amount."""
        self._done = done
        if self._shown:
            self._bar.update(self._task, completed=done)

    def each(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the same items, counting them."""
        for count, item in enumerate(items, start=1):
            self.say(str(count)) if self._total is None else self.reach(count)
            yield item
