"""A real worker for each module, and a gateway of chat routes in front of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.gateway.chat.chat_server import Served, chat_server
from tests.processes import WorkerProcess


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    process = WorkerProcess("--max-model-len", "1024", "--max-num-seqs", "16")
    yield process
    process.stop()


@pytest.fixture
async def served(worker: WorkerProcess) -> AsyncIterator[Served]:
    async with chat_server(worker.url) as served:
        yield served
