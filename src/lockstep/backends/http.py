"""HTTP to one worker: a connection pool, deadlines, careful retries, and typed errors only."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import TypeVar

import aiohttp

from lockstep.tokens.errors import DeadlineExceeded, Unavailable
from lockstep.wire.fault_read import error_of
from lockstep.wire.splice import Spliced
from lockstep.wire.splicer import Splicer
from lockstep.wire.sse import EventReader

T = TypeVar("T")
CONNECT_TIMEOUT = 10.0
KEEPALIVE = 30.0
LINGER = 0.2
READ_BUFFER = 1 << 18
"""Bytes aiohttp holds before it pauses reading: as many as one read of the socket brings."""
LOST = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)


class Link:
    """One server. Retries only what failed before a byte of the answer came, a few times.

    A keep-alive connection that the server has dropped is such a failure; an answer that breaks
    off is not: the engine has worked on it, and the caller must decide.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float = 1800.0,
        retries: int = 2,
        backoff: float = 0.1,
        connections: int = 1024,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._timeout = timeout
        self._retries = retries
        self._backoff = backoff
        self._connections = connections
        self._headers = {"Accept-Encoding": "identity"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def get(self, path: str, *, timeout: float = CONNECT_TIMEOUT) -> bytearray:
        return await self._whole("GET", path, None, timeout, None, read_body)

    async def delete(self, path: str, *, timeout: float = CONNECT_TIMEOUT) -> bytearray:
        return await self._whole("DELETE", path, None, timeout, None, read_body)

    async def post(
        self,
        path: str,
        body: bytes,
        *,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytearray:
        """The body of a 2xx answer. Raises the typed error of any other, Unavailable when the
        server cannot be reached or hangs up, DeadlineExceeded after `timeout` seconds."""
        return await self._whole("POST", path, body, timeout or self._timeout, headers, read_body)

    async def post_spliced(
        self,
        path: str,
        body: bytes,
        *,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Spliced:
        """The same for an answer that may hold routed experts, which are left in their pieces."""
        limit = timeout or self._timeout
        return await self._whole("POST", path, body, limit, headers, read_spliced)

    async def _whole(
        self,
        method: str,
        path: str,
        body: bytes | None,
        timeout: float,
        headers: Mapping[str, str] | None,
        read: Callable[[aiohttp.ClientResponse], Awaitable[T]],
    ) -> T:
        try:
            async with asyncio.timeout(timeout):
                response = await self._send(method, path, body, headers)
                async with _Closing(response):
                    return await self._checked(response, read)
        except TimeoutError:
            raise self._late(path, timeout) from None

    async def events(
        self,
        path: str,
        body: bytes,
        *,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """The data of each event of a streamed answer, up to `[DONE]` or the end."""
        limit = timeout or self._timeout
        deadline = asyncio.get_running_loop().time() + limit
        try:
            async with asyncio.timeout_at(deadline):
                response = await self._send("POST", path, body, headers)
        except TimeoutError:
            raise self._late(path, limit) from None
        reader = EventReader()
        async with _Closing(response):
            # The timeout wraps each read, not the yield: a slow consumer is not the server's fault.
            while not reader.done:
                try:
                    async with asyncio.timeout_at(deadline):
                        if response.status >= 300:
                            await self._checked(response, read_body)
                        chunk = await response.content.readany()
                except TimeoutError:
                    raise self._late(path, limit) from None
                except aiohttp.ClientError as error:
                    raise self._broken(path, error) from None
                if not chunk:
                    return
                for event in reader.feed(chunk):
                    yield event
            # The end after [DONE] is read too, so that the connection can be kept; a server that
            # does not end costs the connection, not the answer.
            with suppress(TimeoutError, aiohttp.ClientError):
                async with asyncio.timeout(LINGER):
                    await response.content.readany()

    async def _send(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None
    ) -> aiohttp.ClientResponse:
        url = self.base_url + path
        sent = {"Content-Type": "application/json", **(headers or {})}
        for attempt in range(self._retries + 1):
            try:
                return await self._open().request(
                    method, url, data=body, headers=sent, allow_redirects=False
                )
            except aiohttp.ConnectionTimeoutError:
                raise Unavailable(
                    f"{self.base_url} did not accept a connection within {CONNECT_TIMEOUT} s"
                ) from None
            except LOST as error:
                if attempt == self._retries:
                    raise Unavailable(
                        f"{method} {url} failed {attempt + 1} times before an answer came, "
                        f"last with {type(error).__name__}: {error}"
                    ) from None
            except aiohttp.ClientError as error:
                raise Unavailable(f"{method} {url}: {type(error).__name__}: {error}") from None
            await asyncio.sleep(self._backoff * 2**attempt * random.uniform(0.5, 1.5))
        raise Unavailable(f"{method} {url} was not tried: retries is {self._retries}")

    async def _checked(
        self,
        response: aiohttp.ClientResponse,
        read: Callable[[aiohttp.ClientResponse], Awaitable[T]],
    ) -> T:
        try:
            if 200 <= response.status < 300:
                return await read(response)
            raise error_of(response.status, await read_body(response))
        except aiohttp.ClientError as error:
            raise self._broken(response.url.path, error) from None

    def _open(self) -> aiohttp.ClientSession:
        if self._closed:
            raise Unavailable(f"the transport to {self.base_url} is closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=self._connections, keepalive_timeout=KEEPALIVE
                ),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT),
                headers=self._headers,
                read_bufsize=READ_BUFFER,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session

    async def close(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()

    def _late(self, path: str, timeout: float) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self.base_url}{path} took longer than {timeout} s")

    def _broken(self, path: str, error: Exception) -> Unavailable:
        return Unavailable(
            f"{self.base_url}{path} broke off in the middle of its answer "
            f"({type(error).__name__}: {error}); it is not retried, as the engine had begun"
        )


class _Closing:
    """Gives the connection back after a whole answer; closes it when the answer was left early."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        if kind is None and self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


async def read_body(response: aiohttp.ClientResponse) -> bytearray:
    """The whole body in one buffer. Collecting chunks and joining them would hold it twice."""
    body = bytearray()
    async for chunk, _ in response.content.iter_chunks():
        body += chunk
    return body


async def read_spliced(response: aiohttp.ClientResponse) -> Spliced:
    """The body, with large routed experts left in the pieces in which they came."""
    splicer = Splicer()
    async for chunk, _ in response.content.iter_chunks():
        splicer.feed(chunk)
    return splicer.finish()
