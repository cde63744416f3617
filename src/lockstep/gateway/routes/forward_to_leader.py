"""Forwards control calls from a following gateway to the leader."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from lockstep.fleet.fleet import Fleet
from lockstep.gateway.context import GatewayContext
from lockstep.http.client.client import HttpClient
from lockstep.http.http_request import read_json
from lockstep.tokens.errors import LockstepError, Unavailable

Handler = Callable[[Request], Awaitable[Response]]
FORWARDED = "x-lockstep-forwarded"
FORWARDED_HEADERS = ("idempotency-key", "content-type")
BODY_LIMIT = 8 << 20
TIMEOUT_SECONDS = 3600.0


class ForwardToLeader:
    """A decorator of handlers: while this gateway follows, the leader handles the call.

    A call is forwarded once: two gateways that each take the other for the leader would otherwise
    send it back and forth. Raises Unavailable that names the leader when it cannot be reached.
    """

    def __init__(self, fleet: Fleet, token: str, context: GatewayContext) -> None:
        self._fleet, self._token, self._context = fleet, token, context
        self._client: tuple[str, HttpClient] | None = None

    def __call__(self, handler: Handler) -> Handler:
        async def at_leader(http: Request) -> Response:
            if self._fleet.leads or await self._fleet.replica.wait_to_lead():
                return await handler(http)
            return await self._forward(http)

        return at_leader

    async def _forward(self, http: Request) -> Response:
        leader = self._fleet.leadership.view().leader
        if leader is None or FORWARDED in http.headers:
            self._fleet.replica.check_leads()
        client = await self._open(leader or "")
        headers = {name: http.headers[name] for name in FORWARDED_HEADERS if name in http.headers}
        path = quote(http.url.path, safe="/:@") + (f"?{http.url.query}" if http.url.query else "")
        empty = http.headers.get("content-length", "0") == "0"
        body = b"" if empty else await read_json(http, BODY_LIMIT)
        try:
            status, raw = await client.exchange(
                http.method,
                path,
                body or (b"{}" if http.method == "POST" else None),
                timeout=TIMEOUT_SECONDS,
                headers={**headers, FORWARDED: "1"},
            )
        except LockstepError as error:
            raise Unavailable(
                f"this gateway follows {leader}, which leads the fleet and did not finish the "
                f"call ({error.message}): send it again, with its Idempotency-Key if it had one",
                retry_after=1.0,
            ) from error
        # The caller may read from this gateway next: it must see what the call has changed.
        await self._fleet.replica.read()
        self._context.models.forget()
        return Response(bytes(raw), status, media_type="application/json")

    async def _open(self, leader: str) -> HttpClient:
        if self._client is not None and self._client[0] != leader:
            await self._client[1].close()
            self._client = None
        if self._client is None:
            self._client = leader, HttpClient(leader, api_key=self._token, retries=0)
        return self._client[1]
