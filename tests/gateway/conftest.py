"""A gateway in front of the worker of each module."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.gateway.dialects import DialectServer, dialect_server
from tests.processes import WorkerProcess


@pytest_asyncio.fixture
async def server(worker: WorkerProcess) -> AsyncIterator[DialectServer]:
    async with dialect_server(worker) as server:
        yield server
