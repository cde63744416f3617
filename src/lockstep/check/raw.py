"""Requests that no careful client would send: as they are, answered with their HTTP status."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from lockstep.protocol.common.decode_error import error_of
from lockstep.tokens.errors import DeadlineExceeded, Unavailable

SHOWN = 160


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer. `fields` is empty unless its body is a JSON object."""

    status: int
    body: bytes

    @property
    def fields(self) -> dict[str, Any]:
        try:
            found = msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def refused(self) -> bool:
        return 400 <= self.status < 500

    @property
    def missing(self) -> bool:
        """Whether the server has no such route."""
        return self.status in (404, 405, 501)

    def said(self) -> str:
        """The status, and the message of an error."""
        if self.status < 300:
            return str(self.status)
        message = " ".join(error_of(self.status, self.body).message.split())
        shown = message if len(message) <= SHOWN else message[:SHOWN] + "..."
        return f"{self.status} ({shown})"


class Raw:
    """Sends anything to any URL. Nothing is retried; raises Unavailable and DeadlineExceeded."""

    def __init__(self, *, api_key: str | None = None, timeout: float = 30.0) -> None:
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None

    async def send(
        self, method: str, url: str, body: object = None, *, token: str | None = None
    ) -> Reply:
        if self._session is None:
            # A server may drop a connection after an error, so each request gets its own.
            connector = aiohttp.TCPConnector(force_close=True)
            self._session = aiohttp.ClientSession(connector=connector)
        headers = {"Content-Type": "application/json", **self._headers}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with asyncio.timeout(self._timeout):
                async with self._session.request(
                    method, url, data=data, headers=headers, allow_redirects=False
                ) as response:
                    return Reply(response.status, await response.read())
        except TimeoutError:
            raise DeadlineExceeded(f"{method} {url} took longer than {self._timeout:g} s") from None
        except aiohttp.ClientError as error:
            raise Unavailable(f"{method} {url}: {type(error).__name__}: {error}") from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
