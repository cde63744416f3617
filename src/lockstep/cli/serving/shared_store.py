"""The PostgreSQL store that several gateways share, as `--store` names it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.cli.serving.arguments import GatewayArguments
from lockstep.settings import Settings
from lockstep.tokens.errors import BadRequest

if TYPE_CHECKING:
    from lockstep.fleet.control.postgres_leadership import PostgresLeadership
    from lockstep.fleet.control.postgres_store import PostgresControlStore
    from lockstep.gateway.key_store import KeyStore
    from lockstep.gateway.sessions.store.postgres import PostgresSessionStore
    from lockstep.storage.postgres import PostgresDatabase


@dataclass(frozen=True, slots=True)
class SharedStore:
    """An open database, this gateway's part in its elections, and the fleet's state and sessions
    in it."""

    database: PostgresDatabase
    leadership: PostgresLeadership
    control: PostgresControlStore
    sessions: PostgresSessionStore
    keys: KeyStore


@asynccontextmanager
async def shared_store(
    arguments: GatewayArguments, settings: Settings
) -> AsyncIterator[SharedStore | None]:
    """The store while the block runs; None without --store and LOCKSTEP_STORE.

    Raises BadRequest for a URL that does not work and where the gateways would not know each
    other's admin token, and Unavailable when the database cannot be reached.
    """
    url = arguments.store or settings.store
    if url is None:
        yield None
        return
    for name, value in (("sessions", arguments.sessions), ("state-dir", arguments.state_dir)):
        if value is not None:
            raise BadRequest(
                f"--{name} {value} and a store: sessions and state are in the store; leave one of "
                "them out",
                param="store",
            )
    if settings.admin_token is None:
        raise BadRequest(
            "gateways that share a store hand admin calls on to each other, and so need one admin "
            "token: set LOCKSTEP_ADMIN_TOKEN or LOCKSTEP_ADMIN_TOKEN_FILE alike for all of them",
            param="store",
        )
    from lockstep.fleet.control.postgres_leadership import PostgresLeadership
    from lockstep.fleet.control.postgres_store import PostgresControlStore
    from lockstep.gateway.key_store import KeyStore
    from lockstep.gateway.sessions.store.postgres import PostgresSessionStore
    from lockstep.storage.postgres import PostgresDatabase

    database = PostgresDatabase(url)
    await database.open()
    keys = KeyStore(database)
    try:
        await keys.follow()
        leadership = PostgresLeadership(database)
        yield SharedStore(
            database,
            leadership,
            PostgresControlStore(database, leadership),
            PostgresSessionStore(database),
            keys,
        )
    finally:
        await keys.close()
        await database.close()


def advertised(arguments: GatewayArguments, admin_url: str) -> str:
    """The URL under which other gateways reach this one's admin port.

    Raises BadRequest when it listens everywhere and nothing says under which name.
    """
    if arguments.advertise is not None:
        return arguments.advertise.rstrip("/")
    if "://0.0.0.0:" in admin_url or "://[::]:" in admin_url:
        raise BadRequest(
            f"the admin port listens at {admin_url}, which other gateways cannot call: give "
            "--advertise http://HOST:PORT, the address by which they reach this machine",
            param="advertise",
        )
    return admin_url
