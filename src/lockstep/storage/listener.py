"""A connection that listens to notifications of PostgreSQL, and is made again when it breaks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

log = logging.getLogger(__name__)
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
ALIVE_SECONDS = 10.0
"""How often the connection is tried: a network that swallows packets closes nothing."""


class NotificationListener:
    """Hands the notifications of one channel to a callback; see PostgresDatabase.listen."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Any]],
        channel: str,
        callback: Callable[[str], None],
    ) -> None:
        self._connect, self._channel, self._callback = connect, channel, callback
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listens. Raises what the connection raises."""
        connection = await self._listening()
        self._task = asyncio.create_task(self._follow(connection))

    async def close(self) -> None:
        """Stops for good."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _listening(self) -> Any:
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
                await self._until_broken(connection)
            finally:
                connection.terminate()
            connection = await self._again()
            self._callback("")

    async def _until_broken(self, connection: Any) -> None:
        """Returns when the connection is no more."""
        broken = asyncio.Event()
        connection.add_termination_listener(lambda _: broken.set())
        while not connection.is_closed() and not broken.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(broken.wait(), ALIVE_SECONDS)
                return
            try:
                await connection.execute("SELECT 1")
            except Exception as error:
                log.info("the connection that listens to %s broke: %s", self._channel, error)
                return

    async def _again(self) -> Any:
        pause = FIRST_PAUSE
        while True:
            try:
                return await self._listening()
            except Exception as error:
                # Whatever it is, who listens must go on; the store itself says it to requests.
                log.info("cannot listen to %s, next try in %g s: %s", self._channel, pause, error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
