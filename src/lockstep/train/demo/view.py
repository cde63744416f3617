"""A training run on the terminal: a live panel, or plain lines without a terminal."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import monotonic
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep.run_record import Row, describe, figure

BLOCKS = "▁▂▃▄▅▆▇█"
WIDEST = 100
SHOWN_EVENTS = 4
STATES = {"serving": "green", "quarantined": "red", "down": "red"}


class RunView:
    """Shows steps, workers and events while the block runs. Feed it from one thread."""

    def __init__(self, console: Console, title: str, steps: int) -> None:
        self.console = console
        self._title = title
        self._steps = steps
        self._rows: list[Row] = []
        self._workers: list[Row] = []
        self._events: deque[tuple[float, str, str]] = deque(maxlen=SHOWN_EVENTS)
        self._phase = "starting"
        self._close = False
        self._begun = monotonic()
        self._live = (
            Live(get_renderable=self.render, console=console, refresh_per_second=4)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> RunView:
        if self._live is not None:
            self._live.start()
        else:
            self._print(self._title)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def phase(self, doing: str) -> None:
        """Show what happens between steps."""
        self._phase = doing
        if self._live is None:
            self._print(doing)

    def step(self, metrics: Row) -> None:
        """Show a step, a row of metrics.jsonl."""
        self._rows.append(metrics)
        self._phase = "training"
        self.workers(metrics.get("workers") or self._workers)
        if self._live is None:
            self._print(step_line(metrics, self._steps))

    def workers(self, workers: Sequence[Row]) -> None:
        """Set what each worker serves: rows with id, version and state."""
        self._workers = list(workers)

    def event(self, event: Row) -> None:
        """Show an event, a row of events.jsonl."""
        if event["kind"] == "numerics":
            self._close = event["mode"] == "close"
        colour = {"worker_killed": "red", "worker_lost": "red", "worker_back": "green",
                  "skipped": "yellow"}  # fmt: skip
        self._events.append(
            (monotonic() - self._begun, describe(event), colour.get(event["kind"], "default"))
        )
        if self._live is None:
            self._print(f"  {monotonic() - self._begun:5.1f} s  {describe(event)}")

    def render(self) -> Panel:
        """Return the current panel."""
        step = self._rows[-1]["step"] if self._rows else 0
        parts: list[RenderableType] = [self._progress(step)]
        if self._rows:
            parts += [Text(), self._curve(), Text(), self._figures(), self._times()]
        if self._workers:
            parts += [Text(), self._worker_line()]
        if self._events:
            lines = [Text(f"{at:5.1f} s  {event}", colour) for at, event, colour in self._events]
            parts += [Text(), *lines]
        width = min(self.console.width, WIDEST)
        return Panel(Group(*parts), title=escape(self._title), border_style="cyan", width=width)

    def _progress(self, step: int) -> Table:
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(justify="right", no_wrap=True)
        bar = ProgressBar(total=self._steps, completed=step, complete_style="cyan")
        taken = f"{monotonic() - self._begun:.0f} s"
        grid.add_row(f"step {step} of {self._steps}", bar, f"{self._phase}, {taken}")
        return grid

    def _curve(self) -> Table:
        rewards = [float(row["reward"]) for row in self._rows]
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True)
        width = min(self.console.width, WIDEST) - 46
        line = Text(sparkline(rewards, max(8, width)), "bold cyan")
        solved = f"solved {float(self._rows[-1]['solved']):.0%}"
        grid.add_row("[b]reward", line, f"{rewards[0]:.2f} → [b]{rewards[-1]:.2f}[/]", solved)
        return grid

    def _figures(self) -> Table:
        rows, last = self._rows, self._rows[-1]
        kl = max(float(row["mismatch_kl"]) for row in rows)
        unequal = sum(int(row.get("unequal_logprobs", kl > 0)) for row in rows)
        compared = sum(int(row.get("compared_logprobs", 0)) for row in rows)
        masked = max(float(row["is_masked"]) for row in rows)
        breaks = sum(int(row["breaks"]) for row in rows)
        aborts = sum(int(row["aborts"]) for row in rows)
        grid = Table.grid(padding=(0, 3))
        for _ in range(6):
            grid.add_column(no_wrap=True)
        names = ("tokens/s", "mismatch_kl", "masked", "breaks", "aborts", "pause")
        grid.add_row(*(f"[dim]{name}" for name in names))
        grid.add_row(
            f"[b]{last['tokens_per_second']:,.0f}",
            f"[b]close {figure(kl)}"
            if self._close
            else _verdict(
                unequal, f"exactly 0, {compared:,} tokens" if not unequal else figure(kl)
            ),
            _verdict(masked, f"{masked:.2%}" if masked else "0"),
            _verdict(breaks, str(breaks)),
            f"[b]{aborts}",
            f"[b]{float(last['pause_seconds']) * 1e3:.1f} ms",
        )
        return grid

    def _times(self) -> Text:
        return Text(f"{times(self._rows[-1])}; now {self._rows[-1]['version']}", "dim")

    def _worker_line(self) -> Text:
        line = Text()
        line.append("workers  ", "dim")
        for worker in self._workers:
            state = str(worker["state"])
            colour = STATES.get(state, "yellow")
            line.append(f"● {worker['id']} ", colour)
            line.append(f"{worker['version'] or '?'}", "bold")
            line.append(f" {state}   ", "dim" if state == "serving" else colour)
        line.overflow, line.no_wrap = "ellipsis", True
        return line

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the newest `width` values as blocks: the lowest is 0, the highest 1 or the maximum."""
    top = max([1.0, *values])
    scaled = (max(0.0, value) / top * (len(BLOCKS) - 1) for value in values[-width:])
    return "".join(BLOCKS[round(value)] for value in scaled)


def step_line(row: Row, steps: int) -> str:
    """Return a step as one line of less than 80 columns."""
    workers = row.get("workers", ())
    serving = sum(worker["state"] == "serving" for worker in workers)
    return (
        f"step {row['step']:>3}/{steps}  reward {row['reward']:.2f}  solved {row['solved']:.2f}  "
        f"kl {figure(float(row['mismatch_kl']))}  breaks {row['breaks']}  "
        f"{row['time/step']:.2f} s  {row['version']} on {serving}/{len(workers)}"
    )


def times(row: Row) -> str:
    """Return the durations of the phases of a step."""
    parts = [
        f"{name} {float(row[key]):.2f}"
        for name in ("rollout", "train", "save", "update")
        if (key := f"time/{name}") in row
    ]
    return f"step {float(row['time/step']):.2f} s: {', '.join(parts)}"


def _verdict(bad: Any, text: str) -> str:
    return f"[b {'red' if bad else 'green'}]{text}"
