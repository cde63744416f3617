"""What all tests share: a state directory, and arithmetic fixed before the first of them."""

from __future__ import annotations

import os

# Before torch is loaded: on cores that are all in use, its threads would spend ten times the work
# on waiting for each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import gc
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.render import Renderer
from tests import tokenizers
from tests.memory import PeakMemory
from tests.processes import ServeProcess, WorkerProcess

pytest_plugins = ["tests.exactness.guard"]


def pytest_configure(config: pytest.Config) -> None:
    home = tempfile.mkdtemp(prefix="lockstep-tests-")
    os.environ["XDG_STATE_HOME"] = home
    config.add_cleanup(lambda: shutil.rmtree(Path(home), ignore_errors=True))
    config.pluginmanager.register(PeakMemory())


def pytest_sessionstart(session: pytest.Session) -> None:
    """Reproducible products, and bf16 that ends no process.

    The first product of a process fixes both, so they are set before any test computes. Processes
    that run a share of the tests inherit what was found.
    """
    from lockstep.engine.numerics import bf16
    from lockstep.engine.numerics import plan as numerics

    numerics.make_reproducible()
    bf16.make_bf16_safe()


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays: every full collection would look through half a million objects."""
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    gc.unfreeze()  # or libraries report as leaks what they would have let go


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    """The renderer of the bundled tiny model."""
    return Renderer.load("tiny")


@pytest.fixture(scope="session")
def template_renderer() -> Renderer:
    """The same, dropping the thinking that the chat template drops."""
    return Renderer.load("tiny", thinking="template")


@pytest.fixture(scope="session")
def shared_worker() -> Iterator[WorkerProcess]:
    """One worker for all modules that leave it as they found it: starting one takes seconds."""
    process = WorkerProcess("--max-model-len", "1024", "--max-num-seqs", "16")
    yield process
    process.stop()


@pytest.fixture(scope="module")
def served_gateway(request: pytest.FixtureRequest) -> Iterator[ServeProcess]:
    """A `lockstep serve` process for the tests of a module, with the arguments in its `SERVE`."""
    process = ServeProcess(*getattr(request.module, "SERVE", ("--sessions", "memory")))
    yield process
    process.stop()


@pytest.fixture(scope="session")
def real_tokenizer() -> Callable[[str], Path]:
    """A real tokenizer's directory; the test is skipped where it cannot be had."""

    def obtain(name: str) -> Path:
        try:
            place: Path = tokenizers.directory(name)
        except tokenizers.Unobtainable as why:
            pytest.skip(str(why))
        return place

    return obtain
