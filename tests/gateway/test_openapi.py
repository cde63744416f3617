"""The description says what the gateway serves, and nothing else."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from lockstep.gateway.openapi.document import ROUTE_DOCS, OpenApiRoutes, describe
from lockstep.protocol.openai.chat_request import ChatRequest
from lockstep.protocol.openai.completions import CompletionRequest
from lockstep.protocol.vllm.generate_request import GenerateBody
from lockstep.protocol.vllm.tokenize import DetokenizeRequest, TokenizeRequest


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(Starlette(routes=OpenApiRoutes().routes))


@pytest.fixture(scope="module")
def document(client: TestClient) -> dict[str, Any]:
    return dict(client.get("/openapi.json").json())


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*map(references, node.values()))
    return set().union(*map(references, node)) if isinstance(node, list) else set()


def test_the_document_holds_together(document: dict[str, Any]) -> None:
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
        assert {"200", "default"} <= operation["responses"].keys()


@pytest.mark.parametrize(
    "struct",
    [ChatRequest, CompletionRequest, GenerateBody, TokenizeRequest, DetokenizeRequest],
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
        app.CompletionsRoutes,
        app.TokenizeRoutes,
        app.StatusRoutes,
        app.GenerateRoutes,
    )
    served = {
        re.sub(r":\w+}", "}", route.path) for group in groups for route in group(context).routes
    }
    described = {path for path in document["paths"] if not path.startswith("/sessions/")}
    assert described == served | {"/metrics"}


def test_the_page_stands_alone_and_names_every_route(client: TestClient) -> None:
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
