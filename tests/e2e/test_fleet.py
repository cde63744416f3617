"""A served fleet of three as a trainer and an operator meet it: over HTTP, under load, by CLI."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from lockstep.fleet.remote import RemoteFleet
from lockstep.tokens.errors import LockstepError, NotFound
from tests.engine import checkpoints
from tests.fleet.live_fleet import SEQUENCES, Checkpoints
from tests.processes import GENERATE, TOKEN, ServeProcess
from tests.worker.adapters import write_adapter

PRIME = "/v1/rl"
"""What prime-rl is given as admin_base_url, after the host."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("allowed")


@pytest.fixture(scope="module")
def made(root: Path) -> Checkpoints:
    return Checkpoints.make(root)


@pytest.fixture(scope="module")
def served(root: Path) -> Iterator[ServeProcess]:
    process = ServeProcess("--workers", "3", "--sessions", "memory", "--checkpoint-root", str(root),
                           "--worker-args", "--max-model-len 512 --max-num-seqs 32",
                           LOCKSTEP_API_KEYS="data-key")  # fmt: skip
    yield process
    process.stop()


@pytest.fixture
async def admin(served: ServeProcess) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(served.admin_url, headers=headers) as session:
        yield session


async def send(
    session: aiohttp.ClientSession, verb: str, path: str, body: Any = None, **headers: str
) -> tuple[int, Any]:
    async with session.request(verb, path, json=body, headers=headers) as response:
        return response.status, await response.json(content_type=None)


async def check(served: ServeProcess, made: Checkpoints, admin: aiohttp.ClientSession) -> str:
    """Every worker responds as the checkpoint of the fleet's version does."""
    _, state = await send(admin, "GET", "/v1/rl/state")
    body = {"token_ids": [list(ids) for ids in SEQUENCES]}
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {TOKEN}"}) as session:
        for worker in served.workers:
            url = f"{worker['system_url']}/engine/probe"
            async with session.post(url, json=body) as response:
                result = await response.json()
            assert made.held(result["logprobs"]) == result["version"] == state["version"]
    return str(state["version"])


async def test_prime_rl_steers_the_fleet_with_its_own_requests(
    served: ServeProcess, made: Checkpoints, admin: aiohttp.ClientSession, root: Path
) -> None:
    assert (await send(admin, "GET", f"{PRIME}/health"))[0] == 200
    status, models = await send(admin, "GET", f"{PRIME}/v1/models")
    assert (status, len(models["data"])) == (200, 1)
    status, paused = await send(admin, "POST", f"{PRIME}/pause?mode=keep&clear_cache=false")
    assert (status, paused["mode"]) == (200, "keep")
    status, updated = await send(
        admin, "POST", f"{PRIME}/update_weights", {"weight_dir": str(made.paths["a"])}
    )
    assert (status, updated["version"]) == (200, "a"), updated
    assert (await send(admin, "GET", "/v1/rl/state"))[1]["paused"] == "keep"
    assert (await send(admin, "POST", f"{PRIME}/resume"))[0] == 200
    assert await check(served, made, admin) == "a"

    adapter = write_adapter(root / "adapter", seed=1)
    named = {"lora_name": "r8", "lora_path": str(adapter)}
    assert (await send(admin, "POST", f"{PRIME}/load_lora_adapter", named))[0] == 200
    _, models = await send(admin, "GET", f"{PRIME}/v1/models")
    assert "r8" in [card["id"] for card in models["data"]]
    body = {"lora_name": "r8"}
    assert (await send(admin, "POST", f"{PRIME}/v1/unload_lora_adapter", body))[0] == 200
    assert (await send(admin, "POST", f"{PRIME}/v1/unload_lora_adapter", body))[0] == 404
    status, result = await send(admin, "POST", f"{PRIME}/init_broadcaster", {
        "host": "127.0.0.1", "port": 1, "rank_offset": 0, "inference_world_size": 3,
        "timeout": 1, "quantize_in_weight_transfer": False, "backend": "smoke"})  # fmt: skip
    assert (status, result["error"]["param"]) == (400, "backend")


@pytest.mark.failure_mode("F31")
@pytest.mark.failure_mode("F30")
async def test_an_adapter_is_served_swapped_and_gone(
    served: ServeProcess, admin: aiohttp.ClientSession, root: Path
) -> None:
    path = write_adapter(root / "swapped", seed=2)
    named = {"lora_name": "x", "lora_path": str(path)}
    versions = []
    async with aiohttp.ClientSession(headers={"x-api-key": "data-key"}) as data:
        body = {"model": "x", "token_ids": [5, 6, 7],
                "sampling_params": {"max_tokens": 4, "logprobs": 1}}  # fmt: skip
        for seed in (2, 3):
            write_adapter(path, seed=seed)
            status, result = await send(admin, "POST", "/v1/rl/load_lora_adapter", named)
            assert status == 200, result
            status, response = await send(data, "POST", served.url + GENERATE, body)
            assert status == 200, response
            versions.append(response["choices"][0]["weight_versions"][0]["version"])
        assert len(set(versions)) == 2
        write_adapter(path, rank=200)
        status, result = await send(admin, "POST", "/v1/rl/load_lora_adapter", named)
        assert (status, result["error"]["reason"]) == (422, "bad_adapter")
        status, response = await send(data, "POST", served.url + GENERATE, body)
        again = response["choices"][0]["weight_versions"][0]["version"]
        assert (status, again) == (200, versions[1])
        assert (await send(admin, "POST", "/v1/rl/unload_lora_adapter", {"lora_name": "x"}))[
            0
        ] == 200
        assert (await send(data, "POST", served.url + GENERATE, body))[0] == 404


