"""The data plane as it is served: straight ways and routed ones treat a request alike."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from lockstep.fleet.routing.pool import Pool
from lockstep.gateway.app import data_app
from lockstep.gateway.context import GatewayContext
from lockstep.gateway.metrics import GatewayMetrics
from lockstep.gateway.model_registry import ModelRegistry
from lockstep.gateway.options import GatewayOptions
from lockstep.gateway.sessions.sessions import Sessions
from lockstep.http.server.server import listen, serving, url_of
from tests.backends import scripted
from tests.backends.scripted import Reply, Request, events, models, whole

GENERATE = "/inference/v1/generate"
KEY = "a-data-key"
BODY = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2, "logprobs": 0}}


def choice(ids: list[int], finish: str | None, named: list[int] | None = None) -> dict[str, Any]:
    content = [{"token_id": token, "logprob": -0.5} for token in named or ids]
    spans = [{"version": "1", "start": 0, "end": 2}]
    return {
        "index": 0,
        "token_ids": ids,
        "finish_reason": finish,
        "logprobs": {"content": content},
        "weight_versions": spans if finish else None,
    }


def encoded(one: dict[str, Any]) -> bytes:
    return json.dumps({"choices": [one]}).encode()


def worker(response: Reply, owner: str = "lockstep"):
    def script(request: Request) -> Reply:
        if request.path == "/v1/models":
            return models(owner)
        return response if request.path == GENERATE else whole({})

    return script


@asynccontextmanager
async def gateway(
    response: Reply, *, owner: str = "lockstep", keys: tuple[str, ...] = ()
) -> AsyncIterator[tuple[aiohttp.ClientSession, scripted.Server]]:
    async with (
        scripted.serving(worker(response, owner)) as server,
        Pool() as pool,
        Sessions() as kept,
    ):
        await pool.add(server.url, transport="vllm")
        context = GatewayContext(
            pool=pool, models=ModelRegistry(pool.models, "tiny"), sessions=kept
        )
        app = data_app(context, GatewayOptions(api_keys=keys), GatewayMetrics(context))
        with listen("127.0.0.1", 0) as sock:
            async with serving([(app, sock)]), aiohttp.ClientSession(url_of(sock)) as http:
                yield http, server


@pytest.mark.parametrize("owner", ["lockstep", "vllm"])
async def test_ids_are_forwarded_and_the_worker_s_response_is_returned(owner: str) -> None:
    async with gateway(whole(encoded(choice([7, 8], "stop"))), owner=owner) as (http, server):
        async with http.post(GENERATE, json=BODY, headers={"X-Request-Id": "mine"}) as response:
            assert response.status == 200
            (received,) = (await response.json())["choices"]
        assert received["token_ids"] == [7, 8]
        (sent,) = server.requests_to(GENERATE)
        assert sent.json["token_ids"] == [1, 2, 3]
        assert sent.headers["x-request-id"] == "mine"


@pytest.mark.parametrize("owner", ["lockstep", "vllm"])
async def test_a_misaligned_response_is_never_handed_on(owner: str) -> None:
    async with gateway(whole(encoded(choice([7, 8], "stop", [7, 9]))), owner=owner) as (http, _):
        async with http.post(GENERATE, json=BODY) as response:
            assert response.status == 502
            assert (await response.json())["error"]["reason"] == "misaligned"


@pytest.mark.parametrize("owner", ["lockstep", "vllm"])
@pytest.mark.parametrize("pause", [0.0, 0.02])
async def test_events_before_a_broken_one_are_delivered_and_it_is_not(
    owner: str, pause: float
) -> None:
    datas = (
        encoded(choice([5], None)),
        encoded(choice([6], None)),
        encoded(choice([7], "stop", [9])),
    )
    async with gateway(events(*datas, pause=pause), owner=owner) as (http, _):
        async with http.post(GENERATE, json={**BODY, "stream": True}) as response:
            lines = [line[6:] for line in (await response.text()).split("\n") if line]
    assert [json.loads(each)["choices"][0]["token_ids"] for each in lines[:2]] == [[5], [6]]
    assert json.loads(lines[2])["error"]["reason"] == "misaligned"
    assert lines[3:] == ["[DONE]"]


async def test_a_stream_that_ends_early_is_an_error() -> None:
    async with gateway(events(encoded(choice([5], None)))) as (http, _):
        async with http.post(GENERATE, json={**BODY, "stream": True}) as response:
            text = await response.text()
    assert "missing_finish" in text


PATHS = [GENERATE, "/v1/chat/completions", "/sessions/s/v1/chat/completions", "/tokenize"]


@pytest.mark.parametrize("path", PATHS)
async def test_every_way_needs_the_key_and_the_host(path: str) -> None:
    async with gateway(whole({}), keys=(KEY,)) as (http, server):
        async with http.post(path, json={}, headers={"X-Request-Id": "mine"}) as response:
            assert response.status == 401
            assert (await response.json())["error"]["request_id"] == "mine"
        known = {"authorization": f"Bearer {KEY}"}
        async with http.post(path, json={}, headers={**known, "host": "evil.example"}) as response:
            assert response.status == 403
        async with http.post(path, json={}, headers={**known, "x-long": "x" * 7000}) as response:
            assert response.status == 400
        assert not server.requests_to(GENERATE)


@pytest.mark.parametrize("path", PATHS)
async def test_other_methods_are_refused_on_every_way(path: str) -> None:
    async with gateway(whole({})) as (http, _), http.get(path) as response:
        assert response.status == 405


@pytest.mark.parametrize("path", ["/nowhere", "/sessions/s/nowhere", "/sessions//v1/completions"])
async def test_unknown_paths_are_not_found(path: str) -> None:
    async with gateway(whole({})) as (http, _), http.post(path, json={}) as response:
        assert response.status == 404


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/messages", "did you mean /v1/messages?"),
        ("/sessions/s/responses", "did you mean /sessions/s/v1/responses?"),
        ("/session/s/v1/responses", "did you mean /sessions/s/v1/responses?"),
        ("/v1/embeddings", "GET /docs lists the routes"),
    ],
)
async def test_an_unknown_path_suggests_the_right_one(path: str, meant: str) -> None:
    async with gateway(whole({})) as (http, _), http.post(path, json={}) as response:
        assert response.status == 404
        assert (await response.json())["error"]["message"].endswith(meant)


async def test_a_session_in_the_path_and_another_in_the_header_are_refused() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    headers = {"X-Session-ID": "other"}
    async with gateway(whole({})) as (http, _):
        path = "/sessions/mine/v1/chat/completions"
        async with http.post(path, json=body, headers=headers) as response:
            assert response.status == 400
            assert "'mine'" in (await response.json())["error"]["message"]


async def test_responses_are_counted_by_route_and_status() -> None:
    async with gateway(whole(encoded(choice([7, 8], "stop")))) as (http, _):
        for body in (BODY, BODY, {}):
            async with http.post(GENERATE, json=body):
                pass
        async with http.post("/sessions/s/v1/chat/completions", json={}):
            pass
        async with http.get("/metrics") as response:
            text = await response.text()
    assert f'requests_total{{route="{GENERATE}",status="200"}} 2.0' in text
    assert f'requests_total{{route="{GENERATE}",status="400"}} 1.0' in text
    assert f'request_seconds_count{{route="{GENERATE}"}} 3.0' in text
    assert 'route="/sessions/{session}/v1/chat/completions",status="400"} 1.0' in text


async def test_raw_paths_create_no_series_of_metrics() -> None:
    paths = ["/{}", "/sessions/{}/v1/chat/completions", "/v1/models/{}", "/sessions/s/{}"]
    async with gateway(whole({}), keys=(KEY,)) as (http, _):
        key = {"authorization": f"Bearer {KEY}"}
        for number in range(500):
            for path in paths:
                headers = [{}, key, {**key, "host": "evil"}][number % 3]
                async with http.get(path.format(f"made-up-{number}"), headers=headers):
                    pass
        async with http.get("/metrics", headers=key) as response:
            text = await response.text()
    assert "made-up" not in text
    routes = {line.partition('route="')[2].partition('"')[0] for line in text.splitlines()}
    assert routes <= {"", "unknown", "/sessions/{session}/v1/chat/completions",
                      "/v1/models/{model}"}  # fmt: skip
    assert 'route="/v1/models/{model}",status="401"} 167.0' in text


@pytest.mark.parametrize("owner", ["lockstep", "vllm"])
async def test_an_error_before_the_first_token_of_a_stream_has_a_status(owner: str) -> None:
    refusal = whole({"error": {"message": "too long", "reason": "context_length"}}, 400)
    async with gateway(refusal, owner=owner) as (http, _):
        async with http.post(GENERATE, json={**BODY, "stream": True}) as response:
            assert response.status == 400
            assert "too long" in (await response.json())["error"]["message"]


async def test_a_stream_without_a_serving_worker_has_a_status() -> None:
    async with gateway(Reply(fault="reset")) as (http, _):
        async with http.post(GENERATE, json={**BODY, "stream": True}) as response:
            assert response.status == 503
            assert response.headers["retry-after"]


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/v1/models"])
async def test_an_internal_error_keeps_its_cause_to_the_log(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the password is swordfish")

    monkeypatch.setattr(Pool, "run", broken)
    monkeypatch.setattr(Pool, "models", broken)
    async with gateway(whole({})) as (http, _):
        method = "GET" if path == "/v1/models" else "POST"
        body = None if method == "GET" else BODY
        async with http.request(method, path, json=body) as response:
            assert response.status == 500
            error = (await response.json())["error"]
    assert "swordfish" not in json.dumps(error)
    assert "swordfish" in caplog.text
    assert error["request_id"] in caplog.text


@pytest.mark.failure_mode("F64")
@pytest.mark.parametrize("owner", ["lockstep", "vllm"])
@pytest.mark.parametrize("salt", [{}, {"cache_salt": None}, {"cache_salt": "5"}])
async def test_workers_see_another_salt_and_another_id_for_each_key(
    owner: str, salt: dict[str, str | None]
) -> None:
    keys = ("the-first-key", "the-second-key")
    completed = whole(encoded(choice([7, 8], "stop")))
    async with gateway(completed, owner=owner, keys=keys) as (http, server):
        for key in keys:
            headers = {"authorization": f"Bearer {key}", "X-Request-Id": "mine"}
            async with http.post(GENERATE, json={**BODY, **salt}, headers=headers) as response:
                assert response.status == 200
        first, second = server.requests_to(GENERATE)
    salts = {one.json["cache_salt"] for one in (first, second)}
    ids = {one.headers["x-request-id"] for one in (first, second)}
    assert len(salts) == len(ids) == 2
    assert not salts & {None, "5"}
    assert "mine" not in ids


async def test_tinker_paths_report_that_there_is_no_trainer() -> None:
    async with gateway(whole({})) as (http, _):
        for method, path in (("GET", "healthz"), ("POST", "create_session")):
            async with http.request(method, f"/api/v1/{path}", json={}) as response:
                assert response.status == 404
                assert "lockstep tinker MODEL" in (await response.json())["error"]["message"]


async def test_control_paths_on_the_data_port_name_the_admin_port() -> None:
    async with gateway(whole({})) as (http, _):
        for method, path in (
            ("GET", "/v1/rl/state"),
            ("POST", "/v1/rl/pause"),
            ("GET", "/dashboard"),
        ):
            async with http.request(method, path, json={}) as response:
                assert response.status == 404
                assert (
                    f"{path} is a route of the admin port"
                    in ((await response.json())["error"]["message"])
                )
