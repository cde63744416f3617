"""`lockstep tinker` is a gateway: what is trained there is served by every dialect of one port."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.tinker_server import KEY, PROGRAMS, PYTHON, TinkerProcess

pytestmark = pytest.mark.timeout(600)


def new_key(key_file: Path, *options: str) -> str:
    """The key that `lockstep keys add` prints."""
    command = [sys.executable, "-m", "lockstep", "keys", "add", "alice", *options]
    return subprocess.run(
        [*command, "--key-file", str(key_file)], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def alice(key_file: Path) -> str:
    return new_key(key_file, "--prefix", "tml-")


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, key_file: Path, alice: str
) -> Iterator[TinkerProcess]:
    arguments = ("--max-loras", "2", "--key-file", str(key_file))
    process = TinkerProcess(tmp_path_factory.mktemp("state"), *arguments)
    yield process
    assert process.stop() == 0


@pytest.fixture(scope="module")
def saved(server: TinkerProcess, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return server.program(tmp_path_factory.mktemp("home"), "tinker_gateway")


def call(server: TinkerProcess, path: str, body: Any = None, key: str = KEY) -> Any:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(
        urllib.request.Request(server.url + path, data, headers), timeout=60
    ) as response:
        return json.loads(response.read())


def test_a_sampler_is_a_model_of_the_other_dialects(server: TinkerProcess, saved: Any) -> None:
    request = {"prompt": saved["prompt"], "max_tokens": 8, "temperature": 1.0, "seed": 11}
    ids = {"return_token_ids": True, "logprobs": 0, "ignore_eos": True}
    response = call(server, "/v1/completions", {"model": saved["path"], **request, **ids})
    (choice,) = response["choices"]
    assert choice["token_ids"] == saved["tokens"]
    assert choice["logprobs"]["token_logprobs"] == saved["logprobs"]
    assert response["model"].startswith("tinker-")
    assert f"+{response['model']}@" in choice["weight_versions"][0]["version"]
    sampling = {"max_tokens": 8, "temperature": 1.0, "seed": 11, "logprobs": 0, "ignore_eos": True}
    body = {"model": saved["path"], "token_ids": saved["prompt"], "sampling_params": sampling}
    (choice,) = call(server, "/inference/v1/generate", body)["choices"]
    assert choice["token_ids"] == saved["tokens"]
    question = [{"role": "user", "content": "Reverse: 40213"}]
    body = {"model": saved["path"], "messages": question, "max_tokens": 8, "temperature": 0.0}
    for path in ("/v1/chat/completions", "/v1/messages"):
        assert call(server, path, body)["model"] == response["model"]


def test_samplers_and_their_names_hold_over_a_kill(server: TinkerProcess, saved: Any) -> None:
    body = {"model": saved["path"], "prompt": saved["prompt"], "max_tokens": 8, "temperature": 0.0}
    before = call(server, "/v1/completions", body)
    server.kill()
    server.start()
    after = call(server, "/v1/completions", body)
    assert after["choices"][0]["text"] == before["choices"][0]["text"]
    assert after["model"] == before["model"]


def test_a_sampler_that_is_deleted_is_served_by_nobody(server: TinkerProcess, saved: Any) -> None:
    run, _, name = saved["path"].removeprefix("tinker://").split("/")
    request = urllib.request.Request(
        f"{server.url}/api/v1/training_runs/{run}/checkpoints/sampler_weights/{name}",
        headers={"authorization": f"Bearer {KEY}"}, method="DELETE",
    )  # fmt: skip
    body = {"model": saved["path"], "prompt": saved["prompt"], "max_tokens": 2}
    call(server, "/v1/completions", body)
    # Samplers belong to one tenant: the list that all tenants see does not have them.
    listed = [card["id"] for card in call(server, "/v1/models")["data"]]
    assert not any(name.startswith("tinker-") for name in listed)
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.status == 204
    with pytest.raises(urllib.error.HTTPError) as refused:
        call(server, "/v1/completions", body)
    assert refused.value.code == 404
    assert "does not exist on this server" in refused.value.read().decode()
    time.sleep(1.1)  # for so long the list of models may be an old one
    assert [card["id"] for card in call(server, "/v1/models")["data"]] == ["tiny"]


def test_one_key_is_for_both(server: TinkerProcess, saved: Any) -> None:
    for path in ("/api/v1/training_runs", "/v1/models"):
        assert call(server, path)
        with pytest.raises(urllib.error.HTTPError) as refused:
            call(server, path, key="tml-another-secret")
        assert refused.value.code == 401


def test_the_sdk_sends_a_key_that_was_made_for_it(
    server: TinkerProcess, saved: Any, alice: str, tmp_path: Path
) -> None:
    own = server.program(tmp_path, "tinker_gateway", TINKER_API_KEY=alice)
    runs = [run["training_run_id"] for run in runs_of(server, alice)]
    assert runs == [own["path"].removeprefix("tinker://").split("/")[0]]
    assert not set(runs) & {run["training_run_id"] for run in runs_of(server, KEY)}


def runs_of(server: TinkerProcess, key: str) -> Any:
    return call(server, "/api/v1/training_runs", key=key)["training_runs"]


def test_the_sdk_sends_no_other_key_and_the_gateway_would_take_it(
    server: TinkerProcess, key_file: Path, tmp_path: Path
) -> None:
    key = new_key(key_file)
    time.sleep(1.1)  # for so long the gateway may have the old keys
    assert runs_of(server, key) is not None
    result = subprocess.run(
        [str(PYTHON), str(PROGRAMS / "tinker_gateway.py")], cwd=tmp_path,
        env=server.environ(tmp_path) | {"TINKER_API_KEY": key},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert result.returncode != 0
    assert "must start with the 'tml-' prefix" in result.stderr
