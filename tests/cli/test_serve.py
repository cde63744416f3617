"""`lockstep serve` and `lockstep gateway` as a user meets them: real processes, real ports."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

EVERYWHERE = ("--port", "0", "--admin-port", "0", "--sessions", "memory")


@contextmanager
def running(*arguments: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """The command, which is made to end with the block."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("LOCKSTEP_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**clean, **environ},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ready_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"it ended: {process.communicate()[1]}")
    ready: dict[str, Any] = json.loads(line)
    return ready


def status_of(url: str, token: str | None = None) -> int:
    request = urllib.request.Request(url)
    if token is not None:
        request.add_header("authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def generate(url: str, tokens: int = 4) -> dict[str, Any]:
    body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": tokens, "ignore_eos": True}}
    request = urllib.request.Request(
        url + "/inference/v1/generate",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        result: dict[str, Any] = json.load(response)
        return result


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_serve_says_ready_in_one_line_serves_and_drains() -> None:
    arguments = ("--workers", "2", "--worker-args", "--max-model-len 256", "--json")
    with running("serve", "tiny", *EVERYWHERE, *arguments) as process:
        ready = ready_of(process)
        assert set(ready) == {
            "event",
            "url",
            "admin_url",
            "admin_token_file",
            "workers",
            "state_dir",
            "resumed",
        }
        assert ready["event"] == "ready"
        workers = ready["workers"]
        assert [set(one) for one in workers] == [{"id", "url", "system_url", "pid", "gpus"}] * 2
        assert len({one["url"] for one in workers} | {one["system_url"] for one in workers}) == 4
        assert all(alive(one["pid"]) for one in workers)
        assert len(generate(ready["url"])["choices"][0]["token_ids"]) == 4

        token_file = Path(ready["admin_token_file"])
        assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
        assert status_of(ready["admin_url"] + "/nothing") == 401
        assert status_of(ready["admin_url"] + "/nothing", token_file.read_text()) == 404
        with running("state", "--json", "--url", ready["admin_url"]) as command:  # no token given
            shown, errors = command.communicate(timeout=60)
        assert json.loads(shown)["serving"] == 2, errors

        with running(
            "gateway", "--worker", workers[0]["url"], "--worker", workers[1]["url"],
            *EVERYWHERE, "--json",
        ) as gateway:  # fmt: skip
            second = ready_of(gateway)
            ids = [(one["url"], one["pid"]) for one in second["workers"]]
            assert ids == [(one["url"], None) for one in workers]
            assert generate(second["url"])["choices"][0]["token_ids"]
            gateway.send_signal(signal.SIGINT)
            assert gateway.wait(30) == 0
        assert generate(ready["url"])["choices"]

        process.send_signal(signal.SIGTERM)
        rest, errors = process.communicate(timeout=60)
        assert (process.returncode, rest) == (0, ""), errors
        assert not any(alive(one["pid"]) for one in workers)
        assert not token_file.exists()


def test_the_command_it_prints_works_and_the_token_may_be_in_a_file(tmp_path: Path) -> None:
    keys = {"LOCKSTEP_API_KEYS": "first-key-1,second-key"}
    token_file = tmp_path / "token"
    token_file.write_text("a-token-of-the-operator\n")
    environment = {**keys, "LOCKSTEP_ADMIN_TOKEN_FILE": str(token_file)}
    with running("serve", *EVERYWHERE, **environment) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "Admin" in line)
        assert line.endswith(f"token in {token_file}\n")
        line = next(line for line in process.stdout if "curl" in line)
        command = line.removeprefix("Try:").strip()
        environ = {**os.environ, **keys}
        response = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, env=environ, check=True
        )
        assert json.loads(response.stdout)["choices"][0]["message"]["role"] == "assistant"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_while_it_starts_leaves_nothing_behind() -> None:
    with running("serve", "--json", *EVERYWHERE) as process:
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (children := listed.read_text().split()):
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=60)
        assert (process.returncode, out, errors) == (0, "", "")
    assert not any(alive(int(pid)) for pid in children)


@pytest.mark.failure_mode("F42")
def test_other_machines_are_not_served_without_keys() -> None:
    with running("serve", "--host", "0.0.0.0", *EVERYWHERE) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "LOCKSTEP_API_KEYS" in errors
    assert "--insecure" in errors


@pytest.mark.failure_mode("F22")
def test_a_gateway_without_any_worker_does_not_start() -> None:
    with running(
        "gateway", "--worker", "http://127.0.0.1:9", "--wait-seconds", "0.1", *EVERYWHERE
    ) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, "a supervisor starts it again: its workers may come"
    assert "0 of 1 workers serve" in errors


def test_held_weights_cannot_be_required_of_a_worker_without_control() -> None:
    worker = ("--worker", "http://127.0.0.1:9", "--require-proof", "held")
    with running("gateway", *worker, *EVERYWHERE) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "--require-proof held needs the admin port of http://127.0.0.1:9" in errors


def test_a_model_that_is_not_there_ends_it_with_one_line() -> None:
    with running("serve", "/no/such/model", "--json", *EVERYWHERE) as process:
        out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert "Traceback" not in errors
    assert "/no/such/model/config.json does not exist: expected tiny, tiny-moe" in errors


def test_running_requests_are_finished_within_the_drain_setting() -> None:
    """A long response, on a worker that is stopped for a while after the gateway got SIGTERM."""
    slow = ("--workers", "1", "--worker-args", "--max-model-len 2048", "--json")
    with running("serve", "tiny", *EVERYWHERE, *slow, "--drain-seconds", "60") as process:
        ready = ready_of(process)
        pid = ready["workers"][0]["pid"]
        with ThreadPoolExecutor() as threads:
            response = threads.submit(generate, ready["url"], 512)
            while not in_flight(ready):
                time.sleep(0.01)
            os.kill(pid, signal.SIGSTOP)
            process.send_signal(signal.SIGTERM)
            time.sleep(7)  # longer than the 5 s after which responses were once cut off
            os.kill(pid, signal.SIGCONT)
            assert len(response.result(60)["choices"][0]["token_ids"]) == 512
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors


def in_flight(ready: dict[str, Any]) -> int:
    request = urllib.request.Request(ready["admin_url"] + "/v1/rl/state")
    token = Path(ready["admin_token_file"]).read_text()
    request.add_header("authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=30) as response:
        return int(json.load(response)["in_flight"])


def test_a_drain_is_cut_off_when_its_time_is_over() -> None:
    arguments = ("--worker-args", "--max-model-len 2048", "--json", "--drain-seconds", "1")
    with running("serve", "tiny", *EVERYWHERE, *arguments) as process:
        ready = ready_of(process)
        pid = ready["workers"][0]["pid"]
        with ThreadPoolExecutor() as threads:
            response = threads.submit(generate, ready["url"], 512)
            while not in_flight(ready):
                time.sleep(0.01)
            os.kill(pid, signal.SIGSTOP)
            begun = time.monotonic()
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
            assert time.monotonic() - begun < 20
            assert response.exception(10) is not None
        assert not alive(pid)
