"""Keys are tenants: what one key has, another can neither use nor see, on real processes."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from lockstep.storage.key_file import KeyFile
from tests.processes import GENERATE, TOKEN, ServeProcess

ABORT = "/inference/v1/abort_requests"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Reverse: 40213"}]
LONG = {"max_tokens": 900, "min_tokens": 900, "temperature": 1.0}


class Client:
    """Requests with one key, or with the admin token."""

    def __init__(self, http: aiohttp.ClientSession, url: str, key: str | None) -> None:
        self._http, self._url = http, url
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}

    async def send(
        self, path: str, body: Any = None, *, verb: str | None = None, **headers: str
    ) -> tuple[int, Any]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        method = verb or ("GET" if body is None else "POST")
        options: dict[str, Any] = {} if body is None else {"json": body}
        async with self._http.request(
            method, self._url + path, headers={**self._headers, **named}, **options
        ) as response:
            return response.status, await response.json(content_type=None)

    async def chat(self, messages: list[Any] = HELLO, **headers: str) -> tuple[int, Any]:
        body = {"messages": messages, "max_tokens": 8, "temperature": 0}
        return await self.send(CHAT, body, **headers)


class Gateway:
    """A gateway with a key file, and its clients."""

    def __init__(self, served: ServeProcess, keys: KeyFile, http: aiohttp.ClientSession) -> None:
        self.served, self.keys, self._http = served, keys, http
        self.admin = Client(http, served.admin_url, TOKEN)

    def client(self, key: str | None) -> Client:
        return Client(self._http, self.served.url, key)

    async def cached_tokens(self) -> float:
        """Prompt tokens that the worker took from its prefix cache so far."""
        async with self._http.get(self.served.workers[0]["url"] + "/metrics") as response:
            text = await response.text()
        (number,) = re.findall(r"lockstep_worker_prefix_hit_tokens_total{.*} (\S+)", text)
        return float(number)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> KeyFile:
    return KeyFile(tmp_path_factory.mktemp("keys") / "keys.json")


@pytest.fixture(scope="module")
def keys(key_file: KeyFile) -> dict[str, str]:
    return {tenant: key_file.add(tenant)[1] for tenant in ("alice", "bob", "default")}


@pytest.fixture(scope="module")
def served(key_file: KeyFile, keys: dict[str, str]) -> Iterator[ServeProcess]:
    process = ServeProcess(
        "--sessions", "memory", "--key-file", str(key_file.path),
        "--worker-args", "--max-model-len 1024",
    )  # fmt: skip
    yield process
    process.stop()


@pytest_asyncio.fixture
async def gateway(served: ServeProcess, key_file: KeyFile) -> AsyncIterator[Gateway]:
    async with aiohttp.ClientSession() as http:
        yield Gateway(served, key_file, http)


@pytest.mark.failure_mode("F64")
async def test_a_session_of_another_key_can_be_neither_joined_nor_read(
    gateway: Gateway, keys: dict[str, str]
) -> None:
    alice, bob = gateway.client(keys["alice"]), gateway.client(keys["bob"])
    assert (await alice.chat(x_session_id="mine"))[0] == 200
    for where in ("/v1/session", "/sessions/mine/v1/session"):
        assert (await bob.send(where, x_session_id="mine"))[0] == 404
    status, view = await alice.send("/v1/session", x_session_id="mine")
    assert status == 200
    assert view["session"]["turns"] == 1
    # The same id is another session: nothing of the other one's history is in it.
    assert (await bob.chat([{"role": "user", "content": "Hi"}], x_session_id="mine"))[0] == 200
    _, theirs = await bob.send("/sessions/mine/v1/session")
    assert theirs["session"]["turns"] == 1
    assert theirs["samples"][0]["token_ids"] != view["samples"][0]["token_ids"]
    assert (await alice.send("/v1/session", x_session_id="mine"))[1] == view
    _, page = await gateway.admin.send("/v1/rl/sessions")
    assert {"alice~mine", "bob~mine"} <= {one["id"] for one in page["sessions"]}
    # What the control plane calls it opens nothing on the data plane.
    for name in ("alice~mine", "alice%7Emine"):
        assert (await bob.send(f"/sessions/{name}/v1/session"))[0] == 400
    assert (await gateway.client(None).send("/v1/session", x_session_id="mine"))[0] == 401


@pytest.mark.failure_mode("F64")
async def test_a_request_of_another_key_cannot_be_aborted(
    gateway: Gateway, keys: dict[str, str]
) -> None:
    alice, bob = gateway.client(keys["alice"]), gateway.client(keys["bob"])
    body = {"token_ids": [1, 2, 3], "sampling_params": LONG}
    running = asyncio.create_task(alice.send(GENERATE, body, x_request_id="run"))
    await asyncio.sleep(0.3)
    for other in (bob, gateway.client(keys["default"])):
        _, stopped = await other.send(ABORT, {"request_ids": ["run", "generate-tokens-run"]})
        assert stopped["aborted"] == 0
    deadline = time.monotonic() + 20
    while not (await alice.send(ABORT, {"request_ids": ["generate-tokens-run"]}))[1]["aborted"]:
        assert time.monotonic() < deadline
        assert not running.done()
    status, response = await running
    assert status == 200
    assert response["request_id"] == "generate-tokens-run"
    assert response["choices"][0]["finish_reason"] == "abort"


async def test_events_carry_the_id_that_the_client_gave(
    gateway: Gateway, keys: dict[str, str]
) -> None:
    body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3}, "stream": True}
    headers = {"authorization": f"Bearer {keys['alice']}", "x-request-id": "r" * 256}
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.post(gateway.served.url + GENERATE, json=body) as response:
            text = await response.text()
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert events
    assert {one["request_id"] for one in events} == {"generate-tokens-" + "r" * 256}


@pytest.mark.failure_mode("F64")
@pytest.mark.parametrize("salt", [None, "5"])
async def test_a_prompt_that_another_key_sent_is_not_cached_for_this_one(
    gateway: Gateway, keys: dict[str, str], salt: str | None
) -> None:
    ids = [(7 * at) % 90 + (11 if salt else 3) for at in range(600)]
    body = {"token_ids": ids, "sampling_params": {"max_tokens": 1}, "cache_salt": salt}
    hits = []
    for name in ("alice", "bob", "default", "alice", "bob", "default"):
        before = await gateway.cached_tokens()
        assert (await gateway.client(keys[name]).send(GENERATE, body))[0] == 200
        hits.append(await gateway.cached_tokens() - before)
    assert hits[:3] == [0, 0, 0]
    assert min(hits[3:]) > 0


async def test_keys_are_rotated_while_the_gateway_runs(
    gateway: Gateway, keys: dict[str, str]
) -> None:
    first, old = gateway.keys.add("carol")
    await asyncio.sleep(1.1)
    carol = gateway.client(old)
    assert (await carol.chat(x_session_id="hers"))[0] == 200
    _, new = gateway.keys.add("carol")
    gateway.keys.revoke(first.id)
    await asyncio.sleep(1.1)
    assert (await carol.chat())[0] == 401
    status, view = await gateway.client(new).send("/v1/session", x_session_id="hers")
    assert status == 200
    assert view["session"]["turns"] == 1
    gateway.keys.path.write_text("{")
    await asyncio.sleep(1.1)
    assert (await gateway.client(new).chat())[0] == 200


@pytest.mark.failure_mode("F64")
async def test_a_session_key_can_use_and_read_one_session_and_nothing_else(
    gateway: Gateway, keys: dict[str, str]
) -> None:
    status, minted = await gateway.admin.send(
        "/v1/rl/sessions", {"id": "task", "tenant": "alice", "max_calls": 3}
    )
    assert status == 201
    assert minted["id"] == "alice~task"
    assert (await gateway.admin.send("/v1/rl/sessions", {"id": "task", "tenant": "alice"}))[
        0
    ] == 409
    agent, alice = gateway.client(minted["key"]), gateway.client(keys["alice"])
    await alice.chat(x_session_id="secret")
    assert (await agent.chat())[0] == 200  # the key alone names the session
    path = minted["base_path"]
    assert path == "/sessions/task/v1"
    status, view = await agent.send(f"{path}/session")
    assert status == 200
    assert view["session"] | {"turns": 1, "id": "alice~task"} == view["session"]
    for body, headers in ((HELLO, {"x_session_id": "secret"}), (HELLO, {"x_session_id": "new"})):
        assert (await agent.chat(body, **headers))[0] == 404
    assert (await agent.send("/sessions/secret/v1/session"))[0] == 404
    for route, body in ((ABORT, {"request_ids": ["x"]}), ("/metrics", None)):
        assert (await agent.send(route, body))[0] == 403
    assert (await agent.send("/v1/models"))[0] == 200
    # What is sampled by ids is recorded, too, and three calls were its budget.
    generate = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}}
    assert (await agent.send(GENERATE, generate))[0] == 200
    more = [*HELLO, {"role": "assistant", "content": "?"}, *HELLO]
    assert (await agent.chat(more))[0] == 200
    status, refused = await agent.chat(more)
    assert status == 403
    assert "budget" in refused["error"]["message"]
    # Reading by the agent is not reading by the trainer.
    _, view = await agent.send("/v1/session")
    assert view["session"]["unread_turns"] == 3
    finish = "/v1/rl/sessions/alice~task/finish"
    assert (await gateway.admin.send(finish, {"reward": 0.5}))[1]["reward"] == 0.5
    assert (await gateway.admin.send(finish, {"reward": 1.0}))[0] == 409
    _, view = await gateway.admin.send("/v1/rl/sessions/alice~task")
    assert {sample["reward"] for sample in view["samples"]} == {0.5}
    status, refused = await agent.chat(more)
    assert status == 403
    assert "finished" in refused["error"]["message"]
    assert (await gateway.admin.send("/v1/rl/sessions/alice~task", verb="DELETE"))[0] == 200
    assert (await agent.send("/v1/session"))[0] == 401


async def test_calls_at_once_do_not_pass_a_budget(gateway: Gateway) -> None:
    _, minted = await gateway.admin.send("/v1/rl/sessions", {"max_calls": 2})
    agent = gateway.client(minted["key"])
    answers = await asyncio.gather(*(agent.chat() for _ in range(8)))
    assert sorted(status for status, _ in answers) == [200, 200, *[403] * 6]


@pytest.mark.failure_mode("F64")
async def test_prompts_of_session_keys_are_shared_only_within_a_group(gateway: Gateway) -> None:
    async def agent(**options: str) -> Client:
        return gateway.client((await gateway.admin.send("/v1/rl/sessions", options))[1]["key"])

    alone, grouped = [await agent(), await agent()], [await agent(cache_salt="g") for _ in "ab"]
    words = " ".join(f"word{at}" for at in range(60))
    hits = []
    for one in (*alone, *grouped):
        before = await gateway.cached_tokens()
        assert (await one.chat([{"role": "user", "content": words}]))[0] == 200
        hits.append(await gateway.cached_tokens() - before)
    assert hits[:3] == [0, 0, 0]
    assert hits[3] > 0


async def test_a_session_key_ends_with_its_time(gateway: Gateway) -> None:
    _, minted = await gateway.admin.send("/v1/rl/sessions", {"seconds": 1.0})
    agent = gateway.client(minted["key"])
    assert (await agent.chat())[0] == 200
    await asyncio.sleep(1.1)
    assert (await agent.chat())[0] == 401


async def test_twenty_thousand_ids_are_aborted_within_a_second(
    gateway: Gateway, keys: dict[str, str]
) -> None:
    alice = gateway.client(keys["alice"])
    body = {"token_ids": [1, 2, 3], "sampling_params": LONG}
    running = asyncio.create_task(alice.send(GENERATE, body, x_request_id="last"))
    await asyncio.sleep(0.3)
    names = [f"no-such-request-{number}" for number in range(19_999)]
    started = time.monotonic()
    status, stopped = await alice.send(ABORT, {"request_ids": [*names, "last"]})
    took = time.monotonic() - started
    assert status == 200
    assert stopped["aborted"] == 1
    assert (await running)[1]["choices"][0]["finish_reason"] == "abort"
    assert took < 1.0


async def test_with_shared_sessions_all_keys_are_one_tenant(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    first, second = (keys.add(name)[1] for name in ("alice", "bob"))
    process = ServeProcess(
        "--sessions", "memory", "--key-file", str(keys.path), "--shared-sessions"
    )
    try:
        async with aiohttp.ClientSession() as http:
            gateway = Gateway(process, keys, http)
            assert (await gateway.client(first).chat(x_session_id="s"))[0] == 200
            status, view = await gateway.client(second).send("/v1/session", x_session_id="s")
            assert status == 200
            assert view["session"]["id"] == "s"
    finally:
        process.stop()
