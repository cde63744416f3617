"""The commands that steer a fleet: what they print, and exit codes that scripts can trust."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest

from lockstep.cli import main
from lockstep.models import bundled
from lockstep.protocol.common.error_body import error_body
from lockstep.running_gateways import RunningGateway, registered, running_gateways

TOKEN = "admin-token"
STATE: dict[str, Any] = {
    "ready": True, "version": "step_7", "paused": None, "adapters": {"x": "x1"}, "serving": 1,
    "running": [], "operations": [],
    "workers": [
        {"id": "w0", "state": "serving", "version": "step_7", "in_flight": 3, "reason": None,
         "next_try_seconds": None, "gpus": ["2", "3"]},
        {"id": "w1", "state": "quarantined", "version": "step_6", "in_flight": 0,
         "reason": "it did not commit", "next_try_seconds": 2.0},
    ],
}  # fmt: skip
DONE = {
    "status": "ok", "version": "step_8",
    "operation": {"id": "1", "kind": "update_weights", "request": {}, "version": "step_8",
                  "status": "done", "pause_seconds": 0.012, "warnings": ["[a] is all zeros"],
                  "workers": {
        "w0": {"status": "ok"}, "w1": {"status": "quarantined", "error": "it hung"}}},
}  # fmt: skip
Run = Callable[..., int]


class Plane(BaseHTTPRequestHandler):
    """A control plane that sends the `responses` of a test and records the requests."""

    responses: ClassVar[dict[str, tuple[int, Any]]] = {}
    requests: ClassVar[list[tuple[str, str, Any]]] = []

    def do_GET(self) -> None:
        self.respond()

    def do_POST(self) -> None:
        self.respond()

    def do_DELETE(self) -> None:
        self.respond()

    def respond(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.requests.append((self.command, self.path, json.loads(raw) if raw else None))
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            status, body = 401, error_body(401, "no", "unauthorized")
        else:
            name = self.path.partition("?")[0].removeprefix("/v1/rl/")
            status, body = self.responses.get(name, (404, error_body(404, "no", "not_found")))
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
    Plane.responses, Plane.requests = {"state": (200, STATE), "update_weights": (200, DONE)}, []
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
    assert "warning: [a] is all zeros" in shown.err
    body = {"weight_dir": str(tmp_path), "version": "step_8", "mode": "keep"}
    assert Plane.requests == [("POST", "/v1/rl/update_weights", body)]


@pytest.mark.parametrize(
    ("status", "expected"), [(400, 2), (401, 1), (404, 1), (409, 1), (502, 1), (503, 1)]
)
def test_the_exit_code_tells_a_wrong_command_from_one_that_failed(
    run: Run, status: int, expected: int, capsys: pytest.CaptureFixture[str]
) -> None:
    Plane.responses["resume"] = status, error_body(status, "because of this", "a_reason")
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


@pytest.mark.parametrize("serving", [0, 1])
def test_who_drains_the_last_worker_is_told_so(
    run: Run, capsys: pytest.CaptureFixture[str], serving: int
) -> None:
    Plane.responses |= {
        "workers/w0": (200, {"status": "ok", "worker": "w0"}),
        "state": (200, {**STATE, "serving": serving}),
    }
    assert run("drain", "w0") == 0
    shown = capsys.readouterr()
    assert "w0 is drained" in shown.out
    assert ("no worker is serving" in shown.err) is (serving == 0)


def test_a_command_without_its_token_or_arguments_is_wrong(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run("update-weights") == 2
    assert run("state", "--token-file", str(tmp_path / "none")) == 2
    monkeypatch.delenv("LOCKSTEP_ADMIN_TOKEN")
    assert run("state") == 2
    monkeypatch.delenv("LOCKSTEP_ADMIN_URL")
    assert run("state") == 2
    assert Plane.requests == []


def test_a_worker_takes_one_line_and_its_details_are_given_on_demand(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "it did not commit: " + "because of that and then of this, " * 10 + "at last"
    quarantined = {**STATE["workers"][1], "reason": reason, "url": "http://w1"}
    many = [{**STATE["workers"][0], "id": f"worker-number-{at}"} for at in range(3)]
    operation = {"kind": "update_weights", "version": "step_8", "status": "failed",
                 "error": "one hung", "pause_seconds": None,
                 "workers": {"w1": {"status": "quarantined", "error": "it hung"}}}  # fmt: skip
    Plane.responses["state"] = 200, {**STATE, "workers": [*many, quarantined],
                                   "operations": [operation]}  # fmt: skip
    monkeypatch.setenv("COLUMNS", "80")
    assert run("state") == 0
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if line.strip()]
    assert len(lines) == 1 + 1 + 4 + 1  # summary, heading, workers, last operations
    assert max(map(len, lines)) <= 80
    assert "it did not commit: because" in shown
    assert "at last" not in shown
    assert run("state", "--details") == 0
    shown = " ".join(capsys.readouterr().out.split())
    texts = (reason, "url: http://w1", "GPUs: 2, 3", "failed: one hung", "w1: quarantined: it hung")
    for text in texts:
        assert text in shown
    monkeypatch.delenv("COLUMNS")
    assert run("state") == 0
    assert reason in capsys.readouterr().out  # a pipe has no edge


def test_details_say_what_a_worker_was_believed_by(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    bits = {"decided_by": "bits", "max_difference": 0.0, "mean_difference": 0.0, "bound": 0.0,
            "digest": "match"}  # fmt: skip
    far = {"decided_by": "scores", "max_difference": 0.25, "mean_difference": 0.1,
           "bound": 0.0125, "digest": "unknown"}  # fmt: skip
    unread = {"decided_by": "digest", "max_difference": None, "mean_difference": None,
              "bound": None, "digest": "mismatch"}  # fmt: skip
    workers = {
        "w0": {"status": "ok", "evidence": bits},
        "w1": {"status": "rolled_back", "error": "its logprobs are off", "evidence": far},
        "w2": {"status": "rolled_back", "error": "it misread", "evidence": unread},
        "w3": {"status": "ok", "evidence": None},
    }
    operation = {"kind": "update_weights", "version": "step_8", "status": "failed",
                 "error": None, "pause_seconds": None, "workers": workers}  # fmt: skip
    Plane.responses["state"] = 200, {**STATE, "operations": [operation]}
    assert run("state", "--details") == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "w0: ok (decided by bits, logprobs off by up to 0, allowed 0, digest match)" in lines
    assert (
        "w1: rolled_back: its logprobs are off (decided by scores, logprobs off by up to 0.25, "
        "allowed 0.0125, digest unknown)" in lines
    )
    assert "w2: rolled_back: it misread (decided by digest, digest mismatch)" in lines
    assert not any(line.startswith("w3") for line in lines)


@pytest.fixture
def bare_gateway(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Run) -> str:
    """Neither URL nor token in the environment, and a state home of its own; the plane's URL."""
    url = os.environ["LOCKSTEP_ADMIN_URL"]
    monkeypatch.delenv("LOCKSTEP_ADMIN_URL")
    monkeypatch.delenv("LOCKSTEP_ADMIN_TOKEN")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    return url


