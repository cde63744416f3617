"""`lockstep.connect_fleet` opens a control plane; its old name still does, and says so."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

import lockstep
from lockstep.fleet.remote import RemoteFleet
from lockstep.running_gateways import RunningGateway, registered
from lockstep.tokens.errors import BadRequest

TOKEN = "a-long-enough-token"


@pytest.fixture(autouse=True)
def no_gateway(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("LOCKSTEP_ADMIN_URL", "LOCKSTEP_ADMIN_TOKEN", "LOCKSTEP_ADMIN_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_a_fleet_needs_its_token_and_the_error_says_where_it_is() -> None:
    with pytest.raises(BadRequest, match="LOCKSTEP_ADMIN_TOKEN"):
        lockstep.connect_fleet("http://127.0.0.1:9")
    with pytest.raises(BadRequest, match=r"nothing listens at http://127\.0\.0\.1:9: start"):
        lockstep.connect_fleet("http://127.0.0.1:9")
    with socket.create_server(("127.0.0.1", 0)) as sock:
        with pytest.raises(BadRequest, match="needs its admin token: give it with --token-file"):
            lockstep.connect_fleet(f"http://127.0.0.1:{sock.getsockname()[1]}")
    with pytest.raises(BadRequest, match="lockstep serve"):
        lockstep.connect_fleet()


def test_the_gateway_of_this_machine_is_found_with_its_token(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    gateway = RunningGateway(
        "http://127.0.0.1:9", "http://127.0.0.1:10", "tiny", 1, str(token_file)
    )
    with registered(gateway):
        assert isinstance(lockstep.connect_fleet(), RemoteFleet)
    with pytest.raises(BadRequest, match="lockstep serve"):
        lockstep.connect_fleet()


def test_the_token_may_come_from_the_caller_a_file_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(TOKEN)
    assert isinstance(lockstep.connect_fleet(token=TOKEN), RemoteFleet)
    assert isinstance(lockstep.connect_fleet(token_file=tmp_path / "token"), RemoteFleet)
    monkeypatch.setenv("LOCKSTEP_ADMIN_TOKEN", TOKEN)
    assert isinstance(lockstep.connect_fleet(), RemoteFleet)
