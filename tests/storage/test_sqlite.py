"""The store of one gateway: what every store promises, its URLs, and its two files."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.storage import open_store
from lockstep.storage.sqlite.backend import sqlite_url
from lockstep.tokens.errors import BadRequest
from tests.storage.claims import *  # noqa: F403


@pytest.fixture
def url(tmp_path: Path) -> str:
    return sqlite_url(tmp_path)


async def test_a_url_names_a_directory_or_memory_and_perhaps_another_session_file(
    tmp_path: Path,
) -> None:
    odd = tmp_path / "a b%?c"
    odd.mkdir()
    for url, names in (
        (sqlite_url(odd), {"state.sqlite", "sessions.sqlite"}),
        (sqlite_url(None, str(odd / "d e.sqlite")), {"d e.sqlite"}),
        (sqlite_url(odd, "memory"), {"state.sqlite"}),
        ("memory:", set()),
    ):
        async with open_store(url) as store:
            await store.sessions.start()
            assert not store.shared
            assert store.keys is None
            await store.sessions.stop()
        files = {file.name for file in odd.iterdir()}
        assert {name.removesuffix(".lock") for name in files} == names, url
        for file in odd.iterdir():
            file.unlink()


@pytest.mark.parametrize("url", [
    "memory://host", "memory:?schema=x", "sqlite:", "sqlite://host/place", "sqlite:/x?y=1",
])  # fmt: skip
async def test_a_url_with_anything_else_is_refused(url: str) -> None:
    with pytest.raises(BadRequest, match="expected memory: or sqlite:DIRECTORY"):
        async with open_store(url):
            pass


@pytest.mark.parametrize("url", ["", "mysql://u:secret@h/y", "/some/path", "u:secret@h"])
async def test_an_unknown_scheme_is_refused_without_a_password(url: str) -> None:
    with pytest.raises(
        BadRequest, match="no URL of memory, sqlite, postgresql, postgres"
    ) as caught:
        async with open_store(url):
            pass
    assert "secret" not in caught.value.message


async def test_a_directory_is_of_one_gateway_and_one_model(tmp_path: Path) -> None:
    async with open_store(sqlite_url(tmp_path), model="tiny"):
        with pytest.raises(BadRequest, match=r"state\.sqlite is in use by another gateway"):
            async with open_store(sqlite_url(tmp_path)):
                pass
    with pytest.raises(BadRequest, match="is the state of tiny, and other is to be served"):
        async with open_store(sqlite_url(tmp_path), model="other"):
            pass
