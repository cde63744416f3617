"""`lockstep tinker` is a gateway: what is trained there is served by every dialect of one port."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.trainers.tinker_server import KEY, TinkerProcess

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerProcess]:
    process = TinkerProcess(tmp_path_factory.mktemp("state"), "--max-loras", "2")
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
    asked = {"prompt": saved["prompt"], "max_tokens": 8, "temperature": 1.0, "seed": 11}
    ids = {"return_token_ids": True, "logprobs": 0, "ignore_eos": True}
    response = call(server, "/v1/completions", {"model": saved["path"], **asked, **ids})
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
    loaded = [card["id"] for card in call(server, "/v1/models")["data"]]
    assert any(name.startswith("tinker-") for name in loaded)
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.status == 204
    with pytest.raises(urllib.error.HTTPError) as refused:
        call(server, "/v1/completions", body)
    assert refused.value.code == 404
    assert "does not exist here" in refused.value.read().decode()
    time.sleep(1.1)  # for so long the list of models may be an old one
    assert [card["id"] for card in call(server, "/v1/models")["data"]] == ["tiny"]


def test_one_key_is_for_both(server: TinkerProcess, saved: Any) -> None:
    for path in ("/api/v1/training_runs", "/v1/models"):
        assert call(server, path)
        with pytest.raises(urllib.error.HTTPError) as refused:
            call(server, path, key="tml-another-secret")
        assert refused.value.code == 401