@pytest.mark.failure_mode("F33")
async def test_a_directory_that_may_not_be_read_is_refused_and_nothing_is_touched(
    served: ServeProcess, admin: aiohttp.ClientSession, root: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / "link").unlink(missing_ok=True)
    (root / "link").symlink_to(outside)
    _, before = await send(admin, "GET", "/v1/rl/state")
    cases = {"": 400, "relative/dir": 400, str(root / "missing"): 422, str(outside): 403,
             str(root / "link"): 403, f"{root}/../outside": 403, "/etc": 403}  # fmt: skip
    for path, expected in cases.items():
        body = {"weight_dir": path, "version": "n"}
        status, result = await send(admin, "POST", "/v1/rl/update_weights", body)
        assert (path, status) == (path, expected), result
        status, result = await send(
            admin, "POST", "/v1/rl/load_lora_adapter", {"lora_name": "n", "lora_path": path}
        )
        # An adapter that is not there yet is looked for again by prime-rl, which a 404 tells it.
        assert (path, status) == (path, 404 if expected == 422 else expected), result
    _, after = await send(admin, "GET", "/v1/rl/state")
    assert (after["version"], after["workers"]) == (before["version"], before["workers"])


@pytest.mark.failure_mode("F34")
async def test_a_broken_checkpoint_is_refused_in_validate_and_nothing_is_touched(
    served: ServeProcess, made: Checkpoints, admin: aiohttp.ClientSession, root: Path
) -> None:
    good = made.paths["c"]
    tensors = checkpoints.tensors_of(good)
    name = "model.norm.weight"
    assert name in tensors
    broken = {
        "missing": {n: t for n, t in tensors.items() if n != name},
        "shape": {**tensors, name: tensors[name][:-1]},
        "dtype": {**tensors, name: tensors[name].to(torch.int32)},
        "nan": {**tensors, name: tensors[name] * float("nan")},
    }
    paths = {kind: checkpoints.save(good, root / kind, tensors) for kind, tensors in broken.items()}
    paths["truncated"] = shutil.copytree(good, root / "truncated")
    weights = paths["truncated"] / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)
    before = await check(served, made, admin)
    for kind, path in paths.items():
        status, result = await send(
            admin, "POST", "/v1/rl/update_weights", {"weight_dir": str(path)}
        )
        assert (kind, status, result["error"]["reason"]) == (kind, 422, "bad_checkpoint")
        assert result["operation"]["workers"] == {}  # no worker got a request
    assert await check(served, made, admin) == before


@pytest.mark.failure_mode("F43")
@pytest.mark.failure_mode("F27")
async def test_an_update_under_load_loses_no_request_and_every_token_says_its_version(
    served: ServeProcess, made: Checkpoints
) -> None:
    choices: list[Any] = []
    over = asyncio.Event()

    async def client(number: int, data: aiohttp.ClientSession) -> None:
        while not over.is_set():
            body = {"token_ids": [5, 6, number],
                    "sampling_params": {"max_tokens": 120, "logprobs": 1, "ignore_eos": True,
                                        "seed": number}}  # fmt: skip
            status, result = await send(data, "POST", served.url + GENERATE, body)
            assert status == 200, result
            choices.append(result["choices"][0])

    async with (
        aiohttp.ClientSession(headers={"x-api-key": "data-key"}) as data,
        RemoteFleet(served.admin_url, token=TOKEN) as fleet,
    ):
        clients = [asyncio.create_task(client(number, data)) for number in range(6)]
        begun = (await fleet.state())["version"]
        order = [begun]
        for label in ("under-b", "under-a"):
            seen = len(choices)
            while len(choices) < seen + 6:
                await asyncio.sleep(0.01)
            updated = await fleet.update_weights(made.paths[label[-1]], label, key=label)
            assert (updated.pause_seconds or 0) > 0
            order.append(label)
        seen = len(choices)
        while len(choices) < seen + 12:
            await asyncio.sleep(0.01)
        over.set()
        await asyncio.gather(*clients)
        made.scores |= {label: made.scores[label[-1]] for label in order[1:]}
    mixed = 0
    for choice in choices:
        spans = choice["weight_versions"]
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
        assert spans[-1]["end"] == len(choice["token_ids"]) == 120
        places = [order.index(span["version"]) for span in spans]
        assert places == sorted(places)
        mixed += len(spans) > 1
    assert mixed, "no request was in flight during an update"
    assert choices[-1]["weight_versions"][-1]["version"] == order[-1]


