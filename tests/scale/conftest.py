"""What tests on real servers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scale.postgres_server import PostgresServer, postgres_server


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One server for all tests; each takes a schema of its own, and nobody stops it."""
    with postgres_server() as server:
        yield server


@pytest.fixture
def store_url(postgres: PostgresServer) -> str:
    """The URL of a schema that is this test's own."""
    return postgres.schema_url()
