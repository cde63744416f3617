"""A gateway with two workers, shared by the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.processes import ServeProcess


@pytest.fixture(scope="module")
def served() -> Iterator[ServeProcess]:
    process = ServeProcess("--workers", "2", "--sessions", "memory", "--worker-args",
                           "--max-model-len 1024 --max-num-seqs 32")  # fmt: skip
    yield process
    process.stop()
