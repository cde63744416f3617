"""A connection pool for short statements, in place of asyncpg.Pool.

asyncpg.Pool creates a task and a timer whenever a connection is acquired or released, and sends a
reset query unless it is given another reset. `benchmarks/postgres_pool.py` compares both: the two
statements of a session turn take 170 µs of CPU here and 280 µs with asyncpg.Pool, of 1,650 µs that
the whole turn takes a gateway.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

import asyncpg


class ConnectionPool:
    """At most `size` connections, opened on demand; the one released last is reused first."""

    def __init__(
        self, connect: Callable[[], Awaitable[asyncpg.Connection]], size: int, wait_seconds: float
    ) -> None:
        self._connect, self._size, self._wait_seconds = connect, size, wait_seconds
        self._idle: list[asyncpg.Connection] = []
        self._used: set[asyncpg.Connection] = set()
        self._opening = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def acquire(self) -> asyncpg.Connection:
        """Return a connection for exclusive use. Raises TimeoutError when none becomes free within
        `wait_seconds`, and what opening one raises."""
        while True:
            while self._idle:
                connection = self._idle.pop()
                if not connection.is_closed():
                    self._used.add(connection)
                    return connection
            if len(self._used) + self._opening < self._size:
                return await self._open()
            await self._wait()

    def release(self, connection: asyncpg.Connection, error: BaseException | None) -> None:
        """Take a connection back.

        After an error it is reused only if the server reported the error. After a timeout or a
        cancellation its statement may still be running.
        """
        self._used.discard(connection)
        busy = error is not None and not isinstance(error, asyncpg.PostgresError)
        if busy or connection.is_closed() or connection.is_in_transaction():
            connection.terminate()
        else:
            self._idle.append(connection)
        self._wake()

    async def close(self, seconds: float) -> None:
        """Close the idle connections, and after `seconds` those still in use."""
        closing = [connection.close(timeout=seconds) for connection in self._idle]
        self._idle.clear()
        await asyncio.gather(*closing, return_exceptions=True)
        until = asyncio.get_running_loop().time() + seconds
        while self._used and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.01)
        for connection in (*self._used, *self._idle):
            connection.terminate()

    async def _open(self) -> asyncpg.Connection:
        self._opening += 1
        try:
            connection = await self._connect()
        except BaseException:
            self._wake()
            raise
        finally:
            self._opening -= 1
        self._used.add(connection)
        return connection

    async def _wait(self) -> None:
        """Wait until a connection may be free."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await asyncio.wait_for(turn, self._wait_seconds)
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._wake()  # woken and cancelled at once: pass the turn on
            raise

    def _wake(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return


class PooledConnection:
    """An async context manager for one connection of a pool.

    `translate` returns the error to raise in place of one from the driver, or None to keep it.
    """

    __slots__ = ("_connection", "_pool", "_translate")

    def __init__(
        self,
        pool: ConnectionPool | None,
        translate: Callable[[BaseException], BaseException | None],
    ) -> None:
        self._pool, self._translate = pool, translate
        self._connection: asyncpg.Connection | None = None

    async def __aenter__(self) -> Any:
        if self._pool is None:
            raise self._translate(ConnectionError("it is closed")) or ConnectionError()
        try:
            self._connection = await self._pool.acquire()
        except Exception as error:
            if (other := self._translate(error)) is not None:
                raise other from error
            raise
        return self._connection

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._pool is not None and self._connection is not None:
            self._pool.release(self._connection, error)
        if error is not None and (other := self._translate(error)) is not None:
            raise other from error
