"""HTTP client for one server: keep-alive connections, deadlines, careful retries, typed errors."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import re
import ssl
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from time import monotonic
from typing import Protocol, TypeVar
from urllib.parse import SplitResult, quote, urlsplit

from lockstep import tracing
from lockstep.http.client.connection import Connection, Lost
from lockstep.http.sse import EventReader
from lockstep.http.tls import Certificates, client_certificates
from lockstep.protocol.common.decode_error import error_of
from lockstep.tokens.errors import BadRequest, Busy, ContractError, DeadlineExceeded, Unavailable

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
CONNECT_TIMEOUT = 10.0
KEEPALIVE = 30.0
LINGER = 0.2
RESPONSE_BYTES = 256 << 20
"""Most bytes of a response, or of one event of a stream, that are held in memory."""
CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""Characters that would end a header, or are not allowed in one."""
PLAIN_TARGET = re.compile(r"[!-~]*")
TARGET_CHARACTERS = "/?#[]@!$&'()*+,;=:%~"


class Collector(Protocol[T_co]):
    """Builder of a value from a body that arrives in chunks."""

    def feed(self, chunk: bytes) -> None: ...

    def finish(self) -> T_co: ...


class ResponseBody:
    """The whole body in one buffer. Collecting pieces and joining them would hold it twice."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, chunk: bytes) -> None:
        self._bytes += chunk

    def finish(self) -> bytearray:
        return self._bytes


class HttpClient:
    """Client of one server. It retries, a few times, only requests that failed before the first
    byte of the response.

    A keep-alive connection that the server has dropped is such a failure. A response that breaks
    off is not: the engine has worked on it, and the caller must decide. `host` is sent as the Host
    header, for a URL with one address of a name that has several; by default it is the URL's own. A
    response larger than `response_bytes` is an error.
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
        host: str | None = None,
        response_bytes: int = RESPONSE_BYTES,
    ) -> None:
        """Raise BadRequest for a URL with an invalid port."""
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._timeout = timeout
        self._retries = retries
        self._backoff = backoff
        self._permits = asyncio.Semaphore(connections)
        self._open: set[Connection] = set()
        self._idle: deque[tuple[Connection, float]] = deque()
        self._url = urlsplit(self.base_url)
        self._port = _port_of(self._url, base_url)
        self._response_bytes = response_bytes
        self._headers = {
            "host": host or self._url.netloc.rpartition("@")[2],
            "accept-encoding": "identity",
            "user-agent": "lockstep",
        }
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._tls: Certificates | None = None
        self._closed = False

    async def get(self, path: str, *, timeout: float = CONNECT_TIMEOUT) -> bytearray:
        """Return the body of a 2xx response. Raises as `post` does."""
        return await self._whole("GET", path, None, timeout, None, ResponseBody)

    async def delete(self, path: str, *, timeout: float = CONNECT_TIMEOUT) -> bytearray:
        """Return the body of a 2xx response. Raises as `post` does."""
        return await self._whole("DELETE", path, None, timeout, None, ResponseBody)

    async def post(
        self,
        path: str,
        body: bytes,
        *,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytearray:
        """Return the body of a 2xx response. Raises the typed error of any other response,
        Unavailable when the server cannot be reached or hangs up, DeadlineExceeded after `timeout`
        seconds.
        """
        return await self._whole(
            "POST", path, body, timeout or self._timeout, headers, ResponseBody
        )

    async def post_collected(
        self,
        path: str,
        body: bytes,
        collector: Callable[[], Collector[T]],
        *,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> T:
        """Send a request with a large response, which a collector reads while it arrives."""
        limit = timeout or self._timeout
        return await self._whole("POST", path, body, limit, headers, collector)

    async def exchange(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, bytearray]:
        """Return status and body of any response, including errors.

        Raises Unavailable and DeadlineExceeded only.
        """
        limit = timeout or self._timeout
        try:
            async with asyncio.timeout(limit):
                connection = await self._send(method, path, body, headers)
                try:
                    raw = await self._collect(connection, path, ResponseBody())
                    return connection.status, raw
                finally:
                    self._release(connection)
        except TimeoutError:
            raise self._late(path, limit) from None

    async def _whole(
        self,
        method: str,
        path: str,
        body: bytes | None,
        timeout: float,
        headers: Mapping[str, str] | None,
        collector: Callable[[], Collector[T]],
    ) -> T:
        try:
            async with asyncio.timeout(timeout):
                connection = await self._send(method, path, body, headers)
                try:
                    await self._check(connection, path)
                    return await self._collect(connection, path, collector())
                finally:
                    self._release(connection)
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
        """Yield the data of each event of a streamed response, up to `[DONE]` or the end."""
        batches = self.event_batches(path, body, timeout=timeout, headers=headers)
        async with aclosing(batches):
            async for batch in batches:
                for event in batch:
                    yield event

    async def event_batches(
        self,
        path: str,
        body: bytes,
        *,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[list[bytes], None]:
        """Yield the events of a streamed response in batches, as the network delivered them."""
        limit = timeout or self._timeout
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit
        connection: Connection | None = None
        expiry: asyncio.TimerHandle | None = None
        reader = EventReader()
        try:
            async with asyncio.timeout_at(deadline):
                connection = await self._send("POST", path, body, headers)
                await self._check(connection, path)
            # One timer for all waits: a timeout around each wait costs more than the event itself.
            expiry = loop.call_at(deadline, connection.expire)
            while not reader.done:
                pieces = connection.take()
                if batch := reader.feed(pieces[0] if len(pieces) == 1 else b"".join(pieces)):
                    yield batch
                elif reader.held > self._response_bytes:
                    raise self._too_large(path)
                elif connection.ended:
                    return
                else:
                    await self._news(connection, path)
            # Read the end after [DONE] too, so that the connection can be reused. A server that
            # does not end the stream costs the connection, not the response.
            expiry.cancel()
            if not connection.ended:
                with suppress(TimeoutError, Lost):
                    async with asyncio.timeout(LINGER):
                        await connection.news()
            connection.take()  # for example a line end: data after [DONE] is ignored
        except TimeoutError:
            raise self._late(path, limit) from None
        finally:
            if expiry is not None:
                expiry.cancel()
            if connection is not None:
                self._release(connection)

    async def _send(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None
    ) -> Connection:
        """Send a request and return the connection once the head of the response has arrived."""
        url = self.base_url + path
        head = self._head(method, path, body, headers)
        sent = False
        for attempt in range(self._retries + 1):
            try:
                connection = await self._connection()
                try:
                    connection.send(head, body)
                    while not connection.status:
                        await connection.news()
                    return connection
                except BaseException as error:
                    self._release(connection)
                    if connection.began and isinstance(error, Lost):
                        raise self._broken(path, error) from None
                    raise
            except (Lost, OSError) as error:
                sent = sent or isinstance(error, Lost)
                if isinstance(error, OSError) and error.errno in NO_DESCRIPTORS:
                    # The cause is this process, so no worker may be ejected for it.
                    raise Busy(
                        f"{method} {url} was not sent: this process has no file descriptor left; "
                        "raise its limit of open files (ulimit -n)",
                        retry_after=1.0,
                    ) from None
                if attempt == self._retries:
                    why: object = error
                    if isinstance(error, ConnectionError) and error.errno:
                        # asyncio's text repeats the address, and callers may be tenants.
                        why = os.strerror(error.errno)
                    unavailable = Unavailable(
                        f"{method} {url} failed {attempt + 1} times before a response came, "
                        f"last with {type(error).__name__}: {why}"
                    )
                    unavailable.lost = sent
                    raise unavailable from None
            await asyncio.sleep(self._backoff * 2**attempt * random.uniform(0.5, 1.5))
        raise Unavailable(f"{method} {url} was not tried: retries is {self._retries}")

    def _head(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None
    ) -> bytes:
        """Return the request line and the headers. Raises BadRequest for a header that cannot be
        sent.
        """
        fields = dict(self._headers)
        for name, value in (headers or {}).items():
            if CONTROL.search(name) or CONTROL.search(value):
                raise BadRequest(
                    f"the header {name!r} would be {value!r}: it cannot hold control characters",
                    param=name.lower(),
                )
            fields[name.lower()] = value
        if tracing.active is not None:
            fields |= tracing.active.headers()
        if body is not None:
            fields |= {"content-type": "application/json", "content-length": str(len(body))}
        target = self._url.path + path
        if PLAIN_TARGET.fullmatch(target) is None:
            target = quote(target, safe=TARGET_CHARACTERS)
        lines = "".join([f"{name}: {value}\r\n" for name, value in fields.items()])
        return f"{method} {target} HTTP/1.1\r\n{lines}\r\n".encode()

    async def _connection(self) -> Connection:
        """Return an idle connection, kept or new. Raises OSError if none can be opened."""
        if self._closed:
            raise Unavailable(f"the transport to {self.base_url} is closed")
        await self._permits.acquire()
        try:
            since = monotonic() - KEEPALIVE
            while self._idle and self._idle[0][1] < since:
                self._drop(self._idle.popleft()[0])
            while self._idle:
                connection, _ = self._idle.pop()
                if connection.reusable:
                    return connection
                self._drop(connection)
            return await self._connect()
        except BaseException:
            self._permits.release()
            raise

    async def _connect(self) -> Connection:
        url = self._url
        if url.scheme not in ("http", "https") or not url.hostname:
            raise Unavailable(f"{self.base_url!r} cannot be reached: expected http://HOST:PORT")
        context = self._context() if url.scheme == "https" else None
        connecting = asyncio.get_running_loop().create_connection(
            Connection, url.hostname, self._port or (443 if context else 80), ssl=context
        )
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                _, connection = await connecting
        except TimeoutError:
            raise Unavailable(
                f"{self.base_url} did not accept a connection within {CONNECT_TIMEOUT} s"
            ) from None
        self._open.add(connection)
        return connection

    def _context(self) -> ssl.SSLContext:
        """Return the TLS context for connections. Raises BadRequest for unusable files."""
        if self._tls is None:
            self._tls = client_certificates()
        self._tls.refresh()
        return self._tls.context

    def _release(self, connection: Connection) -> None:
        """Keep the connection after a complete response; close it after an incomplete one."""
        if connection.reusable and not self._closed:
            self._idle.append((connection, monotonic()))
        else:
            self._drop(connection)
        self._permits.release()

    def _drop(self, connection: Connection) -> None:
        self._open.discard(connection)
        connection.close()

    async def _check(self, connection: Connection, path: str) -> None:
        """Raise the typed error of a response that is not 2xx."""
        if not 200 <= connection.status < 300:
            raise error_of(connection.status, await self._collect(connection, path, ResponseBody()))

    async def _collect(self, connection: Connection, path: str, collector: Collector[T]) -> T:
        size = 0
        while True:
            for piece in connection.take():
                size += len(piece)
                collector.feed(piece)
            if connection.ended:
                return collector.finish()
            if size > self._response_bytes:
                raise self._too_large(path)
            await self._news(connection, path)

    async def _news(self, connection: Connection, path: str) -> None:
        try:
            await connection.news()
        except Lost as error:
            raise self._broken(path, error) from None

    async def close(self) -> None:
        self._closed = True
        self._idle.clear()
        while self._open:
            self._drop(self._open.pop())

    def _late(self, path: str, timeout: float) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self.base_url}{path} took longer than {timeout} s")

    def _too_large(self, path: str) -> ContractError:
        return ContractError(
            f"{self.base_url}{path} sent more than {self._response_bytes} bytes, the limit of a "
            f"response"
        )

    def _broken(self, path: str, error: Exception) -> Unavailable:
        unavailable = Unavailable(
            f"{self.base_url}{path} broke off in the middle of its response ({error}); it is not "
            f"retried, because the engine had started"
        )
        unavailable.lost = True
        return unavailable


def _port_of(parts: SplitResult, url: str) -> int | None:
    """Return the port in a URL. Raises BadRequest for an invalid one."""
    try:
        return parts.port
    except ValueError:
        raise BadRequest(
            f"the port of {url[:200]!r} is invalid: expected http://HOST:PORT with a port up to "
            f"65535",
            param="url",
        ) from None
