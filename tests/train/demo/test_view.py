"""The terminal view: a panel that fits 80 columns, or plain lines without a terminal."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from lockstep.run_record import Run
from lockstep.train.demo.view import RunView, sparkline
from tests.train.demo.test_report import write_run


def shown(run: Run, *, terminal: bool, width: int = 80) -> list[str]:
    out = StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None)
    view = RunView(console, "Lockstep demo: calc on tiny, 2 workers", len(run.steps))
    with view:
        view.phase("starting a gateway and 2 workers")
        for step in run.steps:
            view.step(step)
        for event in run.events:
            if event["kind"] != "update":
                view.event(event)
    if terminal:
        out.truncate(0)
        console.print(view.render())
    return out.getvalue().replace("\0", "").splitlines()


@pytest.mark.parametrize("width", [80, 132, 200])
def test_the_panel_fits_and_shows_every_figure(tmp_path: Path, width: int) -> None:
    run = Run.read(write_run(tmp_path, steps=40))
    lines = shown(run, terminal=True, width=width)
    assert max(map(len, lines)) <= min(width, 100)
    text = "\n".join(lines)
    for part in ("step 40 of 40", "reward", "█", "solved", "tokens/s", "mismatch_kl",
                 "exactly 0, 36,000 tokens", "masked", "breaks", "aborts", "pause", " ms",
                 "rollout", "train", "update",
                 "● w0 step-40 serving", "● w1 step-40 serving", "worker w1 is killed",
                 "worker w1 is back"):  # fmt: skip
        assert part in text
    assert "…" not in text


def test_without_a_terminal_it_is_one_line_per_step(tmp_path: Path) -> None:
    run = Run.read(write_run(tmp_path, steps=12))
    lines = shown(run, terminal=False)
    assert max(map(len, lines)) <= 80
    steps = [line for line in lines if line.startswith("step")]
    assert len(steps) == 12
    assert all("kl 0 " in line for line in steps)
    assert not any("\x1b" in line or "│" in line for line in lines)
    assert sum("worker w1" in line for line in lines) == 2


def test_a_mismatch_is_a_number_not_a_zero(tmp_path: Path) -> None:
    run = Run.read(write_run(tmp_path, steps=2, mismatch_kl=3e-9, unequal_logprobs=1))
    assert "exactly 0" not in "\n".join(shown(run, terminal=True))
    assert "3.00e-09" in "\n".join(shown(run, terminal=True))
    assert sum("kl 3.00e-09" in line for line in shown(run, terminal=False)) == 2


def test_text_with_brackets_is_shown_as_it_is(tmp_path: Path) -> None:
    run = Run.read(write_run(tmp_path, steps=1, workers=[
        {"id": "[red]w0", "version": "[/]", "state": "quarantined"}]))  # fmt: skip
    assert "[red]w0 [/] quarantined" in "\n".join(shown(run, terminal=True))


def test_a_sparkline_is_the_newest_values_from_low_to_high() -> None:
    assert sparkline([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert sparkline([0.0, 0.5, 1.0], 2) == "▅█"
    assert sparkline([2.0, 4.0, -1.0], 3) == "▅█▁"
    assert sparkline([], 8) == ""
