"""The database of a shared store: migrations, errors that say what is wrong, notifications."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from lockstep.storage.postgres.database import DatabaseUrl, PostgresDatabase
from lockstep.storage.postgres.migrate import Migration, migrate, migrations
from lockstep.tokens.errors import BadRequest, Unavailable
from tests.scale.postgres_server import PostgresServer, postgres_server


async def test_gateways_that_start_at_once_migrate_once(store_url: str) -> None:
    databases = [PostgresDatabase(store_url) for _ in range(4)]
    await asyncio.gather(*(each.open() for each in databases))
    async with databases[0].connection() as connection:
        rows = await connection.fetch("SELECT version FROM lockstep_schema ORDER BY version")
    for each in databases:
        await each.close()
    assert [row["version"] for row in rows] == [step.number for step in migrations()]


async def test_two_schemas_of_one_database_know_nothing_of_each_other(
    postgres: PostgresServer,
) -> None:
    first, second = PostgresDatabase(postgres.schema_url()), PostgresDatabase(postgres.schema_url())
    await first.open()
    await second.open()
    async with first.connection() as connection:
        await connection.execute("INSERT INTO facts VALUES ('x', 'y')")
    async with second.connection() as connection:
        assert await connection.fetchval("SELECT count(*) FROM facts WHERE name = 'x'") == 0
    await first.close()
    await second.close()


async def test_a_later_migration_reaches_a_schema_that_is_in_use(store_url: str) -> None:
    database = PostgresDatabase(store_url)
    await database.open()
    last = migrations()[-1].number
    step = Migration(last + 1, "more", "ALTER TABLE gateways ADD COLUMN more text")
    async with database.connection() as connection:
        await migrate(connection, database.schema, [*migrations(), step])
        await connection.fetch("SELECT more FROM gateways")
    await database.close()
    with pytest.raises(BadRequest, match=f"has version {last + 1}, and this Lockstep knows {last}"):
        await database.open()


async def test_a_migration_that_fails_leaves_nothing_behind(store_url: str) -> None:
    database = PostgresDatabase(store_url)
    await database.open()
    last = migrations()[-1].number
    step = Migration(last + 1, "broken", "CREATE TABLE half (x int); SELECT nonsense")
    async with database.connection() as connection:
        with pytest.raises(asyncpg.PostgresError):
            await migrate(connection, database.schema, [*migrations(), step])
        assert await connection.fetchval("SELECT to_regclass('half')") is None
        assert await connection.fetchval("SELECT max(version) FROM lockstep_schema") == last
    await database.close()


async def test_a_user_who_may_not_create_a_schema_is_told_so(postgres: PostgresServer) -> None:
    url = postgres.schema_url()
    await postgres.execute("CREATE ROLE reader LOGIN")
    with pytest.raises(BadRequest, match="may not create or migrate the schema"):
        await PostgresDatabase(url.replace("lockstep@", "reader@")).open()


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("mysql://x/y", "is no URL of PostgreSQL"),
        ("postgresql://u:secret@[x/y", "is no URL of PostgreSQL"),
        ("postgresql://u:secret/half@h/y", "is no URL of PostgreSQL"),
        ("postgresql://u:secret@h/y?schema=No-Way", "schema 'No-Way' of the store"),
    ],
)
def test_a_wrong_url_is_refused_without_its_password(url: str, error: str) -> None:
    with pytest.raises(BadRequest, match=error) as caught:
        PostgresDatabase(url)
    assert "secret" not in caught.value.message


async def test_a_refused_password_and_a_missing_database_are_said_without_the_password() -> None:
    with postgres_server() as server:
        hba = server.directory / "data" / "pg_hba.conf"
        await server.execute("CREATE ROLE app LOGIN PASSWORD 'right-one'")
        hba.write_text("host all app 127.0.0.1/32 scram-sha-256\nhost all all 127.0.0.1/32 trust\n")
        server.stop()
        server.start()
        host = f"127.0.0.1:{server.port}"
        with pytest.raises(BadRequest, match=f"{host} refused this gateway") as caught:
            await PostgresDatabase(f"postgresql://app:wrong-one@{host}/postgres").open()
        assert "wrong-one" not in caught.value.message
        with pytest.raises(BadRequest, match='database "nowhere" does not exist'):
            await PostgresDatabase(f"postgresql://lockstep@{host}/nowhere").open()


async def test_a_server_that_is_away_is_unavailable_and_named() -> None:
    database = PostgresDatabase("postgresql://u:secret@127.0.0.1:1/x", connect_seconds=1)
    with pytest.raises(Unavailable, match=r"the store at 127\.0\.0\.1:1 is unavailable") as caught:
        await database.open()
    assert "secret" not in caught.value.message


async def test_a_statement_that_takes_too_long_is_unavailable(store_url: str) -> None:
    database = PostgresDatabase(store_url, statement_seconds=0.2)
    await database.open()
    with pytest.raises(Unavailable, match="did not answer in time"):
        async with database.connection() as connection:
            await connection.execute("SELECT pg_sleep(5)")
    async with database.connection() as connection:
        assert await connection.fetchval("SELECT 1") == 1
    await database.close()


async def test_a_full_pool_is_unavailable_after_a_wait(store_url: str) -> None:
    database = PostgresDatabase(store_url, pool_size=1, connect_seconds=0.3)
    await database.open()
    async with database.connection():
        with pytest.raises(Unavailable, match="did not answer in time"):
            async with database.connection():
                pass
    await database.close()


async def test_a_listener_hears_again_after_a_restart_and_is_told_that_it_may_have_missed() -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()
    with postgres_server() as server:
        database = PostgresDatabase(server.url)
        await database.open()
        await database.listen("news", heard.put_nowait)
        await _notify(database, "first")
        assert await asyncio.wait_for(heard.get(), 5) == "first"
        server.stop()
        with pytest.raises(Unavailable):
            await _notify(database, "lost")
        server.start()
        assert await asyncio.wait_for(heard.get(), 15) == ""
        await _notify(database, "second")
        assert await asyncio.wait_for(heard.get(), 5) == "second"
        await database.close()


async def _notify(database: PostgresDatabase, payload: str) -> None:
    async with database.connection() as connection:
        name = database.channel_name("news")
        await connection.execute("SELECT pg_notify($1, $2)", name, payload)


def test_the_schema_comes_from_the_url() -> None:
    assert DatabaseUrl.parse("postgresql://h/d").schema == "lockstep"
    named = DatabaseUrl.parse("postgres://u:p@h:5/d?sslmode=require&schema=blue")
    assert (named.schema, named.address) == ("blue", "h:5")
    assert named.dsn == "postgres://u:p@h:5/d?sslmode=require"
    several = DatabaseUrl.parse("postgresql://u:p@one:5432,two:5432/d?target_session_attrs=primary")
    assert several.address == "one:5432,two:5432"
    assert DatabaseUrl.parse("postgresql:///d").address == "the host of PGHOST"


async def test_a_statement_that_was_cancelled_leaves_no_connection_that_still_runs_it(
    store_url: str,
) -> None:
    database = PostgresDatabase(store_url, pool_size=1)
    await database.open()

    async def sleep() -> None:
        async with database.connection() as connection:
            await connection.execute("SELECT pg_sleep(30)")

    sleeping = asyncio.create_task(sleep())
    await asyncio.sleep(0.1)
    sleeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeping
    async with asyncio.timeout(3), database.connection() as connection:
        assert await connection.fetchval("SELECT 1") == 1
    await database.close()


async def test_connections_that_the_server_ended_are_replaced(store_url: str) -> None:
    database = PostgresDatabase(store_url, pool_size=2)
    await database.open()
    async with database.connection() as one, database.connection() as two:
        ids = [await each.fetchval("SELECT pg_backend_pid()") for each in (one, two)]
    async with database.connection() as connection:
        mine = await connection.fetchval("SELECT pg_backend_pid()")
        (other,) = set(ids) - {mine}
        await connection.execute("SELECT pg_terminate_backend($1)", other)
    await asyncio.sleep(0.1)
    async with database.connection() as one, database.connection() as two:
        assert other not in [await each.fetchval("SELECT pg_backend_pid()") for each in (one, two)]
    await database.close()


async def test_who_waits_for_a_connection_gets_it_in_turn(store_url: str) -> None:
    database = PostgresDatabase(store_url, pool_size=2)
    await database.open()
    done: list[int] = []

    async def work(number: int) -> None:
        async with database.connection() as connection:
            await connection.execute("SELECT pg_sleep(0.002)")
            done.append(number)

    await asyncio.gather(*(work(number) for number in range(40)))
    assert sorted(done) == list(range(40))
    async with database.connection() as connection:
        count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'lockstep'"
        assert await connection.fetchval(count) >= 1
    await database.close()


async def test_a_transaction_that_was_left_open_is_not_handed_on(store_url: str) -> None:
    database = PostgresDatabase(store_url, pool_size=1)
    await database.open()
    async with database.connection() as connection:
        await connection.execute("BEGIN")
        await connection.execute("INSERT INTO facts (name) VALUES ('half')")
    async with database.connection() as connection:
        assert not connection.is_in_transaction()
        assert await connection.fetchval("SELECT count(*) FROM facts WHERE name = 'half'") == 0
    await database.close()
