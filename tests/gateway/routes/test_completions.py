"""/v1/completions over HTTP in front of a real worker: text, ids, echo, scores and streams."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from starlette.applications import Starlette

from lockstep.backends.transport import ModelCard
from lockstep.fleet.routing.affinity import Affinity
from lockstep.fleet.routing.pool import Pool
from lockstep.gateway.context import GatewayContext
from lockstep.gateway.model_registry import ModelRegistry
from lockstep.gateway.routes.completions import CompletionsRoutes
from lockstep.gateway.sessions.sessions import Sessions
from lockstep.http.handlers import EXCEPTION_HANDLERS
from lockstep.http.server.server import listen, serving, url_of
from lockstep.protocol.common.request import GenerateRequest
from lockstep.render import Renderer
from lockstep.tokens.errors import Unavailable
from tests.processes import WorkerProcess

IDS = [71, 72, 12, 85, 90]
ROUTE = "/v1/completions"


@pytest.fixture
def worker(shared_worker: WorkerProcess) -> WorkerProcess:
    return shared_worker


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    return Renderer.load("tiny")


class Client:
    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url, self.http = url, http

    async def post(self, headers: dict[str, str] | None = None, **body: Any) -> tuple[int, Any]:
        async with self.http.post(self.url + ROUTE, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def complete(self, **body: Any) -> dict[str, Any]:
        status, response = await self.post(**body)
        assert status == 200, response
        return dict(response)

    async def refused(self, status: int = 400, **body: Any) -> dict[str, Any]:
        received, response = await self.post(**body)
        assert received == status, response
        return dict(response["error"])

    async def chunks(self, **body: Any) -> list[Any]:
        async with self.http.post(self.url + ROUTE, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            lines = [line async for line in response.content if line.startswith(b"data: ")]
        assert lines[-1].strip() == b"data: [DONE]"
        return [json.loads(line[6:]) for line in lines[:-1]]


@asynccontextmanager
async def served(context: GatewayContext) -> AsyncIterator[Client]:
    routes = CompletionsRoutes(context).routes
    app = Starlette(routes=routes, exception_handlers=EXCEPTION_HANDLERS)
    with listen("127.0.0.1", 0) as sock:
        async with serving([(app, sock)]), aiohttp.ClientSession() as http:
            yield Client(url_of(sock), http)


@pytest_asyncio.fixture
async def client(worker: WorkerProcess) -> AsyncIterator[Client]:
    async with Pool() as pool:
        await pool.add(worker.url)
        models = ModelRegistry(pool.models, "tiny")
        async with served(GatewayContext(pool=pool, models=models, sessions=Sessions())) as client:
            yield client


async def test_ids_and_text_are_the_same_prompt(client: Client, renderer: Renderer) -> None:
    options = {"temperature": 0, "max_tokens": 5, "return_token_ids": True, "logprobs": 0}
    by_ids = await client.complete(prompt=IDS, **options)
    by_text = await client.complete(prompt=renderer.decode(IDS), **options)
    (choice,) = by_ids["choices"]
    assert choice["prompt_token_ids"] == IDS
    assert choice == by_text["choices"][0]
    assert by_ids["object"] == "text_completion"
    assert by_ids["id"].startswith("cmpl-")
    assert by_ids["usage"]["total_tokens"] == 5 + len(choice["token_ids"])
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])


async def test_a_start_of_experts_alone_requests_none(client: Client) -> None:
    response = await client.complete(prompt=IDS, max_tokens=2, routed_experts_prompt_start=3)
    assert response["choices"][0].get("routed_experts") is None


@pytest.mark.failure_mode("F44")
async def test_logprobs_are_the_engines(client: Client, worker: WorkerProcess) -> None:
    options = {"temperature": 0.7, "seed": 5, "max_tokens": 8}
    _, direct = await worker.generate(IDS, logprobs=2, **options)
    response = await client.complete(prompt=IDS, logprobs=2, return_token_ids=True, **options)
    (mine,), (theirs,) = response["choices"], direct["choices"]
    assert mine["token_ids"] == theirs["token_ids"]
    entries = theirs["logprobs"]["content"]
    assert mine["logprobs"]["token_logprobs"] == [entry["logprob"] for entry in entries]
    assert [sorted(top.values()) for top in mine["logprobs"]["top_logprobs"]] == [
        sorted(top["logprob"] for top in entry["top_logprobs"]) for entry in entries
    ]
    assert mine["weight_versions"] == theirs["weight_versions"]
    assert (mine["temperature"], mine["logprob_mode"]) == (0.7, direct["logprob_mode"])


@pytest.mark.failure_mode("F46")
async def test_echo_without_tokens_scores_the_prompt(
    client: Client, worker: WorkerProcess, renderer: Renderer
) -> None:
    _, direct = await worker.generate(IDS, max_tokens=1, prompt_logprobs=0)
    response = await client.complete(prompt=IDS, max_tokens=0, echo=True, logprobs=2)
    (choice,) = response["choices"]
    scores = choice["logprobs"]["token_logprobs"]
    assert scores[0] is None
    assert scores[1:] == [
        entry[str(token)]["logprob"]
        for entry, token in zip(direct["prompt_logprobs"][1:], IDS[1:], strict=True)
    ]
    assert choice["text"] == renderer.decode(IDS)
    assert choice["prompt_logprobs"][1][str(IDS[1])]["logprob"] == scores[1]
    assert response["usage"]["completion_tokens"] == 0
    assert (choice["finish_reason"], choice["temperature"]) == ("length", 1.0)
    assert choice["scored_version"] == direct["choices"][0]["weight_versions"][0]["version"]


async def test_an_echo_covers_prompt_and_completion(client: Client, renderer: Renderer) -> None:
    text = "naïve 🙂 "
    response = await client.complete(
        prompt=text, max_tokens=4, echo=True, logprobs=0, temperature=0, return_token_ids=True,
        skip_special_tokens=False,
    )  # fmt: skip
    (choice,) = response["choices"]
    ids = renderer.encode(text, special=True) + choice["token_ids"]
    logprobs = choice["logprobs"]
    assert choice["text"] == renderer.decode(ids)
    assert [len(column) for column in logprobs.values()] == [len(ids)] * 4
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert logprobs["text_offset"][-1] <= len(choice["text"])


async def test_tokens_as_ids(client: Client) -> None:
    response = await client.complete(
        prompt=IDS, max_tokens=3, logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True
    )
    (choice,) = response["choices"]
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == names
    for name, top in zip(names, choice["logprobs"]["top_logprobs"], strict=True):
        assert name in top


@pytest.mark.failure_mode("F11")
async def test_prompts_and_choices_keep_their_places(client: Client) -> None:
    prompts = [IDS, IDS[:2], [80, 81]]
    response = await client.complete(
        prompt=prompts, n=2, temperature=5.0, seed=3, max_tokens=4, return_token_ids=True
    )
    choices = response["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert [choice["prompt_token_ids"] for choice in choices] == [
        each for each in prompts for _ in range(2)
    ]
    assert choices[0]["token_ids"] != choices[1]["token_ids"]
    assert response["usage"]["prompt_tokens"] == sum(map(len, prompts))
    texts = await client.complete(prompt=["a", "b"], max_tokens=1)
    assert len(texts["choices"]) == 2


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_chunks_add_up_to_the_whole(client: Client, echo: bool, logprobs: int | None) -> None:
    body = {
        "prompt": [IDS, IDS[:3]], "n": 2, "seed": 1, "max_tokens": 6, "echo": echo,
        "logprobs": logprobs, "return_token_ids": True,
    }  # fmt: skip
    whole = await client.complete(**body)
    *chunks, usage = await client.chunks(**body, stream_options={"include_usage": True})
    assert usage.get("usage") == whole["usage"], usage
    for expected in whole["choices"]:
        parts = [c for e in chunks for c in e["choices"] if c["index"] == expected["index"]]
        assert "".join(part["text"] for part in parts) == expected["text"]
        assert sum((part["token_ids"] for part in parts), []) == expected["token_ids"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [
            expected["finish_reason"]
        ]
        assert parts[0]["prompt_token_ids"] == expected["prompt_token_ids"]
        assert parts[-1]["weight_versions"] == expected["weight_versions"]
        for column in expected["logprobs"] or ():
            joined = sum((part["logprobs"][column] for part in parts), [])
            assert joined == expected["logprobs"][column]


@pytest.mark.failure_mode("F18")
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [71, 10**30]}, "prompt[1]"),
        ({"prompt": [71.0]}, "prompt[0]"),
        ({"prompt": [71, "x"]}, "prompt[1]"),
        ({"prompt": [[71], []]}, "prompt[1]"),
        ({"prompt": [[71], [72, -5]]}, "prompt[1][1]"),
        ({}, "prompt"),
        ({"prompt": IDS, "max_tokens": 0}, "max_tokens"),
        ({"prompt": IDS, "max_tokens": 0, "echo": True, "n": 2}, "n"),
        ({"prompt": IDS, "max_tokens": -1}, "max_tokens"),
        ({"prompt": IDS, "logprobs": 101}, "logprobs"),
        ({"prompt": IDS, "best_of": 3}, "best_of"),
        ({"prompt": IDS, "suffix": "end"}, "suffix"),
        ({"prompt": IDS, "presence_penalty": 2.5}, "presence_penalty"),
        ({"prompt": IDS, "temperature": -1}, "temperature"),
        ({"prompt": IDS, "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": IDS, "cache_salt": ""}, "cache_salt"),
        ({"prompt": IDS, "bogus": 1}, "bogus"),
        ({"prompt": IDS, "routed_experts_prompt_start": 9}, "routed_experts_prompt_start"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    client: Client, body: dict[str, Any], param: str
) -> None:
    error = await client.refused(**body)
    assert error["param"] == param
    assert error["request_id"]


async def test_a_prompt_that_fills_the_context_is_scored(client: Client) -> None:
    body = await client.complete(prompt=[71] * 1024, max_tokens=0, echo=True, logprobs=0)
    assert len(body["choices"][0]["logprobs"]["token_logprobs"]) == 1024


@pytest.mark.failure_mode("F18")
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_s_rejection_has_its_status_in_streams_too(
    client: Client, stream: bool
) -> None:
    error = await client.refused(prompt=[71, 99999], stream=stream)
    assert "99999" in error["message"]
    assert (await client.refused(prompt=[71] * 1100, stream=stream))["reason"] == "prompt_too_long"
    assert (await client.refused(404, prompt=IDS, model="x"))["reason"] == "unknown_model"
    gone = await client.refused(409, prompt=IDS, weight_version="no-such", stream=stream)
    assert gone["reason"] == "version_unavailable"


class Recorder:
    """A pool and its worker in one, which records the requests and refuses them."""

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.routes: list[Affinity] = []
        self.transport = self

    async def run(self, route: Affinity, call: Any, _: Any = None) -> Any:
        self.routes.append(route)
        return await call(self)

    async def stream(self, what: Any, call: Any = None, _: Any = None) -> AsyncIterator[Any]:
        if call is None:
            await self.generate(what)
        self.routes.append(what)
        async for item in call(self):
            yield item

    async def generate(self, request: GenerateRequest) -> Any:
        self.requests.append(request)
        raise Unavailable("only recorded")


@pytest.mark.failure_mode("F03")
@pytest.mark.failure_mode("F04")
@pytest.mark.parametrize("stream", [False, True])
async def test_salt_priority_and_versions_reach_the_engine_once(stream: bool) -> None:
    async def models() -> list[ModelCard]:
        return [ModelCard("tiny", 1024, "0"), ModelCard("lora", 1024, "0", parent="tiny")]

    recorder = Recorder()
    pool: Any = recorder
    context = GatewayContext(pool=pool, models=ModelRegistry(models, "tiny"), sessions=Sessions())
    async with served(context) as client:
        error = await client.refused(
            503, prompt=IDS, cache_salt="mine", priority=-3, model="lora", weight_version="v1",
            min_weight_version="v0", stream=stream, headers={"X-Session-ID": "s1"},
        )  # fmt: skip
        assert error["message"] == "only recorded"
        await client.refused(503, prompt=IDS, cache_salt="mine", model="lora")
    first, second = recorder.requests
    assert (first.cache_salt, first.priority, first.model) == ("mine", -3, "lora")
    assert (first.weight_version, first.min_weight_version) == ("v1", "v0")
    assert second.priority == 0
    assert recorder.routes == [
        Affinity.of(IDS, session="s1"),
        Affinity.of(IDS, salt="mine", adapter="lora"),
    ]


@pytest.mark.failure_mode("F47")
async def test_a_client_that_leaves_stops_its_request(
    client: Client, worker: WorkerProcess
) -> None:
    body = {"prompt": IDS, "max_tokens": 400, "ignore_eos": True, "stream": True}
    async with client.http.post(client.url + ROUTE, json=body) as response:
        await response.content.readline()
    for _ in range(200):
        _, health = await worker.get("/health")
        if not health["running"]:
            break
    assert health["running"] == 0


@pytest.mark.failure_mode("F66")
@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_cuts_the_text_and_no_token(client: Client, include: bool) -> None:
    options: dict[str, Any] = {
        "prompt": IDS, "max_tokens": 40, "seed": 6, "return_token_ids": True, "logprobs": 0,
        "ignore_eos": True,
    }  # fmt: skip
    (free,) = (await client.complete(**options))["choices"]
    stop = free["text"][7:10]
    shown = free["text"][: free["text"].index(stop)] + stop * include
    options |= {"stop": stop, "include_stop_str_in_output": include}
    (choice,) = (await client.complete(**options))["choices"]
    assert (choice["text"], choice["finish_reason"]) == (shown, "stop")
    assert choice["stop_reason"] == stop
    count = len(choice["token_ids"])
    assert choice["token_ids"] == free["token_ids"][:count]
    assert len(choice["logprobs"]["tokens"]) == count
    assert stop in "".join(choice["logprobs"]["tokens"])
    parts = [one for event in await client.chunks(**options) for one in event["choices"]]
    assert "".join(one["text"] for one in parts) == shown
    assert [token for one in parts for token in one["token_ids"]] == choice["token_ids"]
    assert parts[-1]["stop_reason"] == stop


@pytest.mark.failure_mode("F67")
async def test_a_completion_is_held_to_a_regular_expression(client: Client) -> None:
    body = await client.complete(
        prompt=IDS, max_tokens=60, seed=6, structured_outputs={"regex": "[a-c]{3}[.]"}
    )
    (choice,) = body["choices"]
    assert re.fullmatch("[a-c]{3}[.]", choice["text"])


async def test_up_to_a_hundred_alternatives_come(client: Client) -> None:
    body = await client.complete(
        prompt=IDS, max_tokens=1, logprobs=40, echo=True, prompt_logprobs=100
    )
    (choice,) = body["choices"]
    assert len(choice["logprobs"]["top_logprobs"][-1]) in (40, 41)
    assert len(choice["prompt_logprobs"][2]) in (100, 101)
