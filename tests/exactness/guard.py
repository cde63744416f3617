"""Pytest plugin that keeps tests from passing on arithmetic that they did not declare.

An engine or trainer that cannot compute exactly falls back to close arithmetic. Its bits equal
the trainer's on some CPUs by chance, so a test on it passes on one machine and fails on another.

    @pytest.mark.exact_arithmetic              skipped on a machine without exact arithmetic
    @pytest.mark.close_arithmetic("reason")    an engine or trainer of the test falls back

A test without the second marker fails where an engine or trainer falls back, in its own process or
in one that it started, during the test or in a fixture that it uses. `--no-exact` takes exact
arithmetic away, to see the tests on a machine that has none.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from tests.exactness.startup import sitecustomize as startup

EXACT = "exact_arithmetic"
CLOSE = "close_arithmetic"
SKIPPED = "no exact arithmetic here: "


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-exact",
        action="store_true",
        help="run as on a machine without exact arithmetic: matrix products depend on the batch",
    )


def pytest_configure(config: pytest.Config) -> None:
    for marker in (
        f"{EXACT}: the test needs exact arithmetic and is skipped on machines without it",
        f"{CLOSE}(reason): an engine or trainer of the test falls back to close arithmetic",
    ):
        config.addinivalue_line("markers", marker)
    directory = Path(tempfile.mkdtemp(prefix="lockstep-exactness-"))
    config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))
    # Processes that run a share of the tests inherit both changes of the environment.
    own, paths = str(Path(startup.__file__).parent), os.environ.get("PYTHONPATH", "")
    if own not in paths.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (own, paths)))
    if config.getoption("--no-exact"):
        if startup.NO_EXACT not in os.environ:
            os.environ["XDG_CACHE_HOME"] = str(_cache_without_lockstep(directory / "cache"))
        os.environ[startup.NO_EXACT] = "1"
        startup.remove_exactness()
    config.pluginmanager.register(ArithmeticGuard(directory), "arithmetic guard")


def _cache_without_lockstep(copy: Path) -> Path:
    """Return a copy of the cache directory, by links, in which nothing of the engine is stored.

    The engine stores which mode of MKL keeps the bits. Found under `--no-exact`, it is wrong for
    the machine.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    copy.mkdir()
    for path in cache.iterdir() if cache.is_dir() else ():
        if path.name != "lockstep":
            (copy / path.name).symlink_to(path)
    return copy


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in item.iter_markers(CLOSE):
            if len(marker.args) != 1 or not isinstance(marker.args[0], str) or not marker.args[0]:
                raise pytest.UsageError(
                    f"{item.nodeid}: close_arithmetic has no reason: write "
                    '@pytest.mark.close_arithmetic("why an engine or trainer falls back here")'
                )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print how many tests were skipped for want of exact arithmetic, for each reason."""
    messages = (report.longrepr[2] for report in terminalreporter.stats.get("skipped", ()))
    reasons = Counter(text.partition(SKIPPED)[2] for text in messages if SKIPPED in text)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} exact-only tests skipped: {SKIPPED}{reason}")


class ArithmeticGuard:
    """Collects fallbacks for each test and each fixture, and fails tests that declared none.

    Every set-up of a fixture and every test has a file of its own, which TESTS_FALLBACKS names
    meanwhile. A process inherits the variable where it is started, so the fallback of a worker
    belongs to the fixture that started it, even if the worker starts again during a later test.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files = 0
        self._fixtures: dict[pytest.FixtureDef[Any], Path] = {}
        self._test = directory

    @cached_property
    def problem(self) -> str:
        """Why this machine does not compute exactly; empty where it does."""
        from lockstep.engine.numerics import selftest

        with self._collect():  # the machine's own fallback is that of no test
            report = selftest.run("tiny", module=False)
        return "" if report.exact else report.problem

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        _ = self.problem  # before the first fixture or test can replace a part of the engine
        with self._collect() as self._test:
            return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self.problem and item.get_closest_marker(EXACT):
            pytest.skip(SKIPPED + self.problem)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        with self._collect() as path:
            self._fixtures[fixturedef] = path
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        try:
            result = yield
        except BaseException:
            # A wrong result is more likely where the arithmetic is not the expected one.
            if fallbacks := self._fallbacks(item):
                item.add_report_section("call", "arithmetic", "\n".join(fallbacks))
            raise
        if self.problem or item.get_closest_marker(CLOSE):
            return result
        if fallbacks := self._fallbacks(item):
            pytest.fail(
                "\n".join(fallbacks) + "\nThis machine computes exactly, so the test may hold by "
                "chance on this CPU only. Keep the arithmetic exact, or declare with "
                '@pytest.mark.close_arithmetic("reason") why it is not.',
                pytrace=False,
            )
        return result

    @contextmanager
    def _collect(self) -> Iterator[Path]:
        """Collect fallbacks in a new file within the block."""
        self._files += 1
        path, outer = self._directory / str(self._files), os.environ.get(startup.FALLBACKS)
        os.environ[startup.FALLBACKS] = str(path)
        try:
            yield path
        finally:
            if outer is None:
                del os.environ[startup.FALLBACKS]
            else:
                os.environ[startup.FALLBACKS] = outer

    def _fallbacks(self, item: pytest.Item) -> list[str]:
        """Describe the fallbacks of a test and of the fixtures that it uses."""
        lines = _read(self._test, "the test")
        active = item._request._fixture_defs if isinstance(item, pytest.Function) else {}
        for name, fixture in active.items():
            if path := self._fixtures.get(fixture):
                owner = f"the {fixture.scope} fixture {name!r}, which the test uses,"
                lines += _read(path, owner)
        return lines


def _read(path: Path, owner: str) -> list[str]:
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        fallback = json.loads(text)
        process = fallback["process"]
        where = "" if process == os.getpid() else f" in process {process}"
        lines.append(f"{owner} fell back to close arithmetic{where}: {fallback['reason']}")
    return lines
