"""Sessions in PostgreSQL: gateways that share them lose nothing and agree, in any order."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from lockstep.gateway.sessions.limits import SessionLimits
from lockstep.gateway.sessions.sessions import Sessions
from lockstep.http.auth import key_digest
from lockstep.render import Renderer
from lockstep.storage.postgres import session_statements as statements
from lockstep.storage.postgres import sessions as store_module
from lockstep.storage.postgres.database import PostgresDatabase
from lockstep.storage.postgres.sessions import PostgresSessionStore
from lockstep.tokens.errors import Busy, Conflict, Forbidden, NotFound, TooLarge, Unavailable
from tests.gateway.sessions.test_sessions import MORE, QUESTION, completion, renderer, say, talk
from tests.scale.postgres_server import PostgresServer, postgres_server

__all__ = ["renderer"]
Opener = Callable[..., Awaitable[Sessions]]


@pytest.fixture
async def opened(store_url: str) -> AsyncIterator[Opener]:
    """Opens the sessions of one more gateway on the test's store."""
    async with AsyncExitStack() as stack:

        async def open_sessions(**options: Any) -> Sessions:
            return await stack.enter_async_context(sessions_on(store_url, **options))

        yield open_sessions


@asynccontextmanager
async def sessions_on(url: str, **options: Any) -> AsyncIterator[Sessions]:
    database = PostgresDatabase(url)
    await database.open()
    try:
        async with Sessions(PostgresSessionStore(database), **options) as sessions:
            yield sessions
    finally:
        await database.close()


def logged(gateways: list[Sessions]) -> list[str]:
    """Every statement of their idle connections from now on."""
    queries: list[str] = []
    for sessions in gateways:
        pool = sessions._store._database._pool  # type: ignore[attr-defined]
        for connection in pool._idle:
            connection.add_query_logger(lambda record: queries.append(record.query))
    return queries


