"""Sessions on the control plane: listed in pages, read as samples, ended."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from starlette.applications import Starlette

from lockstep.fleet.remote import RemoteFleet
from lockstep.fleet.routing.pool import Pool
from lockstep.gateway.context import GatewayContext
from lockstep.gateway.model_registry import ModelRegistry
from lockstep.gateway.routes.control_sessions import ControlSessionRoutes
from lockstep.gateway.sessions.sessions import Sessions
from lockstep.http.handlers import EXCEPTION_HANDLERS
from lockstep.http.server.server import listen, serving, url_of
from lockstep.render import Renderer
from lockstep.tokens import RoutedExperts, Sample
from tests.gateway.sessions.test_sessions import QUESTION, completion, talk


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    return Renderer.load("tiny")


class Admin:
    def __init__(self, url: str, http: aiohttp.ClientSession, sessions: Sessions) -> None:
        self.url, self.http, self.sessions = url, http, sessions

    async def send(self, path: str, verb: str = "GET", **query: str) -> tuple[int, Any]:
        url = f"{self.url}/v1/rl/sessions{path}"
        async with self.http.request(verb, url, params=query) as response:
            raw = await response.read()
            packed = response.content_type == "application/msgpack"
            return response.status, (msgspec.msgpack if packed else msgspec.json).decode(raw)


@pytest_asyncio.fixture
async def admin() -> AsyncIterator[Admin]:
    async with Sessions() as sessions:
        context = GatewayContext(
            pool=Pool(), models=ModelRegistry(Pool().models, "tiny"), sessions=sessions
        )
        routes = ControlSessionRoutes(context).routes
        app = Starlette(routes=routes, exception_handlers=EXCEPTION_HANDLERS)
        with listen("127.0.0.1", 0) as sock:
            async with serving([(app, sock)]), aiohttp.ClientSession() as http:
                yield Admin(url_of(sock), http, sessions)


async def test_sessions_are_listed_in_pages(admin: Admin, renderer: Renderer) -> None:
    for name in "dbaec":
        await talk(admin.sessions, name, renderer, 1)
    seen: list[str] = []
    after = ""
    while True:
        status, page = await admin.send("", limit="2", after=after)
        assert status == 200
        seen += [each["id"] for each in page["sessions"]]
        if page["next"] is None:
            break
        after = page["next"]
    assert seen == list("abcde")


async def test_every_branch_is_a_sample(admin: Admin, renderer: Renderer) -> None:
    await talk(admin.sessions, "a", renderer, 3)
    session = await admin.sessions.open("a", renderer)
    plan = await session.plan([QUESTION])
    message = {"role": "assistant", "content": "else"}
    await session.commit(plan, [(completion(renderer, plan, "else"), message)])
    expected = await admin.sessions.samples("a")
    assert len(expected) == 2
    status, response = await admin.send("/a")
    assert status == 200
    assert (response["session"]["id"], response["session"]["turns"]) == ("a", 4)
    lines = map(msgspec.json.encode, response["samples"])
    assert [Sample.from_json(line) for line in lines] == expected
    status, packed = await admin.send("/a", format="msgpack")
    assert packed["samples"] == msgspec.msgpack.decode(msgspec.msgpack.encode(expected))


async def test_kinds_and_weights_are_chosen_by_the_query(admin: Admin, renderer: Renderer) -> None:
    await talk(admin.sessions, "a", renderer, 2)
    session = await admin.sessions.open("a", renderer)
    plan = await session.plan([QUESTION])
    message = {"role": "assistant", "content": "else"}
    await session.commit(plan, [(completion(renderer, plan, "else"), message)])
    async with RemoteFleet(admin.url, token="any") as fleet:
        for kinds in (["main"], ["main", "unknown"], ["auxiliary"]):
            expected = await admin.sessions.samples("a", kinds=kinds, weights="session")
            query = {"kinds": ",".join(kinds), "weights": "session"}
            _, response = await admin.send("/a", **query)
            lines = map(msgspec.json.encode, response["samples"])
            assert [Sample.from_json(line) for line in lines] == expected
            assert [each.kind for each in expected] == [k for k in kinds if k != "auxiliary"]
            assert await fleet.samples("a", kinds=kinds, weights="session") == expected


async def test_experts_are_bytes_in_msgpack(admin: Admin, renderer: Renderer) -> None:
    session = await admin.sessions.open("a", renderer)
    plan = await session.plan([QUESTION])
    rows = len(plan.prompt_ids) + 1
    experts = RoutedExperts(bytes(rows * 4), (rows, 2, 2), "uint8")
    turn = completion(renderer, plan, "x", experts=experts)
    await session.commit(plan, [(turn, {"role": "assistant", "content": "x"})])
    _, packed = await admin.send("/a", format="msgpack")
    assert packed["samples"][0]["experts"]["data"] == experts.data


async def test_an_aborted_turn_is_trained_only_on_request(admin: Admin, renderer: Renderer) -> None:
    session = await admin.sessions.open("a", renderer)
    plan = await session.plan([QUESTION])
    cut = completion(renderer, plan, "half", finish="abort")
    await session.commit(plan, [(cut, {"role": "assistant", "content": "half"})])
    for query, trained in (({}, False), ({"train_aborted": "true"}, True)):
        _, response = await admin.send("/a", **query)
        assert any(response["samples"][0]["sampled_mask"]) is trained
        assert response["samples"][0]["aborts"] == 1


async def test_a_session_ends_once(admin: Admin, renderer: Renderer) -> None:
    await talk(admin.sessions, "a", renderer, 1)
    assert await admin.send("/a", "DELETE") == (200, {"id": "a", "deleted": True})
    for verb in ("DELETE", "GET"):
        status, response = await admin.send("/a", verb)
        assert (status, response["error"]["reason"]) == (404, "not_found")
        assert response["error"]["request_id"]


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        ("/a", {"format": "xml"}, "format"),
        ("/a", {"train_aborted": "perhaps"}, "train_aborted"),
        ("/a", {"page": "1"}, "page"),
        ("/a", {"kinds": "main,title"}, "kinds"),
        ("/a", {"kinds": ""}, "kinds"),
        ("/a", {"weights": "turn"}, "weights"),
        ("", {"limit": "0"}, "limit"),
        ("", {"limit": "²"}, "limit"),
        ("", {"limit": "9" * 5000}, "limit"),
    ],
)
async def test_a_question_that_cannot_be_read_is_refused(
    admin: Admin, renderer: Renderer, path: str, query: dict[str, str], param: str
) -> None:
    await talk(admin.sessions, "a", renderer, 1)
    status, response = await admin.send(path, **query)
    assert (status, response["error"]["param"]) == (400, param)
