"""The routes of the dashboard on the admin port: the page, its login, events and data.

All routes only read. The cookie opens these routes and no others: a page that is left open cannot
change a fleet.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import cached_property
from pathlib import Path
from time import monotonic

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from lockstep.dashboard.chain_view import chain_view
from lockstep.dashboard.feed import MOST_VIEWERS, Feed, Parts
from lockstep.dashboard.fleet_view import FleetView
from lockstep.dashboard.health_view import GatewayHealth, HealthView
from lockstep.dashboard.logins import COOKIE_SECONDS, Logins
from lockstep.dashboard.run_view import RunMark, curves, pack
from lockstep.dashboard.session_view import SessionViews
from lockstep.dashboard.static_files import INDEX, StaticFile, read_static
from lockstep.fleet.fleet import Fleet
from lockstep.gateway.context import GatewayContext
from lockstep.gateway.metrics import GatewayMetrics
from lockstep.http.handlers import EXCEPTION_HANDLERS, EventStream, json_response, require_bearer
from lockstep.http.http_request import read_json
from lockstep.protocol.json.strict import decode
from lockstep.run_record import AUDITS, METRICS, Run
from lockstep.tokens.errors import BadRequest, Busy, NotFound, Unauthorized

BODY_LIMIT = 1 << 14
ROWS = 50
SAMPLE_BYTES = 1 << 20
HEALTH_SECONDS = 0.9
"""Interval at which metrics are read. That is most of the cost of a tick, so it is done at every
second one.
"""
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class Login(msgspec.Struct, forbid_unknown_fields=True):
    """The admin token, or a code that `lockstep dashboard` got with it."""

    token: str | None = None
    code: str | None = None


class AttachRun(msgspec.Struct, forbid_unknown_fields=True):
    """The directory that a trainer writes, on the machine of the gateway."""

    directory: str


LOGIN = msgspec.json.Decoder(Login)
ATTACH = msgspec.json.Decoder(AttachRun)


class Dashboard:
    """An ASGI application for the paths /dashboard and below. `stop` ends open event streams."""

    def __init__(
        self,
        context: GatewayContext,
        fleet: Fleet,
        metrics: GatewayMetrics,
        *,
        token: str,
        stop: asyncio.Event,
        run_dir: Path | None = None,
    ) -> None:
        self._context, self._token, self._run_dir = context, token, run_dir
        self._logins = Logins(token)
        self._fleet, self._health = FleetView(fleet), HealthView(metrics.registry)
        self._sessions = SessionViews(context)
        self._feed = Feed(self._parts, stop)
        self._last_health: tuple[float, GatewayHealth] | None = None
        data = "/dashboard/data"
        self._app = Starlette(
            routes=[
                Route("/dashboard", self.index),
                Route("/dashboard/static/{name}", self.static),
                Route("/dashboard/login", self.logged_in, methods=["GET"]),
                Route("/dashboard/login", self.login, methods=["POST"]),
                Route("/dashboard/logout", self.logout, methods=["POST"]),
                Route("/dashboard/codes", self.new_code, methods=["POST"]),
                Route("/dashboard/events", self.events),
                Route(f"{data}/sessions", self.sessions),
                Route(f"{data}/sessions/{{id}}", self.session),
                Route(f"{data}/sessions/{{id}}/branches/{{branch:int}}", self.branch),
                Route(f"{data}/sessions/{{id}}/branches/{{branch:int}}/tokens", self.tokens),
                Route(f"{data}/sessions/{{id}}/breaks/{{turn:int}}", self.prefix_break),
                Route("/dashboard/run", self.attach, methods=["POST"]),
                Route(f"{data}/run", self.run),
                Route(f"{data}/run/samples", self.samples),
            ],
            exception_handlers=EXCEPTION_HANDLERS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    # The page

    @cached_property
    def _files(self) -> dict[str, StaticFile]:
        return read_static()

    async def index(self, http: Request) -> Response:
        return self._file(INDEX, http)

    async def static(self, http: Request) -> Response:
        name = http.path_params["name"]
        if name not in self._files:
            raise NotFound(f"the dashboard has no file {name!r}")
        return self._file(name, http)

    def _file(self, name: str, http: Request) -> Response:
        file = self._files[name]
        headers = {**HEADERS, "cache-control": "no-cache", "etag": file.etag}
        if http.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.data, media_type=file.media_type, headers=headers)

    # Login

    async def logged_in(self, http: Request) -> Response:
        """Return whether the cookie is valid: the page's scripts cannot read it."""
        return _data({"logged_in": self._logins.is_valid(http.cookies.get(_cookie_name(http), ""))})

    async def login(self, http: Request) -> Response:
        """Set the cookie. It is for browsers; programs use the token."""
        body: Login = decode(LOGIN, await read_json(http, BODY_LIMIT) or b"{}")
        cookie = self._logins.begin(token=body.token, code=body.code)
        response = Response(status_code=204, headers=HEADERS)
        self._set_cookie(http, response, cookie, int(COOKIE_SECONDS))
        return response

    async def logout(self, http: Request) -> Response:
        self._logins.end(http.cookies.get(_cookie_name(http), ""))
        response = Response(status_code=204, headers=HEADERS)
        self._set_cookie(http, response, "", 0)
        return response

    async def new_code(self, http: Request) -> Response:
        """Return a code for one login to a caller that has the token."""
        require_bearer(http, self._token)
        return json_response({"code": self._logins.new_code()}, 201)

    async def attach(self, http: Request) -> Response:
        """Show another run directory from now on, for a caller that has the token."""
        require_bearer(http, self._token)
        body: AttachRun = decode(ATTACH, await read_json(http, BODY_LIMIT) or b"{}")
        directory = Path(body.directory)
        if not await asyncio.to_thread(directory.is_dir):
            raise BadRequest(
                f"{body.directory!r} is not a directory on the gateway's machine", param="directory"
            )
        self._run_dir = directory
        return json_response({"directory": body.directory})

    def _set_cookie(self, http: Request, response: Response, value: str, seconds: int) -> None:
        response.set_cookie(
            _cookie_name(http), value, max_age=seconds, path="/dashboard", httponly=True,
            samesite="strict", secure=http.url.scheme == "https",
        )  # fmt: skip

    def _check(self, http: Request) -> None:
        """Raise Unauthorized unless the request has the cookie or the admin token."""
        if self._logins.is_valid(http.cookies.get(_cookie_name(http), "")):
            return
        if http.headers.get("authorization"):
            require_bearer(http, self._token)
            return
        raise Unauthorized("log in at /dashboard, with the admin token", param="cookie")

    # Events

    async def events(self, http: Request) -> Response:
        self._check(http)
        if self._feed.viewers >= MOST_VIEWERS:
            raise Busy(f"{MOST_VIEWERS} pages are open already: close one")
        return EventStream(self._while_logged_in(http), done=b"")

    async def _while_logged_in(self, http: Request) -> AsyncGenerator[bytes, None]:
        """Yield the events of the feed until the viewer logs out or the cookie expires."""
        feed = self._feed.watch()
        try:
            async for event in feed:
                try:
                    self._check(http)
                except Unauthorized:
                    yield b"event: logout\ndata: {}\n\n"
                    return
                yield event
        finally:
            await feed.aclose()

    async def _parts(self) -> Parts:
        workers = self._fleet.workers()
        return {
            "fleet": self._fleet.totals(workers, self._context.models.base_name),
            "workers": workers,
            "operations": await self._fleet.operations(),
            "health": self._health_now(),
            "run": self._run_mark(),
        }

    def _health_now(self) -> GatewayHealth:
        now = monotonic()
        if self._last_health is None or now - self._last_health[0] >= HEALTH_SECONDS:
            stats = self._context.sessions.stats()
            health = self._health.read(self._fleet.slow(), stats, self._feed.viewers)
            self._last_health = now, health
        return self._last_health[1]

    def _run_mark(self) -> RunMark | None:
        if self._run_dir is None:
            return None
        files = [self._run_dir / name for name in (METRICS, AUDITS)]
        size = sum(path.stat().st_size for path in files if path.is_file())
        return RunMark(self._run_dir.name, size)

    # Data

    async def sessions(self, http: Request) -> Response:
        self._check(http)
        query = http.query_params
        table = await self._sessions.table(
            query.get("search", "")[:200],
            limit=_count(query.get("limit", str(ROWS)), "limit", 200),
            offset=_count(query.get("offset", "0"), "offset", 10**7),
        )
        return _data(table)

    async def session(self, http: Request) -> Response:
        self._check(http)
        return _data(await self._sessions.tree(http.path_params["id"]))

    async def branch(self, http: Request) -> Response:
        """Return the messages of a branch: where each begins, and its author."""
        self._check(http)
        tokens = await self._sessions.branch(http.path_params["id"], http.path_params["branch"])
        return _data({"total": len(tokens.ids), "segments": tokens.segments})

    async def tokens(self, http: Request) -> Response:
        self._check(http)
        query, path = http.query_params, http.path_params
        start = _count(query.get("start", "0"), "start", 10**9)
        end = _count(query.get("end", "10000000"), "end", 10**9)
        return _data(await self._sessions.page(path["id"], path["branch"], start, end))

    async def prefix_break(self, http: Request) -> Response:
        self._check(http)
        path = http.path_params
        return _data(await self._sessions.prefix_break(path["id"], path["turn"]))

    async def run(self, http: Request) -> Response:
        """Return the curves of the run directory, as the report draws them."""
        self._check(http)
        run = await self._read_run()
        about = {name: run.about.get(name) for name in ("model", "env", "seed", "started", "ended")}
        drawn = await asyncio.to_thread(curves, run) if run.steps else None
        chain = await asyncio.to_thread(chain_view, self._run_dir or "")
        return _data({"about": about, "curves": drawn, "chain": chain})

    async def samples(self, http: Request) -> Response:
        """Return the conversations that the run kept of one step, by default of the last."""
        self._check(http)
        run = await self._read_run()
        steps = sorted({int(sample["step"]) for sample in run.samples})
        last = str(steps[-1] if steps else 0)
        step = _count(http.query_params.get("step", last), "step", 10**9)
        chosen = [sample for sample in run.samples if int(sample["step"]) == step]
        names, packed, left_out = await asyncio.to_thread(pack, chosen, SAMPLE_BYTES)
        return _data(
            {"steps": steps, "step": step, "names": names, "samples": packed, "left_out": left_out}
        )

    async def _read_run(self) -> Run:
        if self._run_dir is None:
            raise NotFound("no run is attached: start the gateway with --run-dir DIR")
        return await asyncio.to_thread(Run.read, self._run_dir)


def _data(body: object) -> Response:
    response = json_response(body)
    response.headers.update(HEADERS)
    return response


def _cookie_name(http: Request) -> str:
    """Return the name of the cookie. All ports of a host share cookies, so every gateway has its
    own name.
    """
    return f"lockstep_{http.url.port or http.url.scheme}"


def _count(text: str, name: str, most: int) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 10 or int(text) > most:
        raise BadRequest(f"{name} is {text[:20]!r}: expected 0 to {most}", param=name)
    return int(text)
