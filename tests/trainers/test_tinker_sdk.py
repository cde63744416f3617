"""The Tinker SDK against `lockstep tinker`: every call, restarts, lost responses, many samplers."""

from __future__ import annotations

import json
import math
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lockstep.integrations.tinker.protocol import tinker_pb2 as pb
from tests.trainers.dropping_proxy import DroppingProxy
from tests.trainers.tinker_server import KEY, PROGRAMS, PYTHON, TinkerProcess

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerProcess]:
    process = TinkerProcess(tmp_path_factory.mktemp("state"), "--max-loras", "8")
    yield process
    assert process.stop() == 0


@pytest.fixture(scope="module")
def walk(server: TinkerProcess, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return server.program(tmp_path_factory.mktemp("home"), "tinker_walk")


def test_the_model_is_told_under_its_name_with_its_tokenizer(walk: Any) -> None:
    assert walk["models"] == [["tiny", 4096], [walk["base_model"], 4096]]
    assert walk["info"] == ["tiny", True, 8]
    assert len(walk["tokens"]) > 3
    assert Path(walk["base_model"]).is_dir()


def test_losses_are_those_of_the_documentation(walk: Any) -> None:
    logprobs = walk["forward"]["logprobs"]
    advantages = [0.0, 1.0, -0.5] * 3
    ratio = math.exp(-0.1)  # every token was sampled with a logprob 0.1 higher
    clipped = 0.9
    assert math.isclose(walk["forward"]["metrics"]["loss:sum"], -sum(logprobs), rel_tol=1e-6)
    expected = {
        "cross_entropy": -sum(logprobs),
        "importance_sampling": -sum(ratio * each for each in advantages),
        "ppo": -sum(min(ratio * each, max(ratio, clipped) * each) for each in advantages),
        "cispo": -sum(
            max(ratio, clipped) * own * each for own, each in zip(logprobs, advantages, strict=True)
        ),
        "dro": -sum(
            own * each - 0.5 * 0.1 * 0.01 for own, each in zip(logprobs, advantages, strict=True)
        ),
        "gspo": -sum(min(ratio * each, max(ratio, clipped) * each) for each in advantages),
    }
    for name, value in expected.items():
        assert walk["losses"][name] == pytest.approx(value, rel=1e-4), name
    assert walk["grad_norm"] > 0
    assert walk["custom"] > 0


def test_samples_have_the_trainers_logprobs_bit_for_bit(server: TinkerProcess, walk: Any) -> None:
    sampled = walk["sampled"]
    worst = max(
        abs(ours - theirs)
        for rows in zip(sampled["logprobs"], sampled["trainer"], strict=True)
        for ours, theirs in zip(*rows, strict=True)
    )
    assert worst <= (0.0 if server.ready["trainer"]["exact"] else 1e-3)
    assert walk["seeded_again"]
    assert walk["ephemeral"]
    assert walk["base_differs"]


def test_ids_and_texts_stop_a_sample_and_stay_in_it(walk: Any) -> None:
    expected, _ = walk["stop"]
    assert walk["stopped"] == [expected, "stop"]
    assert walk["worded"][0] == walk["sampled"]["tokens"][0][:1]
    assert walk["worded"][1] == "stop"
    assert walk["sampled"]["reasons"] == ["length", "length"]


def test_prompts_are_scored_with_alternatives(walk: Any) -> None:
    prompt, tops = walk["tops"]
    assert prompt == walk["computed"]
    assert prompt[0] is None
    assert tops[0] is None
    assert all(len(row) == 3 for row in tops[1:])


def test_weights_and_moments_are_restored(walk: Any) -> None:
    after = walk["after"]
    assert after["optimizer"] == after["saved"] != after["weights"]


def test_runs_checkpoints_and_sessions_are_told(walk: Any) -> None:
    assert walk["run"][:3] == ["tiny", 8, {"k": "v"}]
    assert walk["run"][3].endswith("/weights/one")
    assert walk["runs"] >= 3
    assert walk["checkpoints"] == [["sampler_weights/first", False], ["weights/one", True]]
    assert walk["expires"]
    assert walk["weights_info"] == ["tiny", 8, True]
    assert walk["left"] == ["sampler_weights/first"]
    assert walk["session"] == [3, True]


@pytest.mark.failure_mode("F81")
def test_what_cannot_be_done_is_refused_with_the_reason(walk: Any) -> None:
    says = {
        "model": "base_model is 'gpt-7': this server has tiny",
        "rank": "rank is 999: expected 1 to 64; for higher ranks start the server with "
        "--max-lora-rank",
        "loss": "'stable_reinforce' is not supported",
        "step_after": "failed, so its gradients are missing",
        "step_again": "it was not refused",
        "target": "weights has shape (2,): expected (9,)",
        "path": "does not exist on this server",
        "deleted": "does not exist on this server",
        "taken": "exists: choose another name",
    }
    for name, reason in says.items():
        assert reason in walk["refused"][name], name


@pytest.fixture(scope="module")
def made(server: TinkerProcess, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A checkpoint, an export, and the URLs of its files."""
    return server.program(tmp_path_factory.mktemp("home"), "tinker_download")


def test_checkpoints_are_downloaded_as_adapters(
    server: TinkerProcess, made: Any, tmp_path: Path
) -> None:
    """By the command of the SDK, which exports a training checkpoint, and deletes the export."""
    adapters = []
    for name in ("saved", "exported"):
        command = ("checkpoint", "download", made[name], "--output", f"{tmp_path}/{name}")
        server.run(tmp_path, "-m", "tinker.cli", *command)
        (directory,) = (tmp_path / name).iterdir()
        assert json.loads((directory / "adapter_config.json").read_text())["r"] == 4
        adapters.append(load_file(directory / "adapter_model.safetensors"))
    trained, shared = adapters
    assert trained.keys() == shared.keys()
    assert all(torch.equal(trained[name], shared[name]) for name in trained)
    assert any(bool(trained[name].any()) for name in trained if "lora_B" in name)
    left = call(server, "checkpoints")[1]["checkpoints"]
    exports = [each["tinker_path"] for each in left if each["checkpoint_type"] == "external"]
    assert exports == [made["exported"]]


def test_a_download_needs_its_secret_url_and_no_key(made: Any) -> None:
    url = made["urls"]["adapter_config.json"]
    with urllib.request.urlopen(url, timeout=30) as response:
        assert json.loads(response.read())["peft_type"] == "LORA"
    other = url.replace("adapter_config.json", "record.json")
    guessed = url.replace(url.split("/")[-2], "A" * 43)
    for wrong in (other, guessed):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(wrong, timeout=30)


def test_a_wrong_key_is_refused(server: TinkerProcess) -> None:
    request = urllib.request.Request(
        f"{server.url}/api/v1/get_server_capabilities", headers={"x-api-key": "tml-other"}
    )
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(request, timeout=30)


@pytest.mark.failure_mode("F80")
def test_chunks_out_of_order_are_one_call(server: TinkerProcess, tmp_path: Path) -> None:
    results = server.program(tmp_path, "tinker_chunks")
    assert results["pieces"] == results["whole"]
    assert len(results["whole"]["first"]) == 2500


def call(
    server: TinkerProcess, route: str, body: Any = None, kind: str = "json"
) -> tuple[int, Any]:
    """Status and body of a call without the SDK, which would refuse to send it."""
    raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"x-api-key": KEY, "content-type": f"application/{kind}"}
    request = urllib.request.Request(f"{server.url}/api/v1/{route}", raw, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.mark.failure_mode("F81")
def test_calls_that_cannot_be_read_are_over_and_spoil_the_step_they_belong_to(
    server: TinkerProcess,
) -> None:
    def done(answer: tuple[int, Any]) -> Any:
        assert answer[0] == 200, answer
        return call(server, "retrieve_future", {"request_id": answer[1]["request_id"]})[1]

    session = call(server, "create_session", {"tags": [], "sdk_version": "0.36.0"})[1]["session_id"]
    model = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
    model_id = done(call(server, "create_model", model | {"lora_config": {"rank": 4}}))["model_id"]
    request = pb.ForwardBackwardRequest(model_id=model_id, seq_id=1)
    broken = request.SerializeToString() + b"\x1a\x01\xff"  # a datum of one byte
    status, answer = call(server, "forward_backward", broken, "x-protobuf")
    assert status == 400
    assert "is not a ForwardBackwardRequest message" in answer["error"]["message"]
    step = {"model_id": model_id, "adam_params": {"learning_rate": 1e-3}}
    refused = done(call(server, "optim_step", step | {"seq_id": 2}))
    assert "seq_id 1 failed" in refused["error"]
    status, answer = call(server, "optim_step", step | {"seq_id": 3, "momentum": 1})
    assert status == 400
    assert "momentum" in answer["error"]["message"]
    assert "metrics" in done(call(server, "optim_step", step | {"seq_id": 4}))
    status, _ = call(server, "no_such_route", {})
    assert status == 404


def test_workers_that_compute_closely_are_told_and_their_samplers_proved(tmp_path: Path) -> None:
    server = TinkerProcess(tmp_path / "state", "--worker-args", "--arithmetic close")
    try:
        assert server.ready["trainer"]["exact"] is False
        assert server.ready["trainer"]["note"]
        assert len(server.program(tmp_path, "tinker_steps")["logprobs"]) == 10
    finally:
        server.stop()


@pytest.mark.failure_mode("F82")
def test_forty_samplers_are_alive_in_eight_slots(server: TinkerProcess, tmp_path: Path) -> None:
    results = server.program(tmp_path, "tinker_samplers", "40")
    assert len({tuple(row) for row in results["sampled"]}) == 40
    assert results["backwards"] == results["sampled"]
    if server.ready["trainer"]["exact"]:
        assert results["sampled"] == results["trained"]


@pytest.mark.failure_mode("F80")
def test_a_lost_response_applies_a_gradient_once(server: TinkerProcess, tmp_path: Path) -> None:
    routes = ("forward_backward", "optim_step", "save_weights_for_sampler", "create_model")
    proxy = DroppingProxy(server.url, routes)
    try:
        lost = server.program(tmp_path, "tinker_steps", TINKER_BASE_URL=proxy.url)
    finally:
        proxy.close()
    assert proxy.dropped["forward_backward"] >= 2
    assert proxy.dropped["optim_step"] >= 2
    assert lost == server.program(tmp_path, "tinker_steps")


@pytest.mark.failure_mode("F83")
def test_a_killed_server_goes_on_from_what_was_saved_and_tells_the_truth(tmp_path: Path) -> None:
    server = TinkerProcess(tmp_path / "state")
    try:
        client = subprocess.Popen(
            [str(PYTHON), str(PROGRAMS / "tinker_resume.py")], cwd=tmp_path,
            env=server.environ(tmp_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert client.stdout is not None
        assert client.stdout.readline() == "saved\n"
        server.kill()
        server.start()
        out, _ = client.communicate("\n", timeout=240)
        result = json.loads(out.strip().splitlines()[-1])
    finally:
        server.stop()
    assert client.returncode == 0
    assert result["same_sampler"]
    assert "the server was restarted" in result["told"]
    assert f"its last saved state is {result['path']} (after step 2" in result["told"]
    assert result["again"] == result["losses"][2:]
