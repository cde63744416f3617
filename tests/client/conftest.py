"""A real worker, and a policy connected to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

import lockstep
from tests.processes import WorkerProcess


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    process = WorkerProcess("--max-model-len", "1024", "--max-num-seqs", "16")
    yield process
    process.stop()


@pytest.fixture
async def policy(worker: WorkerProcess) -> AsyncIterator[lockstep.Policy]:
    async with lockstep.connect(worker.url, model="tiny", max_tokens=64) as policy:
        yield policy
