"""API keys: in whatever encoding they come, found by digest, and of the right tenant."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from lockstep.gateway.auth import FREE_GUESSES, AdminAuth, DataAuth, TenantKeys
from lockstep.gateway.callers import ANYBODY, Caller, Scopes, caller_of
from lockstep.gateway.sessions.sessions import Sessions
from lockstep.http.auth import FixedKeys, RequestAuth, key_digest, presented_key
from lockstep.http.handlers import require_bearer
from lockstep.http.route_templates import RouteTemplates
from lockstep.storage.key_file import KeyFile
from lockstep.storage.sqlite.sessions import SqliteSessionStore
from lockstep.tokens.errors import BadRequest, Conflict, NotFound, Unauthorized

ODD = "schlüssel-für-prüfung"


@pytest_asyncio.fixture
async def sessions() -> AsyncIterator[Sessions]:
    async with Sessions() as sessions:
        yield sessions


def scope(value: bytes, path: str = "/v1/models", name: bytes = b"authorization") -> dict[str, Any]:
    return {"type": "http", "method": "GET", "path": path, "headers": [(name, value)]}


async def found(keys: TenantKeys, key: str) -> Caller:
    caller = await keys.find(key_digest(key.encode()))
    assert caller is not None
    return caller


async def nothing(*_: Any) -> None:
    return None


async def test_wrong_admin_tokens_are_delayed_after_some(monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[float] = []

    async def sleep(seconds: float) -> None:
        delays.append(seconds)

    monkeypatch.setattr("lockstep.gateway.auth.asyncio.sleep", sleep)
    auth = AdminAuth(nothing, "token")
    for _ in range(FREE_GUESSES):
        await auth(scope(b"Bearer wrong"), nothing, nothing)
    assert delays == []
    await auth(scope(b"Bearer token"), nothing, nothing)
    assert delays == []
    for _ in range(3):
        await auth(scope(b"Bearer wrong"), nothing, nothing)
    assert delays == [1.0] * 3
    await auth(scope(b"Bearer token"), nothing, nothing)
    assert len(delays) == 3


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
@pytest.mark.parametrize("header", [b"authorization", b"x-api-key"])
async def test_a_key_beyond_ascii_opens_in_the_encodings_that_clients_use(
    encoding: str, header: bytes
) -> None:
    auth = RequestAuth(nothing, keys=FixedKeys([ODD]))
    value = ODD.encode(encoding)
    await auth.check(
        scope(b"Bearer " + value if header == b"authorization" else value, name=header)
    )
    for wrong in (ODD[:-1], ODD + "x", ODD.replace("ü", "u"), ODD.upper()):
        with pytest.raises(Unauthorized):
            await auth.check(scope(b"Bearer " + wrong.encode(encoding)))


def test_an_admin_token_beyond_ascii_opens() -> None:
    require_bearer(Request(scope(b"Bearer " + ODD.encode())), ODD)
    with pytest.raises(Unauthorized):
        require_bearer(Request(scope(b"Bearer " + ODD[:-1].encode())), ODD)


async def test_a_wrong_key_and_a_missing_key_are_different_errors() -> None:
    auth = RequestAuth(nothing, keys=FixedKeys(["right"]))
    with pytest.raises(Unauthorized, match="not one of this server's"):
        await auth.check(scope(b"Bearer wrong"))
    with pytest.raises(Unauthorized, match="needs an API key"):
        await auth.check({**scope(b""), "headers": []})
    with pytest.raises(Unauthorized, match="not the one of this server"):
        require_bearer(Request(scope(b"Bearer wrong")), "right")
    with pytest.raises(Unauthorized, match="needs the header"):
        require_bearer(Request(scope(b"")), "right")


def test_a_key_is_taken_byte_for_byte() -> None:
    assert presented_key({b"authorization": b"bearer \xff\xfe"}) == b"\xff\xfe"
    assert presented_key({b"authorization": b"Basic abc"}) == b""


async def test_of_two_keys_in_one_request_the_first_counts() -> None:
    auth = RequestAuth(nothing, keys=FixedKeys(["right"]))
    request = scope(b"Bearer right")
    request["headers"].append((b"authorization", b"Bearer wrong"))
    await auth.check(request)
    request["headers"].reverse()
    with pytest.raises(Unauthorized):
        await auth.check(request)


async def test_one_key_is_the_default_tenant_and_several_are_tenants_each(
    sessions: Sessions,
) -> None:
    alone = await found(TenantKeys(sessions, ["only-key-1"]), "only-key-1")
    assert (alone.tenant, alone.session_name("s"), alone.request_id("r")) == ("default", "s", "r")
    assert (alone.cache_salt(None), alone.cache_salt("5")) == (None, "5")
    several = TenantKeys(sessions, ["first-key", "second-key"])
    callers = [await found(several, key) for key in ("first-key", "second-key")]
    for name in ("session_name", "request_id", "cache_salt"):
        assert len({getattr(one, name)("x") for one in (*callers, alone)}) == 3
    assert len({one.cache_salt(None) for one in (*callers, alone)}) == 3
    # In another order, and after a restart with the same file, they are who they were.
    again = TenantKeys(sessions, ["second-key", "first-key"])
    assert [await found(again, key) for key in ("first-key", "second-key")] == callers
    shared = TenantKeys(sessions, ["first-key", "second-key"], shared=True)
    assert {(await found(shared, key)).tenant for key in ("first-key", "second-key")} == {"default"}


def test_scopes_of_tenants_cannot_be_derived_from_their_names() -> None:
    one, other = (Scopes(secret * 32).of_tenant("alice", None) for secret in (b"a", b"b"))
    assert one.request_id("r") != other.request_id("r")
    assert one.cache_salt(None) != other.cache_salt(None)
    assert Scopes(b"a" * 32).key_name("weak-key") != Scopes(b"b" * 32).key_name("weak-key")
    assert "alice" not in one.request_id("r")


async def test_neither_a_key_nor_its_plain_hash_is_shown(
    sessions: Sessions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = KeyFile(tmp_path / "keys.json")
    stored, key = file.add("alice")
    assert key not in file.path.read_text()
    assert file.path.stat().st_mode & 0o077 == 0
    now = 0.0
    keys = TenantKeys(sessions, ["environment-key"], key_file=file.path, clock=lambda: now)
    assert await found(keys, key) == await keys.find(key_digest(key.encode()))
    assert str(await found(keys, key)) == stored.id
    other, _ = file.add("bob")
    file.revoke(stored.id)
    now = 2.0
    with caplog.at_level(logging.WARNING):
        assert await keys.find(key_digest(key.encode())) is None
    assert other.id in caplog.text
    assert stored.id in caplog.text
    assert key not in caplog.text
    assert stored.sha256 not in caplog.text
    # A key of the environment beside a key file is a tenant of its own.
    assert (await found(keys, "environment-key")).tenant.startswith("key-")


async def test_a_broken_key_file_changes_nothing_and_is_logged(
    sessions: Sessions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, now = KeyFile(tmp_path / "keys.json"), 0.0
    _, key = file.add("alice")
    keys = TenantKeys(sessions, key_file=file.path, clock=lambda: now)
    for text in ("{", '{"keys": [{"id": "x", "sha256": "ab"}]}', '{"more": 1}', None):
        if text is None:
            file.path.unlink()
        else:
            file.path.write_text(text)
        now += 2.0
        caplog.clear()
        assert (await found(keys, key)).tenant == "alice"
        assert "keys unchanged" in caplog.text
    with pytest.raises(BadRequest, match="lockstep keys add"):
        TenantKeys(sessions, key_file=file.path)
    with pytest.raises(NotFound):
        KeyFile(_written(tmp_path, '{"keys": []}')).revoke("key-1")
    (tmp_path / "other.json.new").touch()
    with pytest.raises(Conflict):
        KeyFile(tmp_path / "other.json").add("alice")


def _written(directory: Path, text: str) -> Path:
    path = directory / f"{os.urandom(4).hex()}.json"
    path.write_text(text)
    return path


async def test_an_empty_key_file_rejects_every_request(sessions: Sessions, tmp_path: Path) -> None:
    keys = TenantKeys(sessions, key_file=_written(tmp_path, '{"keys": []}'))
    with pytest.raises(Unauthorized):
        await RequestAuth(nothing, keys=keys).check(scope(b""))


async def test_a_session_key_that_ended_is_refused_even_where_no_key_is_needed(
    sessions: Sessions,
) -> None:
    async def hello(_: Request) -> PlainTextResponse:
        return PlainTextResponse("hello")

    routes = [Route("/v1/models", hello)]
    app = Starlette(routes=routes)
    auth = DataAuth(
        app, keys=TenantKeys(sessions), hosts=None, session_routes=RouteTemplates(routes)
    )
    key, _ = await sessions.keys.mint("s")
    received = scope(b"Bearer " + key.encode())
    await auth.check(received)
    assert caller_of(Request(received)).session == "s"
    await sessions.delete("s")
    with pytest.raises(Unauthorized):
        await auth.check(scope(b"Bearer " + key.encode()))
    anybody = scope(b"Bearer whatever-clients-send")
    await auth.check(anybody)
    assert caller_of(Request(anybody)) is ANYBODY


async def test_minted_keys_and_their_used_budget_survive_a_restart(tmp_path: Path) -> None:
    path, ticks = str(tmp_path / "sessions.db"), 100.0
    async with Sessions(SqliteSessionStore(path), monotonic=lambda: ticks) as sessions:
        key, key_id = await sessions.keys.mint("s", seconds=60, max_calls=3, cache_salt="g")
        await sessions.keys.mint("finished")
        await sessions.keys.finish("finished", 0.25)
        caller = await found(TenantKeys(sessions), key)
    ticks = 5.0
    async with Sessions(SqliteSessionStore(path), monotonic=lambda: ticks) as sessions:
        assert await found(TenantKeys(sessions), key) == caller
        assert (caller.key_id, caller.session) == (key_id, "s")
        info = await sessions.info("finished")
        assert (info.finished, info.reward, info.turns) == (True, 0.25, 0)
        assert await sessions.samples("finished") == []
        ticks += 61
        assert await TenantKeys(sessions).find(key_digest(key.encode())) is None
        with pytest.raises(Conflict):
            await sessions.keys.mint("s")
    assert key.encode() not in (tmp_path / "sessions.db").read_bytes()
