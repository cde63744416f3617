"""`lockstep dashboard`: an address that logs in once, and the run that the page shows."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cli.test_control import Plane, Run, run

__all__ = ["run"]


@pytest.fixture(autouse=True)
def codes(run: Run) -> None:
    Plane.responses["/dashboard/codes"] = 201, {"code": "a-code"}
    Plane.responses["/dashboard/run"] = 200, {"directory": "x"}


def test_the_address_has_a_code_and_never_the_token(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("dashboard") == 0
    shown = capsys.readouterr().out
    assert shown == f"{os.environ['LOCKSTEP_ADMIN_URL']}/dashboard#code=a-code\n"
    assert run("dashboard", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"url": shown.strip()}
    assert os.environ["LOCKSTEP_ADMIN_TOKEN"] not in shown


def test_a_run_is_named_by_its_whole_path(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("dashboard", "--run", "mine") == 0
    sent = ("POST", "/dashboard/run", {"directory": str(tmp_path / "mine")})
    assert sent in Plane.requests


def test_a_wrong_token_is_said(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCKSTEP_ADMIN_TOKEN", "another-token")
    assert run("dashboard") != 0
    assert "unauthorized" in capsys.readouterr().err
