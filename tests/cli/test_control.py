"""The commands that steer a fleet: what they print, and exit codes that scripts can trust."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest

from lockstep.cli import main
from lockstep.wire.fault import fault_body

TOKEN = "admin-token"
STATE = {
    "ready": True, "version": "step_7", "paused": None, "adapters": {"x": "x1"}, "serving": 1,
    "running": [], "operations": [],
    "workers": [
        {"id": "w0", "state": "serving", "version": "step_7", "in_flight": 3, "reason": None,
         "next_try_seconds": None},
        {"id": "w1", "state": "quarantined", "version": "step_6", "in_flight": 0,
         "reason": "it did not commit", "next_try_seconds": 2.0},
    ],
}  # fmt: skip
DONE = {
    "status": "ok", "version": "step_8",
    "operation": {"id": "1", "kind": "update_weights", "request": {}, "version": "step_8",
                  "status": "done", "pause_seconds": 0.012, "workers": {
        "w0": {"status": "ok"}, "w1": {"status": "quarantined", "error": "it hung"}}},
}  # fmt: skip
Run = Callable[..., int]


class Plane(BaseHTTPRequestHandler):
    """A control plane that answers what the test put into `answers`, and notes what was asked."""

    answers: ClassVar[dict[str, tuple[int, Any]]] = {}
    asked: ClassVar[list[tuple[str, str, Any]]] = []

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def do_DELETE(self) -> None:
        self.answer()

    def answer(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.asked.append((self.command, self.path, json.loads(raw) if raw else None))
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            status, body = 401, fault_body(401, "no", "unauthorized")
        else:
            name = self.path.partition("?")[0].removeprefix("/v1/rl/")
            status, body = self.answers.get(name, (404, fault_body(404, "no", "not_found")))
        out = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(out)))
        self.end_headers()
        self.wfile.write(out)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    Plane.answers, Plane.asked = {"state": (200, STATE), "update_weights": (200, DONE)}, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Plane)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("LOCKSTEP_ADMIN_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("LOCKSTEP_ADMIN_TOKEN", TOKEN)
    monkeypatch.setenv("COLUMNS", "160")

    def command(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["lockstep", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    yield command
    server.shutdown()
    server.server_close()


def test_state_is_a_table_for_people_and_json_for_scripts(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("state", "--json") == 0
    assert json.loads(capsys.readouterr().out) == STATE
    assert run("state") == 0
    shown = capsys.readouterr().out
    for word in ("step_7", "x@x1", "1 of 2 serving", "it did not commit", "next try in 2 s"):
        assert word in shown
    assert run("workers") == 0
    assert capsys.readouterr().out.splitlines()[1] == "w1\tquarantined\tstep_6\tit did not commit"


def test_an_update_says_its_version_its_pause_and_who_was_left_out(
    run: Run, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("update-weights", str(tmp_path), "--version", "step_8", "--key", "k") == 0
    shown = capsys.readouterr()
    assert "version step_8, paused for 12 ms" in shown.out
    assert "w1: quarantined: it hung" in shown.err
    body = {"weight_dir": str(tmp_path), "version": "step_8", "mode": "keep"}
    assert Plane.asked == [("POST", "/v1/rl/update_weights", body)]


@pytest.mark.parametrize(
    ("status", "expected"), [(400, 2), (401, 1), (404, 1), (409, 1), (502, 1), (503, 1)]
)
def test_the_exit_code_tells_a_wrong_command_from_one_that_failed(
    run: Run, status: int, expected: int, capsys: pytest.CaptureFixture[str]
) -> None:
    Plane.answers["resume"] = status, fault_body(status, "because of this", "a_reason")
    assert run("resume") == expected
    assert "because of this" in capsys.readouterr().err


def test_a_plane_that_is_not_there_or_not_ours_is_a_failure(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("drain", "nobody") == 1
    monkeypatch.setenv("LOCKSTEP_ADMIN_TOKEN", "another")
    assert run("state") == 1
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert run("state", "--url", f"http://127.0.0.1:{taken.getsockname()[1]}") == 1


def test_a_command_without_its_token_or_arguments_is_wrong(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run("update-weights") == 2
    assert run("state", "--token-file", str(tmp_path / "none")) == 2
    monkeypatch.delenv("LOCKSTEP_ADMIN_TOKEN")
    assert run("state") == 2
    assert Plane.asked == []
