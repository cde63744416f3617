"""Progress of long work on a terminal; nothing where there is none."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")


class Progress:
    """One line on standard error that says what goes on, while the block runs.

    Without a terminal, or when it is not `shown`, nothing is written, and rich is not imported.
    `total` makes it a bar; without one it is a spinner with the seconds since it began.
    """

    def __init__(self, title: str, total: float | None = None, *, shown: bool = True) -> None:
        self._title = title
        self._total = total
        self._shown = shown and sys.stderr.isatty()
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

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        if self._shown:
            self._bar.stop()

    def say(self, text: str) -> None:
        """What goes on now."""
        if self._shown:
            self._bar.update(
                self._task, description=f"{self._title}: {text}" if text else self._title
            )

    def advance(self, amount: float = 1.0) -> None:
        """So much more is done."""
        self.reach(self._done + amount)

    def reach(self, done: float) -> None:
        """So much is done in all."""
        self._done = done
        if self._shown:
            self._bar.update(self._task, completed=done)

    def each(self, items: Iterable[T]) -> Iterator[T]:
        """The same items, counted as they pass."""
        for count, item in enumerate(items, start=1):
            self.say(str(count)) if self._total is None else self.reach(count)
            yield item
