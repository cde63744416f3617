"""The peak memory of every process that runs tests, which is printed and has a limit."""

from __future__ import annotations

import resource
import sys
from typing import Any

import pytest

LIMIT = 1500
"""MB that a process may use at its peak; two of them and the servers of their tests share CI."""
NOTED = 100
"""MB by which a test must raise the peak of its process to be named where the limit is passed."""


class PeakMemory:
    """Warns if a process passes the limit, and names the tests that raised its peak."""

    def __init__(self) -> None:
        self._notes: list[str] = []
        self._before = 0
        self._peaks: dict[str, tuple[int, list[str]]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        peak = peak_mb()
        if self._before and peak - self._before >= NOTED:
            self._notes.append(f"{report.nodeid}: {self._before} to {peak} MB")
        self._before = peak

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if "peak" in getattr(node, "workeroutput", {}):
            self._peaks[node.gateway.id] = node.workeroutput["peak"]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        peak = peak_mb(), self._notes
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output["peak"] = peak
            return
        if not self._peaks:
            self._peaks["this process"] = peak

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        peaks = ", ".join(f"{name} {peak}" for name, (peak, _) in self._peaks.items())
        terminalreporter.write_line(f"peak memory in MB: {peaks}")
        for name in self._above:
            terminalreporter.write_line(f"WARNING: {name} used more than {LIMIT} MB", red=True)
            for note in self._peaks[name][1]:
                terminalreporter.write_line(f"  {note}")

    @property
    def _above(self) -> list[str]:
        return [name for name, (peak, _) in self._peaks.items() if peak > LIMIT]


def peak_mb() -> int:
    """The most memory that this process ever used."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most >> (20 if sys.platform == "darwin" else 10)