def reply(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.failure_mode("F92")
async def test_a_session_that_alternates_between_gateways_has_no_break_and_the_samples_of_one(
    opened: Opener, renderer: Renderer
) -> None:
    gateways = [await opened(), await opened()]
    messages: list[Any] = [QUESTION]
    for turn in range(8):
        session = await gateways[turn % 2].open("a", renderer)
        plan = await say(session, renderer, messages, f"answer {turn}")
        assert plan.cause is None
        messages.append(MORE)
    async with Sessions() as alone:
        messages = [QUESTION]
        for turn in range(8):
            await say(await alone.open("a", renderer), renderer, messages, f"answer {turn}")
            messages.append(MORE)
        expected = await alone.samples("a")
    for sessions in gateways:
        assert await sessions.samples("a") == expected
        assert sessions.stats()["breaks_edited_history"] == 0
        assert (await sessions.info("a")).turns == 8


@pytest.mark.failure_mode("F92")
async def test_writers_of_one_session_at_once_lose_nothing(
    opened: Opener, renderer: Renderer
) -> None:
    gateways = [await opened() for _ in range(4)]
    rng = random.Random(7)

    async def write(sessions: Sessions, who: int) -> None:
        messages: list[Any] = [{"role": "user", "content": f"I am {who}"}]
        for turn in range(6):
            await say(await sessions.open("a", renderer), renderer, messages, f"{who}.{turn}")
            messages.append(MORE)
            await asyncio.sleep(rng.uniform(0, 0.003))

    await asyncio.gather(*(write(each, who) for who, each in enumerate(gateways)))
    nodes, breaks = await gateways[0].turns("a")
    assert len(nodes) == 24
    assert not breaks
    for who in range(4):
        texts = [node.reply.content for node in nodes if node.reply.content.startswith(f"{who}.")]
        assert texts == [f"{who}.{turn}" for turn in range(6)]
    expected = await gateways[0].samples("a")
    assert len(expected) == 4
    for sessions in gateways[1:]:
        assert await sessions.samples("a") == expected


async def test_a_first_turn_of_two_gateways_at_once_is_one_session_with_two_branches(
    opened: Opener, renderer: Renderer
) -> None:
    one, two = await opened(), await opened()
    first, second = await one.open("a", renderer), await two.open("a", renderer)
    await asyncio.gather(
        say(first, renderer, [QUESTION], "one"), say(second, renderer, [MORE], "two")
    )
    assert len(await one.samples("a")) == 2
    assert (await two.info("a")).turns == 2


async def test_many_turns_of_one_gateway_at_once_share_a_statement(
    opened: Opener, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = await opened()
    session = await sessions.open("a", renderer)
    plan = await session.plan([QUESTION])
    written: list[int] = []
    append = PostgresSessionStore.append

    async def counted(self: Any, entry: Any, new: Any) -> bool:
        written.append(new.count)
        return await append(self, entry, new)

    monkeypatch.setattr(PostgresSessionStore, "append", counted)
    await asyncio.gather(
        *(
            session.commit(plan, [(completion(renderer, plan, f"{at}"), reply(f"{at}"))])
            for at in range(16)
        )
    )
    assert sum(written) == 16
    assert len(written) <= 2
    assert len(await sessions.samples("a")) == 16


async def test_a_turn_takes_two_statements(
    opened: Opener, renderer: Renderer, postgres: PostgresServer
) -> None:
    one, two = await opened(), await opened()
    messages: list[Any] = [QUESTION]
    for turn in range(4):  # the sessions are cached, and the statements prepared
        await say(await (one, two)[turn % 2].open("a", renderer), renderer, messages, f"{turn}")
        messages.append(MORE)
    queries = logged([one, two])
    for turn in range(4, 10):
        queries.clear()
        await say(await (one, two)[turn % 2].open("a", renderer), renderer, messages, f"{turn}")
        messages.append(MORE)
        assert len(queries) == 2, queries


@pytest.mark.failure_mode("F92")
async def test_a_session_deleted_at_one_gateway_takes_no_more_turns_at_another(
    opened: Opener, renderer: Renderer
) -> None:
    one, two = await opened(), await opened()
    messages = await talk(one, "a", renderer, 2)
    session = await two.open("a", renderer)
    plan = await session.plan([*messages, MORE])
    await one.delete("a")
    with pytest.raises(Conflict, match="'a' was deleted"):
        await session.commit(plan, [(completion(renderer, plan, "x"), reply("x"))])
    with pytest.raises(NotFound):
        await two.samples("a")
    await talk(two, "a", renderer, 1)
    assert (await one.info("a")).turns == 1
    # The other gateway, which held the old one, goes on in the new one.
    await talk(one, "a", renderer, 1)
    assert (await two.info("a")).turns == 2


async def test_a_session_finished_at_one_gateway_takes_no_more_turns_at_another(
    opened: Opener, renderer: Renderer
) -> None:
    one, two = await opened(), await opened()
    messages = await talk(one, "a", renderer, 1)
    session = await two.open("a", renderer)
    plan = await session.plan([*messages, MORE])
    await one.keys.finish("a", 0.5)
    with pytest.raises(Conflict, match="finished meanwhile"):
        await session.commit(plan, [(completion(renderer, plan, "x"), reply("x"))])
    with pytest.raises(Forbidden, match="finished"):
        await (await two.open("a", renderer)).plan([*messages, MORE])
    with pytest.raises(Conflict, match=r"reward 0\.5, not 1"):
        await two.keys.finish("a", 1.0)
    assert [sample.reward for sample in await two.samples("a")] == [0.5]


async def test_ids_of_another_tokenizer_are_refused_at_every_gateway(
    opened: Opener, renderer: Renderer, postgres: PostgresServer, store_url: str
) -> None:
    one, two = await opened(), await opened()
    await talk(one, "a", renderer, 1)
    schema = store_url.rpartition("=")[2]
    await postgres.execute(f"UPDATE {schema}.sessions SET tokenizer = 'x'")
    for sessions in (one, two):
        with pytest.raises(Conflict, match="another tokenizer"):
            await sessions.open("a", renderer)


async def test_a_budget_of_calls_holds_over_all_gateways(
    opened: Opener, renderer: Renderer
) -> None:
    gateways = [await opened() for _ in range(3)]
    await gateways[0].keys.mint("a", max_calls=5)
    sessions = [await each.open("a", renderer) for each in gateways for _ in range(4)]
    outcomes = await asyncio.gather(
        *(each.plan([QUESTION]) for each in sessions), return_exceptions=True
    )
    assert sum(not isinstance(each, Exception) for each in outcomes) == 5
    assert sum(isinstance(each, Forbidden) for each in outcomes) == 7


async def test_a_budget_of_tokens_and_its_end_are_seen_at_every_gateway(
    opened: Opener, renderer: Renderer
) -> None:
    one, two = await opened(), await opened()
    await one.keys.mint("a", max_tokens=3)
    messages: list[Any] = [QUESTION]
    await say(await one.open("a", renderer), renderer, messages, "a long answer")
    with pytest.raises(Forbidden, match="its budget is 3"):
        await (await two.open("a", renderer)).plan([*messages, MORE])
    ended = (await two.info("a")).ended
    assert ended is not None
    assert ended.by == "tokens"


async def test_a_key_of_a_session_works_everywhere_until_the_session_is_deleted(
    opened: Opener, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = await opened(), await opened()
    key, key_id = await one.keys.mint("a", cache_salt="g")
    digest = key_digest(key.encode())
    for sessions in (one, two):
        session = await sessions.keys.find(digest)
        assert session is not None
        assert (session[0], session[1].key_id) == ("a", key_id)
    with pytest.raises(Conflict, match="there is a session 'a'"):
        await two.keys.mint("a")
    await two.delete("a")
    assert await two.keys.find(digest) is None
    # The first gateway may believe the key for a moment; it must not begin a session by it.
    with pytest.raises(Conflict, match="was deleted"):
        await one.open("a", renderer, begun=True)
    monkeypatch.setattr(store_module, "monotonic", lambda: 1e12)
    assert await one.keys.find(digest) is None


async def test_who_waits_at_one_gateway_is_told_of_an_end_at_another(
    opened: Opener, renderer: Renderer
) -> None:
    one, two = await opened(), await opened()
    await one.keys.mint("a")
    waiting = asyncio.create_task(one.keys.wait("a", 20))
    await asyncio.sleep(0.05)
    await two.keys.leave("a")
    await asyncio.wait_for(waiting, 5)
    assert (await one.info("a")).ended is not None


async def test_breaks_are_counted_once_over_all_gateways(
    opened: Opener, renderer: Renderer
) -> None:
    one, two = await opened(), await opened()
    messages = await talk(one, "a", renderer, 2)
    edited = [{"role": "user", "content": "2 + 2?"}, *messages[1:], MORE]
    for sessions in (one, two, one):
        session = await sessions.open("a", renderer)
        assert (await session.plan(edited)).cause == "edited_history"
        await sessions._writes.stop()
    _, breaks = await two.turns("a")
    assert breaks == {"edited_history": 1}


async def test_one_gateway_expires_what_was_read_and_not_what_is_in_use(
    opened: Opener, renderer: Renderer
) -> None:
    now = 0.0
    one = await opened(ttl_seconds=100, monotonic=lambda: now)
    two = await opened(ttl_seconds=100, monotonic=lambda: now)
    for name in ("read", "unread", "used", "held"):
        await talk(one, name, renderer, 1)
    for name in ("read", "used", "held"):
        await two.samples(name)
    held = await two.open("held", renderer)
    now = 101.0
    await talk(two, "used", renderer, 1)
    await two.samples("used")
    assert await asyncio.gather(one.sweep(), two.sweep()) in ([2, 0], [1, 0], [0, 1])
    left = [info.id for info in await one.page()]
    assert {"unread", "used"} <= set(left)
    assert "read" not in left
    assert held.id == "held"


async def test_the_clock_of_all_gateways_goes_on_from_the_latest(
    opened: Opener, renderer: Renderer
) -> None:
    ahead, behind = await opened(monotonic=lambda: 500.0), await opened(monotonic=lambda: 7.0)
    ahead._service_clock.restore(1000.0)
    await ahead._expiry.save_clock()
    await behind._expiry.save_clock()
    assert behind._service_clock.now() == 1000.0


async def test_gateways_share_the_secret_that_seals_thoughts(opened: Opener) -> None:
    one, two = await opened(), await opened()
    assert one.secret == two.secret
    assert len(one.secret) == 32


async def test_a_limit_of_turns_holds(opened: Opener, renderer: Renderer) -> None:
    one = await opened(limits=SessionLimits(session_turns=2))
    messages = await talk(one, "a", renderer, 2)
    with pytest.raises(TooLarge, match="2 turns, the limit is 2"):
        await (await one.open("a", renderer)).plan([*messages, MORE])
    assert len(one) == 1


async def test_a_session_that_was_minted_counts_at_once(opened: Opener) -> None:
    one = await opened(limits=SessionLimits(sessions=2))
    for name in ("a", "b"):
        await one.keys.mint(name)
    assert len(one) == 2
    with pytest.raises(Busy, match="2 sessions"):
        await one.keys.mint("c")


async def test_one_gateway_counts_all_sessions_and_the_others_read_its_count(
    opened: Opener, renderer: Renderer, postgres: PostgresServer, store_url: str
) -> None:
    gateways = [await opened() for _ in range(2)]
    schema = store_url.rpartition("=")[2]
    for at, sessions in enumerate(gateways):
        await talk(sessions, f"s{at}", renderer, 1 + at)
    for passed in (10, -3600):  # the count is old, or the server's clock was set back
        await postgres.execute(
            f"UPDATE {schema}.facts SET number = number - {passed} WHERE name = 'counted'"
        )
        queries = logged(gateways)
        await asyncio.gather(*(each._store.refresh_totals() for each in gateways))
        for _ in range(2):  # who did not wait for the count reads it the next time
            for sessions in gateways:
                await sessions._store.refresh_totals()
        assert queries.count(statements.COUNT_SESSIONS) == 1
        (kept,) = await postgres.execute(f"SELECT sum(bytes) AS bytes FROM {schema}.sessions")
        for sessions in gateways:
            assert (len(sessions), sessions.stats()["bytes"]) == (2, kept["bytes"])
    # Until the next count each adds its own sessions to it, and keeps them.
    await talk(gateways[0], "own", renderer, 1)
    for sessions in gateways:
        await sessions._store.refresh_totals()
    assert [len(sessions) for sessions in gateways] == [3, 2]
    assert len(await opened()) == 2


async def test_a_gateway_that_waited_for_the_lock_does_not_count_again(
    opened: Opener, postgres: PostgresServer, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = await opened(), await opened()
    schema = store_url.rpartition("=")[2]
    await postgres.execute(f"UPDATE {schema}.facts SET number = 0 WHERE name = 'counted'")
    queries = logged([one, two])
    lock_task = store_module.lock_task

    async def late(*what: Any) -> bool:
        monkeypatch.setattr(store_module, "lock_task", lock_task)
        await two._store.refresh_totals()
        return await lock_task(*what)

    monkeypatch.setattr(store_module, "lock_task", late)
    await one._store.refresh_totals()
    assert queries.count(statements.COUNT_SESSIONS) == 1


async def test_sessions_expire_where_they_cannot_be_counted(
    opened: Opener, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = await opened(ttl_seconds=0.05)
    await talk(sessions, "a", renderer, 1)
    await sessions.samples("a")

    async def too_many(*what: Any) -> Any:
        raise TimeoutError

    monkeypatch.setattr(store_module, "last_count", too_many)
    async with asyncio.timeout(10):
        while await sessions.page():
            await asyncio.sleep(0.05)


async def test_a_turn_that_changed_in_the_store_is_never_read_as_good(
    opened: Opener, renderer: Renderer, postgres: PostgresServer, store_url: str
) -> None:
    one, two = await opened(), await opened()
    await talk(one, "a", renderer, 3)
    schema = store_url.rpartition("=")[2]
    await postgres.execute(
        f"UPDATE {schema}.turns SET data = set_byte(data, 20, get_byte(data, 20) # 1) "
        "WHERE turn = 1"
    )
    with pytest.raises(Unavailable, match="turn 1 that is not as it was written"):
        await two.samples("a")
    await postgres.execute(f"DELETE FROM {schema}.turns WHERE turn = 1")
    with pytest.raises(Unavailable, match="2 of its 3 turns"):
        await two.samples("a")


async def test_nothing_is_lost_and_nothing_invented_while_the_server_is_away(
    renderer: Renderer,
) -> None:
    with postgres_server() as server:
        async with sessions_on(server.url) as sessions:
            messages = await talk(sessions, "a", renderer, 2)
            session = await sessions.open("a", renderer)
            plan = await session.plan([*messages, MORE])
            await asyncio.to_thread(server.stop)
            with pytest.raises(Unavailable, match=f"the store at 127.0.0.1:{server.port}"):
                await session.commit(plan, [(completion(renderer, plan, "x"), reply("x"))])
            with pytest.raises(Unavailable):
                await sessions.open("a", renderer)
            await asyncio.to_thread(server.start)
            assert (await sessions.info("a")).turns == 2
            await say(await sessions.open("a", renderer), renderer, [*messages, MORE], "kept")
            (sample,) = await sessions.samples("a")
            assert len(sample.versions) == 3


@pytest.mark.parametrize("stored", [True, False])
async def test_a_connection_that_breaks_in_the_middle_of_a_turn_is_looked_into(
    opened: Opener, renderer: Renderer, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    """Whether or not the statement had arrived, the turn is there once."""
    sessions = await opened()
    append, broken = PostgresSessionStore.append, []

    async def breaks_once(self: Any, entry: Any, new: Any) -> bool:
        if not broken:
            broken.append(1)
            if stored:
                await append(self, type(entry)(*(getattr(entry, f) for f in FIELDS)), new)
            raise Unavailable("the store went away")
        return await append(self, entry, new)

    await talk(sessions, "a", renderer, 1)
    monkeypatch.setattr(PostgresSessionStore, "append", breaks_once)
    session = await sessions.open("a", renderer)
    await say(session, renderer, [QUESTION], "again")
    nodes, _ = await sessions.turns("a")
    assert [node.reply.content for node in nodes].count("again") == 1
    assert len(nodes) == 2


FIELDS = (
    "id", "name", "tokenizer", "created", "used", "active", "turns", "bytes", "read_turns",
    "terms", "breaks",
)  # fmt: skip


async def test_a_turn_that_another_request_reads_before_its_own_write_returns_is_there_once(
    opened: Opener, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = await opened()
    messages = await talk(sessions, "a", renderer, 1)
    append = PostgresSessionStore.append

    async def read_meanwhile(self: Any, entry: Any, new: Any) -> bool:
        done = await append(self, entry, new)
        await sessions.open("a", renderer)
        return done

    session = await sessions.open("a", renderer)
    with monkeypatch.context() as patch:
        patch.setattr(PostgresSessionStore, "append", read_meanwhile)
        await say(session, renderer, [*messages, MORE], "once")
    cached = sessions.cache.find("a")
    assert cached is not None
    assert [node.reply.content for node in cached.ledger.nodes].count("once") == 1
    assert len(cached.ledger.roots) == 1


async def test_a_gateway_that_held_a_deleted_session_forgets_its_turns(
    opened: Opener, renderer: Renderer
) -> None:
    one, two = await opened(), await opened()
    await talk(one, "a", renderer, 2)
    await two.delete("a")
    messages: list[Any] = [QUESTION]
    await say(await two.open("a", renderer), renderer, messages, "fresh")
    plan = await (await one.open("a", renderer)).plan([*messages, MORE])
    assert plan.parent is not None
    assert (plan.parent.index, plan.parent.reply.content) == (0, "fresh")


async def test_a_request_that_joins_the_loading_of_another_knows_later_turns(
    opened: Opener, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = await opened(), await opened()
    messages = await talk(one, "a", renderer, 1)
    load, read, go_on = PostgresSessionStore.load, asyncio.Event(), asyncio.Event()

    async def slow(self: Any, *what: Any) -> Any:
        loaded = await load(self, *what)
        if self is two._store and not read.is_set():
            read.set()
            await go_on.wait()
        return loaded

    monkeypatch.setattr(PostgresSessionStore, "load", slow)
    first = asyncio.create_task(two.open("a", renderer))
    await read.wait()
    messages.append(MORE)
    await say(await one.open("a", renderer), renderer, messages, "later")
    second = asyncio.create_task(two.open("a", renderer))
    await asyncio.sleep(0)
    go_on.set()
    await first
    plan = await (await second).plan([*messages, MORE])
    assert plan.cause is None
    assert plan.parent is not None
    assert plan.parent.reply.content == "later"
