"""One S3 server for each module, and a cache of its own for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stores.s3_server import S3Server, s3_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, whose credentials are in the environment."""
    server.forget()
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCKSTEP_CHECKPOINT_CACHE", str(tmp_path / "cache"))
    return server
