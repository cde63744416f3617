"""`lockstep keys`: a key is printed once, listed by its id, and gone when it is revoked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lockstep.cli.running.keys import app
from lockstep.http.auth import key_digest
from lockstep.settings import Settings
from lockstep.storage.key_file import KeyFile
from lockstep.tokens.errors import BadRequest, NotFound

RUN = CliRunner()


def test_keys_are_added_listed_and_revoked(tmp_path: Path) -> None:
    place = ["--key-file", str(tmp_path / "keys.json")]
    keys = [RUN.invoke(app, ["add", name, *place]).stdout.strip() for name in ("alice", "alice")]
    added = json.loads(RUN.invoke(app, ["add", "bob", "--json", *place]).stdout)
    stored = KeyFile(tmp_path / "keys.json").read()
    assert [one.tenant for one in stored] == ["alice", "alice", "bob"]
    digests = [key_digest(key.encode()).hex() for key in (*keys, added["key"])]
    assert [one.sha256 for one in stored] == digests
    listed = RUN.invoke(app, ["list", *place]).stdout
    assert [line.split("\t")[0] for line in listed.splitlines()] == [one.id for one in stored]
    assert not any(key in listed for key in keys)
    assert RUN.invoke(app, ["revoke", stored[0].id, *place]).exit_code == 0
    rows = json.loads(RUN.invoke(app, ["list", "--json", *place]).stdout)
    assert [row["id"] for row in rows] == [one.id for one in stored[1:]]
    assert isinstance(RUN.invoke(app, ["revoke", stored[0].id, *place]).exception, NotFound)


def test_a_key_begins_as_its_client_demands(tmp_path: Path) -> None:
    place = ["--key-file", str(tmp_path / "keys.json")]
    keys = [
        RUN.invoke(app, ["add", "alice", *prefix, *place]).stdout.strip()
        for prefix in ([], ["--prefix", "tml-"])
    ]
    assert [key[: key.index("-") + 1] for key in keys] == ["lk-", "tml-"]
    stored = KeyFile(tmp_path / "keys.json").read()
    assert [one.sha256 for one in stored] == [key_digest(key.encode()).hex() for key in keys]
    # A key of a session begins with ls-, and ends with it: no other key may look like one.
    assert RUN.invoke(app, ["add", "alice", "--prefix", "ls-", *place]).exit_code == 2
    assert KeyFile(tmp_path / "keys.json").read() == stored


def test_the_file_comes_from_the_environment_or_must_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCKSTEP_KEY_FILE", raising=False)
    refused = RUN.invoke(app, ["list"]).exception
    assert isinstance(refused, BadRequest)
    assert "--key-file" in refused.message
    monkeypatch.setenv("LOCKSTEP_KEY_FILE", str(tmp_path / "k.json"))
    assert Settings.read().key_file == tmp_path / "k.json"
    assert RUN.invoke(app, ["add", "alice"]).exit_code == 0
    assert KeyFile(tmp_path / "k.json").read()[0].tenant == "alice"


@pytest.mark.parametrize("name", ["", "a b", "a~b", "x" * 65, "a\nb"])
def test_what_cannot_be_a_tenant_is_refused(tmp_path: Path, name: str) -> None:
    result = RUN.invoke(app, ["add", name, "--key-file", str(tmp_path / "keys.json")])
    assert isinstance(result.exception, BadRequest)
    assert not (tmp_path / "keys.json").exists()
