"""A connection that listens to PostgreSQL notifications, and reconnects when it breaks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

log = logging.getLogger(__name__)
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
ALIVE_SECONDS = 10.0
"""Seconds between liveness checks: a network that drops packets does not close a connection."""


class NotificationListener:
    """A listener that passes notifications to a callback; see PostgresDatabase.listen."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Any]],
        channel: str,
        callback: Callable[[str], None],
    ) -> None:
        self._connect, self._channel, self._callback = connect, channel, callback
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect and listen. Raises what connecting raises."""
        connection = await self._connect_and_listen()
        self._task = asyncio.create_task(self._follow(connection))

    async def close(self) -> None:
        """Stop for good."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _connect_and_listen(self) -> Any:
        connection = await self._connect()
        try:
            await connection.add_listener(
                self._channel, lambda _connection, _pid, _channel, payload: self._callback(payload)
            )
        except BaseException:
            connection.terminate()
            raise
        return connection

    async def _follow(self, connection: Any) -> None:
        while True:
            try:
                await self._wait_until_broken(connection)
            finally:
                connection.terminate()
            connection = await self._reconnect()
            self._callback("")  # notifications may have been missed meanwhile

    async def _wait_until_broken(self, connection: Any) -> None:
        """Return when the connection is lost."""
        broken = asyncio.Event()
        connection.add_termination_listener(lambda _: broken.set())
        while not connection.is_closed() and not broken.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(broken.wait(), ALIVE_SECONDS)
                return
            try:
                await connection.execute("SELECT 1")
            except Exception as error:
                log.info("listener of %s lost its connection: %s", self._channel, error)
                return

    async def _reconnect(self) -> Any:
        pause = FIRST_PAUSE
        while True:
            try:
                return await self._connect_and_listen()
            except Exception as error:
                # Any error: the listener must recover by itself. Requests meet the error, too.
                log.info(
                    "listener of %s cannot connect, next try in %g s: %s",
                    self._channel,
                    pause,
                    error,
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
