"""A real worker, and a gateway of chat routes in front of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.gateway.chat.chat_server import Served, chat_server
from tests.processes import WorkerProcess


@pytest.fixture
def worker(shared_worker: WorkerProcess) -> WorkerProcess:
    return shared_worker


@pytest.fixture
async def served(worker: WorkerProcess) -> AsyncIterator[Served]:
    async with chat_server(worker.url) as served:
        yield served
