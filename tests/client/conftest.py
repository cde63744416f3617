"""A real worker, and a policy connected to it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import lockstep
from tests.processes import WorkerProcess


@pytest.fixture
def worker(shared_worker: WorkerProcess) -> WorkerProcess:
    return shared_worker


@pytest.fixture
async def policy(worker: WorkerProcess) -> AsyncIterator[lockstep.Policy]:
    async with lockstep.connect(worker.url, model="tiny", max_tokens=64) as policy:
        yield policy
