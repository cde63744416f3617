"""A connection pool for one PostgreSQL schema, which it migrates when it opens."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from lockstep.storage.postgres.listener import NotificationListener
from lockstep.tokens.errors import BadRequest, LockstepError, Unavailable

try:
    import asyncpg

    from lockstep.storage.postgres.migrate import migrate, migrations
    from lockstep.storage.postgres.pool import ConnectionPool, PooledConnection
except ModuleNotFoundError as error:
    if error.name != "asyncpg":
        raise
    raise BadRequest(
        "a store in PostgreSQL needs asyncpg: pip install 'lockstep-rl[postgres]'", param="store"
    ) from None

SCHEMES = ("postgresql", "postgres")
SCHEMA = "lockstep"
SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,40}")
RETRY_AFTER = 1.0
CONFIGURATION = (
    asyncpg.InvalidAuthorizationSpecificationError,  # a wrong password is one
    asyncpg.InvalidCatalogNameError,
    asyncpg.ClientConfigurationError,
    ValueError,
)
"""Errors that a retry with the same URL would meet again."""


class DatabaseUrl(NamedTuple):
    """The URL for the driver, the schema, and the address to show in errors."""

    dsn: str
    schema: str
    address: str

    @classmethod
    def parse(cls, url: str) -> DatabaseUrl:
        """Parse postgresql://user:password@host:port/database?schema=name.

        Missing parts come from PGHOST, PGPASSWORD and the like, and from ~/.pgpass. Raises
        BadRequest, which never shows the password.
        """
        try:
            parts = urlsplit(url)
        except ValueError:
            parts = urlsplit("")
        _, at, hosts = parts.netloc.rpartition("@")
        # With an @ outside the host part, that part may be half a password: do not show it.
        if parts.scheme not in SCHEMES or ("@" in url and not at):
            raise BadRequest(
                "the store is no URL of PostgreSQL: expected "
                "postgresql://user@host:5432/database?schema=lockstep",
                param="store",
            )
        query = parse_qsl(parts.query, keep_blank_values=True)
        schemas = [value for name, value in query if name in ("schema", "search_path")]
        schema = schemas[-1] if schemas else SCHEMA
        if not SCHEMA_NAME.fullmatch(schema):
            raise BadRequest(
                f"schema {schema!r} of the store: expected small letters, digits and _, at most "
                "41 of them",
                param="store",
            )
        rest = urlencode([pair for pair in query if pair[0] not in ("schema", "search_path")])
        return cls(urlunsplit(parts._replace(query=rest)), schema, hosts or "the host of PGHOST")


class PostgresDatabase:
    """A pool of at most `pool_size` connections, and listeners with connections of their own.

    `statement_seconds` bounds every statement, `connect_seconds` a new connection and the wait for
    a free one.
    """

    def __init__(
        self,
        url: str,
        *,
        pool_size: int = 10,
        statement_seconds: float = 10.0,
        connect_seconds: float = 5.0,
    ) -> None:
        """Raises BadRequest for an invalid URL."""
        self._url = DatabaseUrl.parse(url)
        self._pool_size = pool_size
        self._statement_seconds, self._connect_seconds = statement_seconds, connect_seconds
        self._pool: ConnectionPool | None = None
        self._listeners: list[NotificationListener] = []

    @property
    def address(self) -> str:
        """Host and port, for errors and logs."""
        return self._url.address

    @property
    def schema(self) -> str:
        return self._url.schema

    async def open(self) -> None:
        """Connect and migrate the schema.

        Raises BadRequest for a wrong URL, password or database, and for a newer schema;
        Unavailable when the server cannot be reached.
        """
        self._pool = ConnectionPool(self._connect, self._pool_size, self._connect_seconds)
        try:
            connection = await self._pool.acquire()
            try:
                await migrate(connection, self.schema, migrations())
            finally:
                self._pool.release(connection, None)
        except CONFIGURATION as error:
            await self.close()
            raise BadRequest(
                f"the store at {self.address} refused this gateway ({error}): correct --store, or "
                "PGUSER, PGPASSWORD and the like",
                param="store",
            ) from None
        except BaseException as error:
            await self.close()
            if (unavailable := self._unavailable(error)) is not None:
                raise unavailable from None
            raise

    async def close(self) -> None:
        """Close listeners and connections; statements still running after a few seconds are cut."""
        for listener in self._listeners:
            await listener.close()
        self._listeners.clear()
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close(self._connect_seconds)

    def connection(self) -> PooledConnection:
        """Return an async context manager for a pooled asyncpg.Connection, without a transaction.

        Raises Unavailable when the server cannot be reached, does not respond in time, or cannot
        run the statement. Violated constraints stay asyncpg errors.
        """
        return PooledConnection(self._pool, self._unavailable)

    async def listen(self, channel: str, callback: Callable[[str], None]) -> NotificationListener:
        """Call `callback` with the payload of each notification of the channel, until closed.

        After a reconnect it is called with "", since notifications may have been missed. Raises
        Unavailable when the first connection fails. Notify with `SELECT pg_notify($1, $2)` and
        `channel_name(channel)`.
        """
        listener = NotificationListener(self._connect, self.channel_name(channel), callback)
        try:
            await listener.start()
        except BaseException as error:
            if (unavailable := self._unavailable(error)) is not None:
                raise unavailable from None
            raise
        self._listeners.append(listener)
        return listener

    def channel_name(self, channel: str) -> str:
        """Return the name of a channel in the database, whose channels all schemas share."""
        return f"{self.schema}_{channel}"

    async def _connect(self) -> asyncpg.Connection:
        connection = await asyncpg.connect(
            self._url.dsn,
            command_timeout=self._statement_seconds,
            timeout=self._connect_seconds,
            server_settings={
                "application_name": "lockstep",
                "search_path": self.schema,
                # Longer than the client's timeout: this one is for clients that crashed.
                "statement_timeout": str(int(self._statement_seconds * 2000)),
            },
        )
        # A turn whose response was sent must survive a crash of the server, whatever its default.
        await connection.execute(
            "SELECT set_config('synchronous_commit', 'on', false) "
            "WHERE current_setting('synchronous_commit') = 'off'"
        )
        return connection

    def _unavailable(self, error: BaseException) -> LockstepError | None:
        """Return the error to raise if the server could not do its work, None for other errors."""
        if isinstance(error, asyncpg.IntegrityConstraintViolationError):
            return None
        if isinstance(error, TimeoutError | asyncpg.QueryCanceledError):
            message = f"the store at {self.address} did not answer in time"
        elif isinstance(error, asyncpg.PostgresError | asyncpg.InterfaceError | OSError):
            # strerror leaves out the address, which the message already has.
            kind = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            message = f"the store at {self.address} is unavailable: {kind}"
        else:
            return None
        return Unavailable(message, retry_after=RETRY_AFTER)
