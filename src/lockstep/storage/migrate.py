"""The schema of the PostgreSQL store: numbered files of SQL, each applied once and recorded."""

from __future__ import annotations

from importlib.resources import files
from typing import NamedTuple

import asyncpg

from lockstep.tokens.errors import BadRequest, Unavailable

LOCK_SECONDS = 60
EXISTS = (
    "SELECT count(*) FROM pg_catalog.pg_tables "
    "WHERE schemaname = $1 AND tablename = 'lockstep_schema'"
)
VERSION = "SELECT max(version) FROM {schema}.lockstep_schema"


class Migration(NamedTuple):
    """One step of the schema; its number is the version that the schema has after it."""

    number: int
    name: str
    sql: str


def migrations() -> list[Migration]:
    """Every migration of this package, in order."""
    entries = (each for each in files(__package__).joinpath("migrations").iterdir())
    steps = [
        Migration(int(each.name[:4]), each.name[5:-4], each.read_text())
        for each in entries
        if each.name.endswith(".sql")
    ]
    return sorted(steps)


async def migrate(connection: asyncpg.Connection, schema: str, steps: list[Migration]) -> None:
    """Brings the schema to the last of `steps`; one process at a time does it, all or nothing.

    Needs no right to change the schema when that is up to date. Raises BadRequest when the schema
    is newer than this package, or when the user may not change it, and Unavailable when another
    process holds it for too long.
    """
    if await _version(connection, schema, steps) == steps[-1].number:
        return
    try:
        async with connection.transaction():
            await connection.execute(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'")
            await connection.execute("SET LOCAL statement_timeout = 0")
            await connection.execute(
                "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", f"lockstep:{schema}"
            )
            # Again, as another process may have done it while this one waited.
            version = await _version(connection, schema, steps)
            if version is None:
                await connection.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
                await connection.execute(
                    f"CREATE TABLE {schema}.lockstep_schema (version integer PRIMARY KEY, "
                    "name text NOT NULL, applied timestamptz NOT NULL DEFAULT now())"
                )
            await connection.execute(f"SET LOCAL search_path = {schema}")
            for step in steps:
                if step.number > (version or 0):
                    await connection.execute(step.sql)
                    await connection.execute(
                        "INSERT INTO lockstep_schema (version, name) VALUES ($1, $2)",
                        step.number,
                        step.name,
                    )
    except asyncpg.LockNotAvailableError:
        raise Unavailable(
            f"another process has been migrating the schema {schema!r} for {LOCK_SECONDS} s: "
            "try again when it is done"
        ) from None
    except asyncpg.InsufficientPrivilegeError as error:
        raise BadRequest(
            f"the database user may not create or migrate the schema {schema!r} ({error}): grant "
            "it CREATE, or start one gateway once as a user that may",
            param="store",
        ) from None


async def _version(
    connection: asyncpg.Connection, schema: str, steps: list[Migration]
) -> int | None:
    """The version of the schema, None where there is none. Raises BadRequest for a newer one."""
    # Not to_regclass, which may still not see what another process made while this one waited.
    if not await connection.fetchval(EXISTS, schema):
        return None
    version = await connection.fetchval(VERSION.format(schema=schema)) or 0
    if version > steps[-1].number:
        raise BadRequest(
            f"the schema {schema!r} has version {version}, and this Lockstep knows "
            f"{steps[-1].number}: a newer one migrated it; upgrade this gateway, or give another "
            "?schema=",
            param="store",
        )
    return int(version)