def entry(url: str, token_file: Path | None, pid: int = 1) -> RunningGateway:
    where = None if token_file is None else str(token_file)
    return RunningGateway("http://127.0.0.1:1", url, "tiny", pid, where, "/kept")


def test_the_gateway_of_this_machine_is_found_with_its_token(
    run: Run, bare_gateway: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    assert run("state") == 2
    assert "lockstep serve" in capsys.readouterr().err
    with registered(entry(bare_gateway, token_file)):
        assert run("state") == 0
        home = tmp_path / "home/lockstep/running"
        assert home.stat().st_mode & 0o777 == 0o700
        assert [file.stat().st_mode & 0o777 for file in home.iterdir()] == [0o600]
        monkeypatch.setenv("LOCKSTEP_ADMIN_TOKEN", "that-of-another-gateway")
        assert run("state") == 0
        assert run("state", "--url", "http://127.0.0.1:9") == 1
        wrong = tmp_path / "wrong"
        wrong.write_text("not-the-token")
        assert run("state", "--token-file", str(wrong)) == 1
        monkeypatch.delenv("LOCKSTEP_ADMIN_TOKEN")
    assert list(home.iterdir()) == []
    assert run("state") == 2
    capsys.readouterr()
    with registered(entry(bare_gateway, None)):
        assert run("state") == 2
        assert "LOCKSTEP_ADMIN_TOKEN" in capsys.readouterr().err
        monkeypatch.setenv("LOCKSTEP_ADMIN_TOKEN", TOKEN)
        assert run("state") == 0


def test_several_gateways_are_listed_with_how_to_choose(
    run: Run, bare_gateway: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    other = "http://127.0.0.1:9"
    with registered(entry(bare_gateway, token_file, 1)), registered(entry(other, None, 2)):
        assert run("pause") == 2
        text = capsys.readouterr().err
        for url in (bare_gateway, other):
            assert f"--url {url}  serves tiny" in text
        assert "state in /kept" in text
        assert run("state", "--url", bare_gateway) == 0
    assert [path for _, path, _ in Plane.requests] == ["/v1/rl/state"]


def test_a_gateway_that_was_killed_is_found_no_more(bare_gateway: str, tmp_path: Path) -> None:
    code = (
        "import os, time\nfrom lockstep.running_gateways import RunningGateway, registered\n"
        "with registered(RunningGateway('http://d', 'http://a', 'tiny', os.getpid())):\n"
        "    print('there', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    assert [each.pid for each in running_gateways()] == [process.pid]
    process.kill()
    process.communicate()
    assert running_gateways() == []
    assert list((tmp_path / "home/lockstep/running").iterdir()) == []


def test_bundled_weights_are_named_as_everywhere(run: Run) -> None:
    assert run("update-weights", "tiny", "--version", "step_8") == 0
    assert Plane.requests[-1][2]["weight_dir"] == str(bundled("tiny"))
