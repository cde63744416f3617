"""GET /openapi.json and GET /docs: the routes and fields of one port of the gateway."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from lockstep.gateway.messages import route as messages
from lockstep.gateway.openapi import page as docs_page
from lockstep.gateway.openapi.route_doc import RouteDoc
from lockstep.gateway.openapi.schemas import schemas_of
from lockstep.gateway.responses import route as responses
from lockstep.gateway.routes import caller_session, completions, server_info, tokenize
from lockstep.http.handlers import json_response
from lockstep.protocol.common.model_card import ModelCard, ModelList
from lockstep.protocol.openai import chat_response
from lockstep.protocol.openai.chat_request import ChatRequest
from lockstep.protocol.vllm import generate_response
from lockstep.protocol.vllm.abort import AbortRequest
from lockstep.protocol.vllm.generate_request import GenerateBody
from lockstep.protocol.vllm.rendered import RenderedChat

__all__ = ["ROUTE_DOCS", "TOKEN", "OpenApiRoutes", "RouteDoc", "describe"]

Security = dict[str, list[str]]
TITLE = "Lockstep gateway"
# A key is needed only where the gateway was started with keys.
OPTIONAL_KEY: tuple[Security, ...] = ({}, {"key": []})
TOKEN: tuple[Security, ...] = ({"key": []},)
SESSION = "X-Session-ID"


class Aborted(msgspec.Struct):
    status: str
    aborted: int | None


class Health(msgspec.Struct):
    status: str
    workers: int
    serving: int


class ErrorDetailSchema(msgspec.Struct):
    """The error. `code` is OpenAI's where clients match it, else the HTTP status; `reason` is a
    stable name, `param` the field."""

    message: str
    type: str
    param: str | None
    code: int | str
    reason: str
    request_id: str | None


class ErrorSchema(msgspec.Struct):
    error: ErrorDetailSchema


ROUTE_DOCS: tuple[RouteDoc, ...] = (
    RouteDoc(
        "POST", "/inference/v1/generate", GenerateBody, generate_response.GenerateResponse,
        "Token ids in, token ids and logprobs out: vLLM's dialect.", streams=True,
    ),
    RouteDoc(
        "POST", "/inference/v1/abort_requests", AbortRequest, Aborted,
        "Aborts requests by id; returns how many were running.", sessions=False,
    ),
    RouteDoc(
        "POST", "/v1/chat/completions", ChatRequest, chat_response.ChatCompletionBody,
        "OpenAI's chat, with the extras of vLLM, Dynamo and NeMo.", streams=True,
    ),
    RouteDoc(
        "POST", "/v1/chat/completions/tokens", ChatRequest, chat_response.ChatCompletionBody,
        "OpenAI's chat for a prompt of token ids in `tokens`.", streams=True,
    ),
    RouteDoc(
        "POST", "/v1/chat/completions/render", ChatRequest, RenderedChat,
        "The chat as a body for /inference/v1/generate; nothing is sampled.",
    ),
    *messages.ROUTE_DOCS,
    *responses.ROUTE_DOCS,
    *completions.ROUTE_DOCS,
    *tokenize.ROUTE_DOCS,
    *caller_session.ROUTE_DOCS,
    *server_info.ROUTE_DOCS,
    RouteDoc("GET", "/v1/models", None, ModelList, "The base model, and its adapters."),
    RouteDoc("GET", "/v1/models/{model}", None, ModelCard, "One model."),
    RouteDoc("GET", "/health", None, Health, "Whether any worker serves."),
    RouteDoc("GET", "/metrics", None, None, "Prometheus metrics.", sessions=False),
)  # fmt: skip


class OpenApiRoutes:
    """Routes of the OpenAPI document of a port, by default the data plane's, built at start."""

    def __init__(
        self,
        routes: Sequence[RouteDoc] = ROUTE_DOCS,
        title: str = TITLE,
        security: Sequence[Security] = OPTIONAL_KEY,
    ) -> None:
        document = describe(routes, title, security)
        self._json = msgspec.json.encode(document)
        self._page = docs_page.page(document)
        self.routes = [
            Route("/openapi.json", self.description, methods=["GET"]),
            Route("/docs", self.docs, methods=["GET"]),
        ]

    async def description(self, _: Request) -> Response:
        return json_response(self._json)

    async def docs(self, _: Request) -> Response:
        return HTMLResponse(self._page)


def describe(
    routes: Iterable[RouteDoc], title: str = TITLE, security: Sequence[Security] = OPTIONAL_KEY
) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of these routes."""
    docs = list(routes)
    structs = [struct for doc in docs for struct in (doc.request, doc.response) if struct]
    references, components = schemas_of([*structs, ErrorSchema])
    paths: dict[str, Any] = {}
    for doc in docs:
        for prefix in ("", "/sessions/{session}") if doc.sessions else ("",):
            methods = paths.setdefault(prefix + doc.path, {})
            methods[doc.method.lower()] = _operation(doc, prefix, references)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": _version()},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": list(security),
    }


def _operation(doc: RouteDoc, prefix: str, references: dict[Any, Any]) -> dict[str, Any]:
    names = re.findall(r"{(\w+)}", prefix + doc.path)
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ]
    headers = [*doc.headers, SESSION] if doc.sessions and not prefix else doc.headers
    parameters += [{"name": name, "in": "header", "schema": {"type": "string"}} for name in headers]
    parameters += [
        {"name": query.name, "in": "query", "schema": query.schema} for query in doc.query
    ]
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if doc.response is not None:
        content = {"application/json": {"schema": references[doc.response]}}
    if doc.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    error = {"application/json": {"schema": references[ErrorSchema]}}
    operation: dict[str, Any] = {
        "summary": doc.summary,
        "operationId": re.sub(r"\W+", "_", f"{doc.method.lower()}{prefix}{doc.path}").strip("_"),
        "parameters": parameters,
        "responses": {
            str(doc.status): {"description": "The response.", "content": content},
            "default": {"description": "The error, and what to do about it.", "content": error},
        },
    }
    if doc.request is not None:
        body = {"application/json": {"schema": references[doc.request]}}
        operation["requestBody"] = {"required": doc.body_required, "content": body}
    return operation


def _version() -> str:
    try:
        return version("lockstep-rl")
    except PackageNotFoundError:
        return "0"
