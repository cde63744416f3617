"""What every store promises, whatever its backend: a test module imports all of it.

The module has a fixture `url`, the URL of an empty store that can be opened again:

    from tests.storage.claims import *
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from lockstep.storage import Store, open_store
from lockstep.storage.desired_state import STORED_OPERATIONS, Desired
from lockstep.storage.protocols import NewTurns, SessionStore
from lockstep.storage.session_entry import SessionEntry, SessionTerms
from lockstep.tokens.errors import Conflict
from lockstep.tokens.operation import Operation

BREAK = (b"key", "edited_history")


@pytest.fixture
async def sessions(url: str) -> AsyncIterator[SessionStore]:
    """The sessions of an empty store, started."""
    async with open_store(url) as store:
        await store.sessions.start()
        yield store.sessions
        await store.sessions.stop()


@pytest.fixture
async def leading(url: str) -> AsyncIterator[Store]:
    """An empty store whose only gateway leads."""
    async with open_store(url) as store:
        await lead(store)
        yield store
        await store.leadership.stop()


async def lead(store: Store) -> None:
    store.leadership.announce("http://127.0.0.1:1")
    await store.leadership.start(100, lambda: None)
    assert store.leadership.leads


def entry(name: str, terms: SessionTerms | None = None, active: float = 5.0) -> SessionEntry:
    return SessionEntry(None, name, b"tokenizer", 1.0, 2.0, active, terms=terms)


def turns(head: int, *data: bytes, breaks: tuple[tuple[bytes, str], ...] = ()) -> NewTurns:
    return NewTurns(head, len(data), lambda: list(data), 100 * (head + len(data)), 7, breaks)


async def filled(sessions: SessionStore, name: str, *data: bytes) -> SessionEntry:
    session = entry(name)
    assert await sessions.append(session, turns(0, *data))
    return session


async def test_turns_breaks_and_sizes_are_there_when_the_store_is_opened_again(url: str) -> None:
    async with open_store(url) as store:
        await store.sessions.start()
        session = await filled(store.sessions, "a", b"one", b"two")
        assert await store.sessions.append(session, turns(2, b"three", breaks=(BREAK,)))
        await store.sessions.add_breaks(session, [BREAK, (b"other", "truncated")])
        assert store.sessions.totals() == (1, 300)
        secret = store.sessions.secret
        await store.sessions.stop()
    async with open_store(url) as store:
        await store.sessions.start()
        assert (len(secret), store.sessions.secret) == (32, secret)
        loaded = await store.sessions.load("a")
        assert loaded is not None
        assert (loaded.start, list(loaded.stored.turns)) == (0, [b"one", b"two", b"three"])
        assert sorted(loaded.stored.breaks) == [BREAK, (b"other", "truncated")]
        assert (loaded.entry.turns, loaded.entry.bytes, loaded.entry.id) == (3, 300, session.id)
        await store.sessions.stop()


async def test_a_turn_that_cannot_be_encoded_stores_nothing(sessions: SessionStore) -> None:
    session = await filled(sessions, "a", b"one")

    def deleted() -> list[bytes]:
        raise Conflict("the session was deleted")

    with pytest.raises(Conflict, match="was deleted"):
        await sessions.append(session, NewTurns(1, 1, deleted, 200, 7, ()))
    loaded = await sessions.load("a")
    assert loaded is not None
    assert (list(loaded.stored.turns), session.turns, session.bytes) == ([b"one"], 1, 100)


async def test_a_name_is_taken_once_and_free_after_the_session_was_removed(
    sessions: SessionStore,
) -> None:
    first = entry("a", SessionTerms(key_id="k", digest=b"d" * 32))
    assert await sessions.create(first)
    assert not await sessions.create(entry("a", SessionTerms(key_id="l", digest=b"e" * 32)))
    found = await sessions.find_key(b"d" * 32)
    assert found is not None
    assert (found.name, found.turns) == ("a", 0)
    await sessions.remove([first])
    assert await sessions.find("a") is None
    assert await sessions.load("a") is None
    assert await sessions.find_key(b"d" * 32) is None
    assert await sessions.create(entry("a", SessionTerms(key_id="m", digest=b"f" * 32)))


async def test_terms_change_in_one_step_or_not_at_all(sessions: SessionStore) -> None:
    session = entry("a", SessionTerms(key_id="k", digest=b"d" * 32))
    await sessions.create(session)
    await sessions.change_terms(session, lambda terms: terms.with_end("finish", 9.0))

    def refuse(_: SessionTerms) -> SessionTerms:
        raise Conflict("another reward")

    with pytest.raises(Conflict, match="another reward"):
        await sessions.change_terms(session, refuse)
    stored = await sessions.find("a")
    assert stored is not None
    assert stored.terms is not None
    assert session.terms is not None
    for terms in (stored.terms, session.terms):
        assert (terms.ended_by, terms.ended_at, terms.key_id) == ("finish", 9.0, "k")


async def test_calls_and_tokens_count_against_the_budget(sessions: SessionStore) -> None:
    session = entry("a", SessionTerms(key_id="k", digest=b"d" * 32, max_calls=2, max_tokens=100))
    await sessions.create(session)
    await sessions.count_call(session)
    assert await sessions.append(session, turns(0, b"one"))
    await sessions.count_call(session)
    assert session.terms is not None
    assert (session.terms.calls, session.terms.tokens) == (2, 7)
    assert session.terms.exhausted() == "calls"


async def test_pages_are_in_the_order_of_names_and_the_latest_in_the_order_of_use(
    sessions: SessionStore,
) -> None:
    for used, name in enumerate(("b", "a", "c", "C")):
        session = entry(name)
        session.used = float(used)
        await sessions.append(session, turns(0, b"one"))
    assert [session.name for session in await sessions.page("", 3)] == ["C", "a", "b"]
    assert [session.name for session in await sessions.page("b", 3)] == ["c"]
    assert await sessions.latest(lambda name: name != "c", 2, 1) == (["a", "b"], 3)


async def test_what_is_idle_and_read_expires_and_no_more_than_the_limit(
    sessions: SessionStore,
) -> None:
    for name in ("busy", "read", "unread", "also read"):
        session = await filled(sessions, name, b"one")
        if "read" in name and name != "unread":
            await sessions.mark_read(session, 1)
    fresh = entry("fresh", active=50.0)
    await sessions.append(fresh, turns(0, b"one"))

    def idle(name: str) -> bool:
        return name != "busy"

    assert await sessions.expire(3.0, False, idle, 10) == []
    (first,) = await sessions.expire(10.0, False, idle, 1)
    (second,) = await sessions.expire(10.0, False, idle, 10)
    assert {first, second} == {"read", "also read"}
    assert await sessions.expire(10.0, True, idle, 10) == ["unread"]
    assert [session.name for session in await sessions.page("", 10)] == ["busy", "fresh"]


async def test_the_service_clock_goes_on_where_it_was_saved(url: str) -> None:
    async with open_store(url) as store:
        assert await store.sessions.start() == 0.0
        assert await store.sessions.save_clock(12.5) == 12.5
        await store.sessions.stop()
    async with open_store(url) as store:
        assert await store.sessions.start() == 12.5
        await store.sessions.stop()


async def test_a_gateway_alone_on_a_store_leads_under_a_number_that_rises(leading: Store) -> None:
    leadership = leading.leadership
    assert leadership.generation > 100
    assert leadership.view().generation == leadership.generation
    above = leadership.generation + 5
    assert await leadership.rise_above(above) == leadership.generation == above + 1


async def test_the_desired_state_is_there_when_the_store_is_opened_again(url: str) -> None:
    async with open_store(url) as store:
        await lead(store)
        assert await store.control.desired() == Desired()
        desired = Desired(version="7", agreed=("6", "7"), generation=store.leadership.generation)
        await store.control.save(desired, ())
        assert (await store.control.snapshot()).desired == desired
        await store.leadership.stop()
    async with open_store(url) as store:
        assert await store.control.desired() == desired


async def test_an_operation_is_found_by_its_id_and_the_last_one_by_its_key(leading: Store) -> None:
    control = leading.control
    for number in (1, 2):
        await control.record(Operation(str(number), "flush_cache", {}, "k", started=float(number)))
    await control.record(Operation("2", "flush_cache", {}, "k", started=2.0, status="done"))
    last = await control.by_key("k")
    assert last is not None
    assert (last.id, last.status) == ("2", "done")
    assert await control.by_key("other") is await control.operation("3") is None
    await control.cut_off()
    assert [(each.id, each.status) for each in await control.latest(5)] == [
        ("2", "done"), ("1", "lost"),
    ]  # fmt: skip


async def test_the_oldest_operations_are_dropped(
    leading: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = __import__(type(leading.control).__module__, fromlist=["STORED_OPERATIONS"])
    assert module.STORED_OPERATIONS == STORED_OPERATIONS == 1000
    monkeypatch.setattr(module, "STORED_OPERATIONS", 3)
    for number in range(5):
        await leading.control.record(Operation(str(number), "flush_cache", {}, None))
    assert [each.id for each in await leading.control.latest(10)] == ["4", "3", "2"]
