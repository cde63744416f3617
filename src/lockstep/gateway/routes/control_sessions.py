"""The control plane's routes for sessions: mint, list, read, await, finish and delete them."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lockstep.gateway.callers import check_session_id, full_name, request_id
from lockstep.gateway.context import GatewayContext
from lockstep.gateway.sessions.info import SessionInfo
from lockstep.gateway.sessions.sessions import Sessions
from lockstep.http.handlers import json_response
from lockstep.http.http_request import read_json
from lockstep.http.off_loop import off_loop
from lockstep.protocol.common.request import MAX_SALT
from lockstep.protocol.control.sessions import FinishSession, MintedSession, MintSession
from lockstep.protocol.json.strict import decode
from lockstep.storage.api_keys import check_tenant
from lockstep.tokens import Sample
from lockstep.tokens.errors import BadRequest

MSGPACK = "application/msgpack"
PAGE, MAX_PAGE = 100, 1000
MAX_WAIT = 300
BODY_LIMIT = 1 << 16
MINT = msgspec.json.Decoder(MintSession)
FINISH = msgspec.json.Decoder(FinishSession)
FLAGS = {"": True, "1": True, "true": True, "0": False, "false": False}


class SessionView(msgspec.Struct):
    """A session and its samples; see Sample.from_json for their fields."""

    session: SessionInfo
    samples: list[dict[str, Any]]


class SessionPage(msgspec.Struct):
    """Sessions in the order of their ids; `next` is the `after` of the next page."""

    sessions: list[SessionInfo]
    next: str | None


class DeletedSession(msgspec.Struct):
    id: str
    deleted: bool


class ControlSessionRoutes:
    """Routes under /v1/rl/sessions."""

    def __init__(self, context: GatewayContext) -> None:
        self._sessions = context.sessions
        self.routes = [
            Route("/v1/rl/sessions", self.page, methods=["GET"]),
            Route("/v1/rl/sessions/{id}", self.samples, methods=["GET"]),
            Route("/v1/rl/sessions", self.mint, methods=["POST"]),
            Route("/v1/rl/sessions/{id}", self.delete, methods=["DELETE"]),
            Route("/v1/rl/sessions/{id}/finish", self.finish, methods=["POST"]),
            Route("/v1/rl/sessions/{id}/wait", self.wait, methods=["GET"]),
        ]

    async def mint(self, http: Request) -> Response:
        """Create a session and a key that can use and read only this session."""
        request_id(http)
        _check_parameters(http)
        body: MintSession = decode(MINT, await read_json(http, BODY_LIMIT) or b"{}")
        name = f"s-{secrets.token_hex(8)}" if body.id is None else body.id
        check_session_id(name, "id")
        check_tenant(body.tenant)
        _check_budget(body)
        full = full_name(body.tenant, name)
        key, key_id = await self._sessions.keys.mint(
            full,
            seconds=body.seconds,
            max_calls=body.max_calls,
            max_tokens=body.max_tokens,
            cache_salt=body.cache_salt,
        )
        minted = MintedSession(
            id=full, session=name, tenant=body.tenant, key=key, key_id=key_id,
            base_path=f"/sessions/{name}/v1",
        )  # fmt: skip
        return json_response(minted, 201)

    async def finish(self, http: Request) -> Response:
        """Finish a session with its reward; see SessionKeys.finish."""
        request_id(http)
        _check_parameters(http)
        body: FinishSession = decode(FINISH, await read_json(http, BODY_LIMIT) or b"{}")
        if body.reward is not None and not math.isfinite(body.reward):
            raise BadRequest(f"reward is {body.reward}: expected a finite number", param="reward")
        name = http.path_params["id"]
        await self._sessions.keys.finish(name, body.reward)
        return json_response(await self._sessions.info(name))

    async def wait(self, http: Request) -> Response:
        """Return the session when it has ended, or after `seconds` with `ended` null."""
        request_id(http)
        _check_parameters(http, "seconds")
        name = http.path_params["id"]
        await self._sessions.keys.wait(name, _seconds(http.query_params.get("seconds", "30")))
        return json_response(await self._sessions.info(name))

    async def page(self, http: Request) -> Response:
        """Return sessions in order of their ids; `next` is the `after` of the next page."""
        request_id(http)
        _check_parameters(http, "after", "limit")
        limit = _limit(http.query_params.get("limit", str(PAGE)))
        page = await self._sessions.page(after=http.query_params.get("after", ""), limit=limit)
        after = page[-1].id if len(page) == limit else None
        return json_response({"sessions": page, "next": after})

    async def samples(self, http: Request) -> Response:
        """Return each branch as a sample, and mark the turns as read."""
        request_id(http)
        return await session_response(http, self._sessions, http.path_params["id"])

    async def delete(self, http: Request) -> Response:
        request_id(http)
        _check_parameters(http)
        name = http.path_params["id"]
        await self._sessions.delete(name)
        return json_response({"id": name, "deleted": True})


async def session_response(
    http: Request, sessions: Sessions, name: str, *, by_trainer: bool = True
) -> Response:
    """Return a session and its samples as JSON or msgpack, which has routed experts as bytes.

    Raises NotFound, and BadRequest for an unknown query parameter.
    """
    _check_parameters(http, "format", "train_aborted", "dedupe", "kinds", "weights")
    form = http.query_params.get("format", "json")
    if form not in ("json", "msgpack"):
        raise BadRequest(f"format is {form!r}: expected json or msgpack", param="format")
    aborted, dedupe = _flag(http, "train_aborted"), _flag(http, "dedupe", default="true")
    info = await sessions.info(name)
    named = http.query_params.get("kinds")
    kinds = None if named is None else named.split(",")
    samples = await sessions.samples(
        name,
        train_aborted=aborted,
        dedupe=dedupe,
        kinds=kinds,
        weights=http.query_params.get("weights"),
        by_trainer=by_trainer,
    )
    rest = {} if kinds is None else {"left_out": await sessions.left_out(name, kinds)}
    # A long session is encoded to megabytes.
    if form == "msgpack":
        packed = await off_loop(True, _msgpack, info, samples, rest)
        return Response(packed, media_type=MSGPACK)
    return json_response(await off_loop(True, _json, info, samples, rest))


def _json(info: SessionInfo, samples: Sequence[Sample], rest: dict[str, Any]) -> bytes:
    lines = [msgspec.Raw(sample.to_json()) for sample in samples]
    return msgspec.json.encode({"session": info, "samples": lines, **rest})


def _msgpack(info: SessionInfo, samples: Sequence[Sample], rest: dict[str, Any]) -> bytes:
    return msgspec.msgpack.encode({"session": info, "samples": samples, **rest})


def _check_parameters(http: Request, *names: str) -> None:
    """Raise BadRequest for a query parameter that would otherwise be ignored."""
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
    # Its length first: Python raises for integers of thousands of digits.
    if not text.isascii() or not text.isdigit() or len(text) > 4 or not 1 <= int(text) <= MAX_PAGE:
        raise BadRequest(f"limit is {text[:20]!r}: expected 1 to {MAX_PAGE}", param="limit")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text[:20])
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_WAIT:
        raise BadRequest(f"seconds is {text[:20]!r}: expected 0 to {MAX_WAIT}", param="seconds")
    return seconds


def _check_budget(body: MintSession) -> None:
    for name in ("seconds", "max_calls", "max_tokens"):
        value = getattr(body, name)
        if value is not None and not 0 < value < 2**53:
            raise BadRequest(f"{name} is {value}: expected more than 0, or null", param=name)
    if body.cache_salt is not None and not 1 <= len(body.cache_salt) <= MAX_SALT:
        raise BadRequest(
            f"cache_salt has {len(body.cache_salt)} characters: expected 1 to {MAX_SALT}",
            param="cache_salt",
        )
