"""The control plane's routes for sessions: list them, read their samples, delete them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lockstep.gateway.context import GatewayContext, request_id
from lockstep.gateway.sessions.index import SessionInfo
from lockstep.http.handlers import json_response
from lockstep.tokens import Sample
from lockstep.tokens.errors import BadRequest

MSGPACK = "application/msgpack"
PAGE, MAX_PAGE = 100, 1000
FLAGS = {"": True, "1": True, "true": True, "0": False, "false": False}


class SessionRoutes:
    """GET /v1/rl/sessions, GET and DELETE /v1/rl/sessions/{id}."""

    def __init__(self, context: GatewayContext) -> None:
        self._sessions = context.sessions
        self.routes = [
            Route("/v1/rl/sessions", self.page, methods=["GET"]),
            Route("/v1/rl/sessions/{id}", self.samples, methods=["GET"]),
            Route("/v1/rl/sessions/{id}", self.delete, methods=["DELETE"]),
        ]

    async def page(self, http: Request) -> Response:
        """Sessions in the order of their ids; `next` is the `after` of the next page."""
        request_id(http)
        _check_parameters(http, "after", "limit")
        limit = _limit(http.query_params.get("limit", str(PAGE)))
        page = await self._sessions.page(after=http.query_params.get("after", ""), limit=limit)
        after = page[-1].id if len(page) == limit else None
        return json_response({"sessions": page, "next": after})

    async def samples(self, http: Request) -> Response:
        """Every branch as a sample; msgpack holds the same fields, experts as bytes."""
        request_id(http)
        _check_parameters(http, "format", "train_aborted", "dedupe")
        form = http.query_params.get("format", "json")
        if form not in ("json", "msgpack"):
            raise BadRequest(f"format is {form!r}: expected json or msgpack", param="format")
        name, aborted = http.path_params["id"], _flag(http, "train_aborted")
        info = await self._sessions.info(name)
        dedupe = _flag(http, "dedupe", default="true")
        samples = await self._sessions.samples(name, train_aborted=aborted, dedupe=dedupe)
        # A long session is megabytes: not on the event loop.
        if form == "msgpack":
            packed = await asyncio.to_thread(_msgpack, info, samples)
            return Response(packed, media_type=MSGPACK)
        return json_response(await asyncio.to_thread(_json, info, samples))

    async def delete(self, http: Request) -> Response:
        request_id(http)
        _check_parameters(http)
        name = http.path_params["id"]
        await self._sessions.delete(name)
        return json_response({"id": name, "deleted": True})


def _json(info: SessionInfo, samples: Sequence[Sample]) -> bytes:
    lines = [msgspec.Raw(sample.to_json()) for sample in samples]
    return msgspec.json.encode({"session": info, "samples": lines})


def _msgpack(info: SessionInfo, samples: Sequence[Sample]) -> bytes:
    return msgspec.msgpack.encode({"session": info, "samples": samples})


def _check_parameters(http: Request, *names: str) -> None:
    """Raises BadRequest for a query parameter that would otherwise be quietly ignored."""
    for name in http.query_params:
        if name not in names:
            expected = ", ".join(names) or "none"
            raise BadRequest(
                f"query parameter {name!r} is unknown: expected {expected}", param=name
            )


def _flag(http: Request, name: str, default: str = "false") -> bool:
    text = http.query_params.get(name, default)
    if text.lower() not in FLAGS:
        raise BadRequest(f"{name} is {text!r}: expected true or false", param=name)
    return FLAGS[text.lower()]


def _limit(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MAX_PAGE:
        raise BadRequest(f"limit is {text!r}: expected 1 to {MAX_PAGE}", param="limit")
    return int(text)
