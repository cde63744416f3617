"""Tests that failed in CI and passed when they ran alone: list them, and run them under load.

python scripts/flakes.py failures TARGET    the ids of the tests that failed in a make target
python scripts/flakes.py run [ID...]        run each id, or each of .ci/flakes.txt, 20 times
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLAKES = ROOT / ".ci" / "flakes.txt"
RUNS = int(os.environ.get("RUNS", "20"))


def failures(target: str) -> list[str]:
    """Return the ids of the tests that failed when the target last ran."""
    path = ROOT / ".pytest_cache" / target / "v" / "cache" / "lastfailed"
    return list(json.loads(path.read_text())) if path.exists() else []


class Repeat:
    """A pytest plugin that runs one test several times, with the servers of its module started once."""

    def __init__(self, test_id: str) -> None:
        self._test_id = test_id
        self.passed = 0

    @pytest.hookimpl(trylast=True)  # its part of a test's id comes last
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        metafunc.fixturenames.append("flakes_run")
        metafunc.parametrize("flakes_run", [f"run{number}" for number in range(RUNS)])

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [
            item
            for item in items
            if re.sub(r"\[run\d+\]$|-run\d+(?=\]$)", "", item.nodeid) == self._test_id
        ]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed


def repeat(test_id: str) -> bool:
    """Run one test RUNS times in this process; return whether every run passed."""
    plugin = Repeat(test_id)
    arguments = [test_id.partition("[")[0], "--timeout", "600", "-p", "no:cacheprovider"]
    code = pytest.main(arguments, plugins=[plugin])
    print(f"{plugin.passed} of {RUNS} passed: {test_id}")
    return code == 0 and plugin.passed == RUNS


def run_under_load(test_ids: list[str]) -> bool:
    """Run each test RUNS times beside one busy process per core; return whether all passed."""
    busy = [sys.executable, "-c", "while True: pass"]
    spinners = [subprocess.Popen(busy) for _ in range(os.cpu_count() or 1)]
    try:
        failed = [
            test_id
            for test_id in test_ids
            if subprocess.run([sys.executable, __file__, "repeat", test_id], cwd=ROOT).returncode
        ]
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()
    print(f"{len(test_ids) - len(failed)} of {len(test_ids)} tests passed all of {RUNS} runs")
    for test_id in failed:
        print(f"failed: {test_id}")
    return not failed


def main(command: str, *arguments: str) -> int:
    if command == "failures":
        print(*failures(*arguments), sep="\n")
        return 0
    if command == "repeat":
        return 0 if repeat(*arguments) else 1
    written = FLAKES.read_text().splitlines() if FLAKES.exists() else []
    return 0 if run_under_load(list(arguments) or written) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
