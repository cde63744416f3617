"""The description says what the gateway serves, and nothing else."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from lockstep.gateway.openapi.control_docs import CONTROL_ROUTE_DOCS
from lockstep.gateway.openapi.document import ROUTE_DOCS, TOKEN, OpenApiRoutes, describe
from lockstep.protocol.anthropic.messages_request import MessagesRequest
from lockstep.protocol.control.fleet import AddWorker, LoadAdapter, PauseFleet, UpdateWeights
from lockstep.protocol.control.sessions import FinishSession, MintSession
from lockstep.protocol.openai.chat_request import ChatRequest
from lockstep.protocol.openai.completions import CompletionRequest
from lockstep.protocol.openai.responses_request import ResponsesRequest
from lockstep.protocol.vllm.generate_request import GenerateBody
from lockstep.protocol.vllm.tokenize import DetokenizeRequest, TokenizeRequest

PLANES = {"data": OpenApiRoutes(), "control": OpenApiRoutes(CONTROL_ROUTE_DOCS, "Control", TOKEN)}


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(Starlette(routes=PLANES["data"].routes))


def document_of(plane: str) -> dict[str, Any]:
    return dict(TestClient(Starlette(routes=PLANES[plane].routes)).get("/openapi.json").json())


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return document_of("data")


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*map(references, node.values()))
    return set().union(*map(references, node)) if isinstance(node, list) else set()


@pytest.mark.parametrize("plane", PLANES)
def test_the_document_holds_together(plane: str) -> None:
    document = document_of(plane)
    assert document["openapi"].startswith("3.1")
    schemas = document["components"]["schemas"]
    assert references(document) <= {f"#/components/schemas/{name}" for name in schemas}
    for name in schemas:
        assert re.fullmatch(r"[A-Za-z0-9._-]+", name)
    assert "x-any-of" not in msgspec.json.encode(document).decode()
    operations = [
        (path, operation)
        for path, methods in document["paths"].items()
        for operation in methods.values()
    ]
    ids = [operation["operationId"] for _, operation in operations]
    assert len(set(ids)) == len(ids)
    for path, operation in operations:
        named = {each["name"] for each in operation["parameters"] if each["in"] == "path"}
        assert named == set(re.findall(r"{(\w+)}", path))
        assert operation["responses"].keys() in ({"200", "default"}, {"201", "default"})


@pytest.mark.parametrize(
    "struct",
    [
        ChatRequest,
        MessagesRequest,
        ResponsesRequest,
        CompletionRequest,
        GenerateBody,
        TokenizeRequest,
        DetokenizeRequest,
    ],
)
def test_every_field_of_a_request_is_described(document: dict[str, Any], struct: Any) -> None:
    schema = document["components"]["schemas"][struct.__name__]
    assert list(schema["properties"]) == list(struct.__struct_fields__)
    assert schema["additionalProperties"] is False


def test_every_route_of_the_data_plane_is_described(document: dict[str, Any]) -> None:
    app = pytest.importorskip("lockstep.gateway.app")
    context: Any = type("Nothing", (), {"pool": None, "models": None, "sessions": None})()
    groups = (
        app.ChatRoutes,
        app.MessagesRoutes,
        app.ResponsesRoutes,
        app.CompletionsRoutes,
        app.TokenizeRoutes,
        app.StatusRoutes,
        app.GenerateRoutes,
        app.CallerSessionRoutes,
        app.ServerInfoRoutes,
    )
    served = {
        re.sub(r":\w+}", "}", route.path) for group in groups for route in group(context).routes
    }
    described = {path for path in document["paths"] if not path.startswith("/sessions/")}
    assert described == served | {"/metrics"}


def test_every_route_of_the_control_plane_is_described() -> None:
    app = pytest.importorskip("lockstep.gateway.app")
    context: Any = type("Nothing", (), {"pool": None, "models": None, "sessions": None})()
    routes = [
        *app.ControlRoutes(context, None).routes,
        *app.ControlSessionRoutes(context).routes,
        *app.EngineMetricsRoutes(context).routes,
    ]
    served = {
        (method, re.sub(r":\w+}", "}", route.path))
        for route in routes
        for method in route.methods - {"HEAD"}
    }
    assert {(one.method, one.path) for one in CONTROL_ROUTE_DOCS} == served


@pytest.mark.parametrize(
    "struct", [UpdateWeights, PauseFleet, LoadAdapter, AddWorker, MintSession, FinishSession]
)
def test_every_field_of_a_change_is_described(struct: Any) -> None:
    schema = document_of("control")["components"]["schemas"][struct.__name__]
    assert list(schema["properties"]) == list(struct.__struct_fields__)
    assert schema["additionalProperties"] is False


def test_only_the_control_plane_always_needs_its_token() -> None:
    assert document_of("control")["security"] == [{"key": []}]
    assert document_of("data")["security"] == [{}, {"key": []}]


def test_the_page_loads_nothing_and_names_every_route(client: TestClient) -> None:
    page = client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    for route in ROUTE_DOCS:
        assert f"<code>{route.path}</code>" in page.text
    assert "max_tokens" in page.text
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//", page.text)
    assert "<script" not in page.text


def test_texts_of_the_page_are_escaped() -> None:
    class Odd(msgspec.Struct):
        """<script>alert(1)</script>"""

        field: str = "<b>"

    from lockstep.gateway.openapi.page import page
    from lockstep.gateway.openapi.route_doc import RouteDoc

    shown = page(describe([RouteDoc("POST", "/odd", Odd, Odd, "<i>odd</i>")]))
    for bad in ("<script", "<b>'", "<i>odd"):
        assert bad not in shown
