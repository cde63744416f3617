"""Election of one leader among the gateways of a PostgreSQL store, by a lease on one row."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Any

from lockstep.storage.postgres.database import PostgresDatabase
from lockstep.storage.protocols import GatewayView, LeadershipView
from lockstep.tokens.errors import LockstepError, Superseded

log = logging.getLogger(__name__)
LEASE_SECONDS = 3.0
RENEW_SECONDS = 0.5
MARGIN_SECONDS = 0.3
"""Seconds by which a leader ends its own lease before the database does."""
SEEN_SECONDS = 5.0
"""Gateways silent for longer are not listed; their rows are deleted after an hour."""
CHANNEL = "leader"

# The holder renews the lease. Another gateway gets it only after it has ended, and with a higher
# generation. Generations start at the time in milliseconds: a store that was emptied or restored
# from a backup must not give out a number that workers have obeyed before.
HOLD = """
INSERT INTO leader AS held (id, holder, address, generation, expires)
VALUES (1, $1, $2, GREATEST($4::bigint, (extract(epoch FROM clock_timestamp()) * 1000)::bigint),
        clock_timestamp() + make_interval(secs => $3))
ON CONFLICT (id) DO UPDATE SET
    holder = $1, address = $2, expires = clock_timestamp() + make_interval(secs => $3),
    generation = CASE WHEN held.holder = $1 THEN held.generation ELSE GREATEST(
        held.generation + 1, $4::bigint, (extract(epoch FROM clock_timestamp()) * 1000)::bigint
    ) END
WHERE held.holder = $1 OR held.expires < clock_timestamp()
RETURNING generation
"""
SEEN = """
INSERT INTO gateways (id, address, seen) VALUES ($1, $2, clock_timestamp())
ON CONFLICT (id) DO UPDATE SET address = $2, seen = clock_timestamp()
"""
LEADER = """
SELECT holder, address, generation, expires < clock_timestamp() AS ended FROM leader WHERE id = 1
"""
ALIVE = """
SELECT id, address, extract(epoch FROM clock_timestamp() - seen)::float8 AS age FROM gateways
WHERE seen > clock_timestamp() - make_interval(secs => $1) AND address <> '' ORDER BY address
"""


class PostgresLeadership:
    """A Leadership by a lease that ends by the database's clock.

    A leader that could not renew the lease stops leading, by its own clock, MARGIN_SECONDS before
    another gateway can be elected.
    """

    shared = True

    def __init__(
        self,
        database: PostgresDatabase,
        *,
        lease_seconds: float = LEASE_SECONDS,
        renew_seconds: float = RENEW_SECONDS,
    ) -> None:
        self.holder = secrets.token_hex(8)
        self._database = database
        self._lease_seconds, self._renew_seconds = lease_seconds, renew_seconds
        self._address = ""
        self._stored = 0
        self._generation = 0
        self._held_until = float("-inf")
        self._held = 0
        self._leader: str | None = None
        self._gateways: tuple[GatewayView, ...] = ()
        self._changed: Callable[[], None] = lambda: None
        self._task: asyncio.Task[None] | None = None
        self._now = asyncio.Event()

    @property
    def leads(self) -> bool:
        return self._held > 0 and monotonic() < self._held_until

    @property
    def generation(self) -> int:
        return self._held if self.leads else self._generation

    def view(self) -> LeadershipView:
        return LeadershipView(
            "leader" if self.leads else "follower", self.generation, self._leader, self._gateways
        )

    async def start(self, stored: int, changed: Callable[[], None]) -> None:
        self._stored, self._changed = stored, changed
        await self._renew_or_take()
        await self._database.listen(CHANNEL, lambda _: self._now.set())
        self._task = asyncio.create_task(self._run(), name="leadership")

    def announce(self, address: str) -> None:
        self._address = address
        self._now.set()

    async def rise_above(self, number: int) -> int:
        async with self._database.connection() as connection:
            generation = await connection.fetchval(
                "UPDATE leader SET generation = GREATEST(generation, $3::bigint + 1) "
                "WHERE id = 1 AND holder = $1 AND generation = $2 RETURNING generation",
                self.holder, self._held, number,
            )  # fmt: skip
        if generation is None:
            raise Superseded("another gateway leads now")
        self._held = self._generation = generation
        return int(generation)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._held = 0
        with suppress(LockstepError):  # the lease ends by itself then
            async with self._database.connection() as connection:
                await connection.execute("DELETE FROM gateways WHERE id = $1", self.holder)
                await connection.execute(
                    "UPDATE leader SET expires = clock_timestamp() WHERE id = 1 AND holder = $1",
                    self.holder,
                )
                await self._notify(connection)

    async def _run(self) -> None:
        while True:
            self._now.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._renew_seconds):
                    await self._now.wait()
            try:
                # A statement that hangs must not outlast the lease that it renews.
                async with asyncio.timeout(self._lease_seconds):
                    await self._renew_or_take()
            except (LockstepError, TimeoutError) as error:
                log.warning("leader lease could not be read or renewed: %s", error)
                self._check_end()
            except Exception:
                # Any error: a gateway whose loop ended could never lead or follow again.
                log.exception("leader lease could not be read or renewed")
                self._check_end()

    def _check_end(self) -> None:
        """Stop leading if the own lease has ended without renewal."""
        if self._held and not self.leads:
            log.warning("this gateway stopped leading: its lease has ended")
            self._held = 0
            self._changed()

    async def _renew_or_take(self) -> None:
        """Renew the lease, or take it if it has ended; read the leader and the live gateways."""
        # Before the statement: the lease may begin at any time while it runs.
        requested_at = monotonic()
        async with self._database.connection() as connection:
            await connection.execute(SEEN, self.holder, self._address)
            alive = await connection.fetch(ALIVE, SEEN_SECONDS)
            generation = None
            if self._competes(alive):
                generation = await connection.fetchval(
                    HOLD, self.holder, self._address, self._lease_seconds, self._stored + 1
                )
            leader = await connection.fetchrow(LEADER)
            if generation is not None and generation != self._held:
                await connection.execute(
                    "DELETE FROM gateways WHERE seen < clock_timestamp() - interval '1 hour'"
                )
                await self._notify(connection)
        before = (self._held, self._generation, self._leader)
        if generation is None:
            if self._held:
                log.warning("this gateway stopped leading: another one was elected")
            self._held = 0
        else:
            if generation != self._held:
                log.warning("this gateway leads now, as generation %d", generation)
            self._held, self._held_until = (
                generation,
                requested_at + self._lease_seconds - MARGIN_SECONDS,
            )
        self._set_view(leader, alive)
        if before != (self._held, self._generation, self._leader):
            self._changed()

    def _competes(self, alive: list[Any]) -> bool:
        """Return whether to try for the lease. A gateway that is still starting has no workers, and
        leaves the lease to gateways that serve."""
        ready = bool(self._address) or self._held > 0
        return ready or all(row["id"] == self.holder for row in alive)

    def _set_view(self, leader: Any, alive: list[Any]) -> None:
        if leader is None:
            return
        self._generation = leader["generation"]
        self._leader = leader["address"] or None if not leader["ended"] else None
        self._gateways = tuple(
            GatewayView(row["address"], row["id"] == leader["holder"], round(row["age"], 1))
            for row in alive
        )

    async def _notify(self, connection: Any) -> None:
        await connection.execute("SELECT pg_notify($1, '')", self._database.channel_name(CHANNEL))
