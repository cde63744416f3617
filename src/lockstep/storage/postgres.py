"""A pool of connections to one PostgreSQL database whose schema is up to date."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from lockstep.storage.listener import NotificationListener
from lockstep.tokens.errors import BadRequest, LockstepError, Unavailable

try:
    import asyncpg

    from lockstep.storage.migrate import migrate, migrations
    from lockstep.storage.pool import ConnectionPool, PooledConnection
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
"""What another try with the same URL would meet again."""


class DatabaseUrl(NamedTuple):
    """Where a database is: the URL for the driver, the schema in it, and the words to show."""

    dsn: str
    schema: str
    shown: str

    @classmethod
    def parse(cls, url: str) -> DatabaseUrl:
        """Reads postgresql://user:password@host:port/database?schema=name.

        What is left out comes from PGHOST, PGPASSWORD and the like, and from ~/.pgpass. Raises
        BadRequest, which never shows the password.
        """
        try:
            parts = urlsplit(url)
        except ValueError:
            parts = urlsplit("")
        _, at, hosts = parts.netloc.rpartition("@")
        # Without the @ in its place, what stands there may be half a password.
        if parts.scheme not in SCHEMES or ("@" in url and not at):
            raise BadRequest(
                "the store is no URL of PostgreSQL: expected "
                "postgresql://user@host:5432/database?schema=lockstep",
                param="store",
            )
        query = parse_qsl(parts.query, keep_blank_values=True)
        named = [value for name, value in query if name in ("schema", "search_path")]
        schema = named[-1] if named else SCHEMA
        if not SCHEMA_NAME.fullmatch(schema):
            raise BadRequest(
                f"schema {schema!r} of the store: expected small letters, digits and _, at most "
                "41 of them",
                param="store",
            )
        rest = urlencode([each for each in query if each[0] not in ("schema", "search_path")])
        return cls(urlunsplit(parts._replace(query=rest)), schema, hosts or "the host of PGHOST")


class PostgresDatabase:
    """A pool of at most `pool_size` connections; who finds none free waits.

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
        """Raises BadRequest for a URL that is none, and when asyncpg is not installed."""
        self._url = DatabaseUrl.parse(url)
        self._pool_size = pool_size
        self._statement_seconds, self._connect_seconds = statement_seconds, connect_seconds
        self._pool: ConnectionPool | None = None
        self._listeners: list[NotificationListener] = []

    @property
    def shown(self) -> str:
        """Host and port, for errors and logs."""
        return self._url.shown

    @property
    def schema(self) -> str:
        return self._url.schema

    async def open(self) -> None:
        """Connects and brings the schema up to date.

        Raises BadRequest for what is wrong with the URL, the password, the database or a newer
        schema, and Unavailable when the server cannot be reached.
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
                f"the store at {self.shown} refused this gateway ({error}): correct --store, or "
                "PGUSER, PGPASSWORD and the like",
                param="store",
            ) from None
        except BaseException as error:
            await self.close()
            if (away := self._away(error)) is not None:
                raise away from None
            raise

    async def close(self) -> None:
        """Ends every listener and connection; what runs on one is ended with it after a moment."""
        for listener in self._listeners:
            await listener.close()
        self._listeners.clear()
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close(self._connect_seconds)

    def connection(self) -> PooledConnection:
        """`async with`: a connection of the pool, an asyncpg.Connection; without a transaction.

        Raises Unavailable for a server that is away, that does not answer in time, or that cannot
        do its work. Violated constraints come as asyncpg raises them.
        """
        return PooledConnection(self._pool, self._away)

    async def listen(self, channel: str, callback: Callable[[str], None]) -> NotificationListener:
        """Calls `callback` with the payload of each notification of the channel, until closed.

        After the connection was lost and made again it is called with "", as something may have
        been missed. Raises Unavailable when there is no connection at first. Notify with
        `SELECT pg_notify($1, $2)` and `channel_name(channel)`.
        """
        listener = NotificationListener(self._connect, self.channel_name(channel), callback)
        try:
            await listener.start()
        except BaseException as error:
            if (away := self._away(error)) is not None:
                raise away from None
            raise
        self._listeners.append(listener)
        return listener

    def channel_name(self, channel: str) -> str:
        """The name of a channel in the database, which other schemas share."""
        return f"{self.schema}_{channel}"

    async def _connect(self) -> asyncpg.Connection:
        connection = await asyncpg.connect(
            self._url.dsn,
            command_timeout=self._statement_seconds,
            timeout=self._connect_seconds,
            server_settings={
                "application_name": "lockstep",
                "search_path": self.schema,
                # Longer than the client's own time-out: this one is for clients that have gone.
                "statement_timeout": str(int(self._statement_seconds * 2000)),
            },
        )
        # What was answered must survive a crash of the server, whatever its own default is.
        await connection.execute(
            "SELECT set_config('synchronous_commit', 'on', false) "
            "WHERE current_setting('synchronous_commit') = 'off'"
        )
        return connection

    def _away(self, error: BaseException) -> LockstepError | None:
        """The error for the caller when the server could not do its work; None for any other."""
        if isinstance(error, asyncpg.IntegrityConstraintViolationError):
            return None
        if isinstance(error, TimeoutError | asyncpg.QueryCanceledError):
            message = f"the store at {self.shown} did not answer in time"
        elif isinstance(error, asyncpg.PostgresError | asyncpg.InterfaceError | OSError):
            # Without the address, which asyncpg and the system repeat.
            kind = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            message = f"the store at {self.shown} is away: {kind}"
        else:
            return None
        return Unavailable(message, retry_after=RETRY_AFTER)