@pytest.mark.failure_mode("F25")
async def test_a_trainer_that_lost_the_response_sends_again_and_nothing_is_done_twice(
    served: ServeProcess, made: Checkpoints, admin: aiohttp.ClientSession
) -> None:
    body = {"weight_dir": str(made.paths["c"]), "version": "lost"}
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await send(admin, "POST", "/v1/rl/update_weights", body, **{"Idempotency-Key": "lost"})
    status, result = await send(
        admin, "POST", "/v1/rl/update_weights", body, **{"Idempotency-Key": "lost"}
    )
    assert (status, result["version"]) == (200, "lost")
    _, state = await send(admin, "GET", "/v1/rl/state")
    assert [one["version"] for one in state["operations"]].count("lost") == 1
    other = {**body, "version": "another"}
    status, _ = await send(
        admin, "POST", "/v1/rl/update_weights", other, **{"Idempotency-Key": "lost"}
    )
    assert status == 409
    status, operation = await send(admin, "GET", f"/v1/rl/operations/{result['operation']['id']}")
    assert (status, operation["status"], len(operation["workers"])) == (200, "done", 3)


@pytest.mark.failure_mode("F42")
async def test_only_the_admin_token_on_loopback_by_post_changes_anything(
    served: ServeProcess, admin: aiohttp.ClientSession
) -> None:
    posts = ["pause", "resume", "flush_cache", "update_weights", "load_lora_adapter",
             "unload_lora_adapter", "v1/load_lora_adapter", "init_broadcaster"]  # fmt: skip
    for path in [*posts, "workers"]:
        url = f"{served.admin_url}/v1/rl/{path}"
        for headers in ({}, {"authorization": "Bearer data-key"}, {"x-api-key": TOKEN}):
            async with aiohttp.ClientSession(headers=headers) as session:
                assert (path, (await send(session, "POST", url, {}))[0]) == (path, 401)
        if path in posts:
            assert (path, (await send(admin, "GET", f"/v1/rl/{path}"))[0]) == (path, 405)
        assert (await send(admin, "POST", f"/v1/rl/{path}", {}, host="evil.example"))[0] == 403
    _, state = await send(admin, "GET", "/v1/rl/state")
    assert (state["ready"], state["paused"]) == (True, None)


def test_the_shell_can_trust_what_the_commands_say_and_their_exit_codes(
    served: ServeProcess, made: Checkpoints, root: Path
) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LOCKSTEP_")}
    environ = {**clean, "LOCKSTEP_ADMIN_URL": served.admin_url, "LOCKSTEP_ADMIN_TOKEN": TOKEN}

    def lockstep(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "lockstep", *arguments]
        process = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
        return process.returncode, process.stdout

    code, out = lockstep("pause", "--json", "--lease", "60")
    assert (code, json.loads(out)["status"]) == (0, "paused")
    where = str(made.paths["b"])
    code, out = lockstep("update-weights", where, "--version", "cli", "--json")
    assert (code, json.loads(out)["version"]) == (0, "cli")
    assert lockstep("resume")[0] == 0
    code, out = lockstep("state", "--json")
    state = json.loads(out)
    assert (code, state["serving"], state["ready"], state["version"]) == (0, 3, True, "cli")
    assert lockstep("update-weights", str(root / "none"))[0] == 1
    assert lockstep("pause", "--mode", "never")[0] == 2


@pytest.mark.failure_mode("F22")
async def test_a_fleet_that_lost_all_its_workers_refuses_everything_with_503(
    served: ServeProcess, made: Checkpoints, admin: aiohttp.ClientSession
) -> None:
    """The last test of this module: nobody is left after it."""
    async with RemoteFleet(served.admin_url, token=TOKEN) as fleet:
        for worker in served.workers:
            await fleet.drain(worker["id"], drain_seconds=5)
        with pytest.raises(NotFound):
            await fleet.drain(served.workers[0]["id"])
        with pytest.raises(LockstepError):
            await fleet.update_weights(made.paths["a"], "nobody")
    bodies: dict[str, Any] = {
        "pause": None, "resume": None, "flush_cache": None,
        "update_weights": {"weight_dir": str(made.paths["a"]), "version": "nobody"},
        "load_lora_adapter": {"lora_name": "x", "lora_path": str(made.paths["a"])},
        "unload_lora_adapter": {"lora_name": "x"},
        "init_broadcaster": {"host": "127.0.0.1", "port": 1},
    }  # fmt: skip
    for path, body in bodies.items():
        status, result = await send(admin, "POST", f"/v1/rl/{path}", body)
        assert (path, status) == (path, 503), result
    assert (await send(admin, "GET", "/v1/rl/ready"))[0] == 503
    assert (await send(admin, "GET", "/v1/rl/health"))[0] == 200
