"""Migrations of the PostgreSQL schema: numbered SQL files, each applied once and recorded."""

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
    """One step of the schema; its number is the schema version after it."""

    number: int
    name: str
    sql: str


def migrations() -> list[Migration]:
    """Return all migrations of this package, in order."""
    steps = [
        Migration(int(file.name[:4]), file.name[5:-4], file.read_text())
        for file in files(__package__).joinpath("migrations").iterdir()
        if file.name.endswith(".sql")
    ]
    return sorted(steps)


async def migrate(connection: asyncpg.Connection, schema: str, steps: list[Migration]) -> None:
    """Apply the missing steps in one transaction, in one process at a time.

    A schema that is up to date needs no right to change it. Raises BadRequest when the schema is
    newer than this package, or when the user may not change it, and Unavailable when another
    process has been migrating for LOCK_SECONDS.
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
            # Read again: another process may have migrated while this one waited for the lock.
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
    """Return the schema's version, None without a schema. Raises BadRequest for a newer one."""
    # Not to_regclass: its catalog snapshot may miss a table created while this process waited.
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
