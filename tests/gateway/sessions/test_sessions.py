"""Sessions: every turn whose reply was sent is stored, with its branches, until it is read."""

from __future__ import annotations

import asyncio
import gc
import os
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import pytest

from lockstep.gateway.sessions import expiry
from lockstep.gateway.sessions.cache import CachedSession, Session
from lockstep.gateway.sessions.limits import SessionLimits
from lockstep.gateway.sessions.sessions import Sessions
from lockstep.ledger import PromptPlan
from lockstep.protocol.json.lazy_ids import LazyIds
from lockstep.render import Renderer
from lockstep.render import renderer as renderer_module
from lockstep.storage.sqlite import session_tables as tables
from lockstep.storage.sqlite import thread as store
from lockstep.storage.sqlite.sessions import SqliteSessionStore
from lockstep.tokens import Completion, Sample, VersionSpan
from lockstep.tokens.errors import (
    BadRequest,
    Busy,
    Conflict,
    Forbidden,
    Misaligned,
    NotFound,
    PrefixBreak,
    TooLarge,
    Unavailable,
)

QUESTION = {"role": "user", "content": "1 + 2?"}
MORE = {"role": "user", "content": "And?"}


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    return Renderer.load("tiny")


def completion(renderer: Renderer, plan: PromptPlan, text: str, **more: Any) -> Completion:
    ids = [*renderer.encode(text), renderer.stop_token_ids[0]]
    return Completion(
        token_ids=ids,
        logprobs=[-0.1 - at / 64 for at in range(len(ids))],
        prompt_ids=plan.prompt_ids,
        versions=(VersionSpan("1", 0, len(ids)),),
        **{"finish": "stop", **more},
    )


async def say(
    session: Session, renderer: Renderer, messages: list[Any], *texts: str, **more: Any
) -> PromptPlan:
    """Plans and commits a turn with a choice for each text; the first goes on."""
    plan = await session.plan(messages)
    replies = [{"role": "assistant", "content": text} for text in texts]
    await session.commit(
        plan,
        [(completion(renderer, plan, m["content"], **more), m) for m in replies],
    )
    messages.append(replies[0])
    return plan


async def talk(sessions: Sessions, name: str, renderer: Renderer, turns: int) -> list[Any]:
    messages: list[Any] = []
    for turn in range(turns):
        messages.append(QUESTION if turn == 0 else MORE)
        await say(await sessions.open(name, renderer), renderer, messages, f"answer {turn}")
    return messages


async def test_a_session_goes_on_after_a_restart(renderer: Renderer, tmp_path: Path) -> None:
    path = str(tmp_path / "sessions.db")
    async with Sessions(SqliteSessionStore(path)) as sessions:
        messages = await talk(sessions, "a", renderer, 3)
        before = await sessions.samples("a")
        info = await sessions.info("a")
    async with Sessions(SqliteSessionStore(path)) as sessions:
        assert await sessions.samples("a") == before
        assert await sessions.info("a") == info
        plan = await say(await sessions.open("a", renderer), renderer, [*messages, MORE], "more")
        (sample,) = await sessions.samples("a")
        assert plan.prompt_ids[: len(before[0].token_ids)] == before[0].token_ids
        assert sample.token_ids[: len(plan.prompt_ids)] == plan.prompt_ids
        assert sessions.counts.loaded == 1


@pytest.mark.failure_mode("F11")
async def test_choices_are_branches_and_all_of_them_are_kept(
    renderer: Renderer, tmp_path: Path
) -> None:
    path = str(tmp_path / "sessions.db")
    async with Sessions(SqliteSessionStore(path)) as sessions:
        messages: list[Any] = [QUESTION]
        session = await sessions.open("a", renderer)
        await say(session, renderer, messages, "three", "four", "five")
        await say(session, renderer, [*messages, MORE], "yes")
        samples = await sessions.samples("a")
        assert len(samples) == 3
    async with Sessions(SqliteSessionStore(path)) as sessions:
        assert await sessions.samples("a") == samples


async def test_a_commit_is_whole_or_not_at_all(renderer: Renderer) -> None:
    async with Sessions() as sessions:
        session = await sessions.open("a", renderer)
        plan = await session.plan([QUESTION])
        good = completion(renderer, plan, "three")
        other = await session.plan([MORE])
        bad = completion(renderer, other, "no")
        message = {"role": "assistant", "content": "three"}
        with pytest.raises(Misaligned):
            await session.commit(plan, [(good, message), (bad, message)])
        with pytest.raises(NotFound):
            await sessions.samples("a")
        await session.commit(plan, [(good, message)])
        assert len(await sessions.samples("a")) == 1


async def test_requests_of_one_session_may_run_side_by_side(
    renderer: Renderer, tmp_path: Path
) -> None:
    path = str(tmp_path / "sessions.db")

    async def branch(sessions: Sessions, at: int, messages: list[Any]) -> None:
        session = await sessions.open("a", renderer)
        await say(session, renderer, [*messages, {"role": "user", "content": f"q{at}"}], f"a{at}")

    async with Sessions(SqliteSessionStore(path)) as sessions:
        messages = await talk(sessions, "a", renderer, 1)
    async with Sessions(SqliteSessionStore(path)) as sessions:
        await asyncio.gather(*(branch(sessions, at, messages) for at in range(20)))
        assert sessions.counts.loaded == 1
        samples = await sessions.samples("a")
    assert len({tuple(sample.token_ids) for sample in samples}) == 20
    async with Sessions(SqliteSessionStore(path)) as sessions:
        assert sorted(await sessions.samples("a"), key=repr) == sorted(samples, key=repr)


@pytest.mark.failure_mode("F02")
async def test_a_break_is_counted_once_and_survives_a_restart(
    renderer: Renderer, tmp_path: Path
) -> None:
    path = str(tmp_path / "sessions.db")
    edited = [QUESTION, {"role": "assistant", "content": "I never said this"}, MORE]
    async with Sessions(SqliteSessionStore(path)) as sessions:
        await talk(sessions, "a", renderer, 2)
        strict = await sessions.open("a", renderer, breaks="strict")
        with pytest.raises(PrefixBreak) as caught:
            await strict.plan(edited)
        assert caught.value.cause == "edited_history"
        fork = await sessions.open("a", renderer)
        assert (await fork.plan(edited)).cause == "edited_history"
        assert sessions.counts.breaks == {"edited_history": 1}
    async with Sessions(SqliteSessionStore(path)) as sessions:
        await say(await sessions.open("a", renderer), renderer, list(edited), "now")
        assert sessions.counts.breaks == {}
        assert [sample.breaks for sample in await sessions.samples("a")] == [
            (),
            ("edited_history",),
        ]


def in_memory() -> list[CachedSession]:
    return [each for each in gc.get_objects() if type(each) is CachedSession]


async def test_only_busy_sessions_stay_in_memory(renderer: Renderer, tmp_path: Path) -> None:
    limit = 30_000
    # Tests before this one may have left some that the garbage collector has not seen yet.
    others = WeakSet(in_memory())
    async with Sessions(
        SqliteSessionStore(str(tmp_path / "sessions.db")),
        limits=SessionLimits(session_cache_bytes=limit),
    ) as sessions:
        spoken = {name: await talk(sessions, name, renderer, 4) for name in map(str, range(40))}
        assert sessions.cache.nbytes <= limit
        assert sessions.cache.evicted > 0
        assert len(sessions) == 40
        for name, messages in spoken.items():
            session = await sessions.open(name, renderer)
            assert (await session.plan([*messages, MORE])).bridged
        assert sessions.cache.nbytes <= limit
        assert len([each for each in in_memory() if each not in others]) < 20


async def test_a_session_in_use_is_one_session_although_others_push_it_out(
    renderer: Renderer,
) -> None:
    async with Sessions(limits=SessionLimits(session_cache_bytes=1)) as sessions:
        messages = await talk(sessions, "a", renderer, 1)
        session = await sessions.open("a", renderer)
        plan = await session.plan([*messages, MORE])
        await talk(sessions, "b", renderer, 2)
        again = await sessions.open("a", renderer)
        await say(again, renderer, [*messages, {"role": "user", "content": "Else?"}], "else")
        message = {"role": "assistant", "content": "yes"}
        await session.commit(plan, [(completion(renderer, plan, "yes"), message)])
        assert len(await sessions.samples("a")) == 2


async def test_past_a_limit_what_is_new_is_refused(renderer: Renderer) -> None:
    async with Sessions(limits=SessionLimits(sessions=2, session_turns=3)) as sessions:
        messages = await talk(sessions, "a", renderer, 3)
        with pytest.raises(TooLarge, match=r"session 'a' has 3 turns, the limit is 3"):
            await (await sessions.open("a", renderer)).plan([*messages, MORE])
        begun = await sessions.open("b", renderer)
        with pytest.raises(Busy, match="2 sessions of 2"):
            await sessions.open("c", renderer)
        del begun
        await talk(sessions, "c", renderer, 1)
        assert sessions.counts.refused == {"turns": 1, "sessions": 1}
        await sessions.delete("a")
        await talk(sessions, "b", renderer, 1)


@pytest.mark.parametrize(
    ("limit", "refusal"), [("session_bytes", TooLarge), ("total_session_bytes", Busy)]
)
async def test_bytes_have_limits_too(renderer: Renderer, limit: str, refusal: Any) -> None:
    async with Sessions(limits=SessionLimits(**{limit: 5000})) as sessions:
        with pytest.raises(refusal, match="5000"):
            await talk(sessions, "a", renderer, 100)
        assert len(await sessions.samples("a")) == 1


async def test_a_session_that_nobody_uses_expires_and_is_counted(renderer: Renderer) -> None:
    now = 1000.0
    async with Sessions(ttl_seconds=60, expire_unread=True, monotonic=lambda: now) as sessions:
        await talk(sessions, "old", renderer, 2)
        await talk(sessions, "held", renderer, 1)
        now += 50
        await talk(sessions, "young", renderer, 1)
        held = await sessions.open("held", renderer)
        now += 55
        kept = await sessions.open("young", renderer)
        assert await sessions.sweep() == 1
        assert sessions.counts.expired == 1
        assert [each.id for each in await sessions.page()] == ["held", "young"]
        now += 61
        assert await sessions.sweep() == 0
        del held, kept
        assert await sessions.sweep() == 2
        assert sessions.stats()["bytes"] == sessions.cache.nbytes == 0


async def test_a_session_whose_samples_nobody_read_does_not_expire(
    renderer: Renderer, tmp_path: Path
) -> None:
    now, path = 1000.0, str(tmp_path / "sessions.db")
    async with Sessions(
        SqliteSessionStore(path), ttl_seconds=60, monotonic=lambda: now
    ) as sessions:
        for name in ("unread", "read", "read and gone on"):
            messages = await talk(sessions, name, renderer, 2)
        await sessions.samples("read")
        await sessions.samples("read and gone on")
        await say(
            await sessions.open("read and gone on", renderer), renderer, [*messages, MORE], "on"
        )
        unread = {each.id: each.unread_turns for each in await sessions.page()}
        assert unread == {"unread": 2, "read": 0, "read and gone on": 1}
    async with Sessions(
        SqliteSessionStore(path), ttl_seconds=60, monotonic=lambda: now
    ) as sessions:
        now += 61
        assert await sessions.sweep() == 1
        assert [each.id for each in await sessions.page()] == ["read and gone on", "unread"]
        for name in ("read and gone on", "unread"):
            await sessions.samples(name)
        assert await sessions.sweep() == 2


FORMAT_3_ONLY = (
    "ALTER TABLE sessions DROP COLUMN active",
    "ALTER TABLE sessions DROP COLUMN terms",
    "ALTER TABLE turns DROP COLUMN checksum",
    "DROP TABLE facts",
)
OLD_FORMATS = {
    1: (*FORMAT_3_ONLY, "ALTER TABLE sessions DROP COLUMN read_turns"),
    2: FORMAT_3_ONLY,
}


@pytest.mark.parametrize("version", OLD_FORMATS)
async def test_a_file_of_a_format_before_is_read_and_goes_on(
    renderer: Renderer, tmp_path: Path, version: int
) -> None:
    path = str(tmp_path / "sessions.db")
    async with Sessions(SqliteSessionStore(path)) as sessions:
        messages = await talk(sessions, "a", renderer, 2)
        samples = await sessions.samples("a")
    with sqlite3.connect(path) as connection:
        for statement in OLD_FORMATS[version]:
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    async with Sessions(SqliteSessionStore(path), ttl_seconds=60) as sessions:
        assert (await sessions.info("a")).unread_turns == (2 if version == 1 else 0)
        assert await sessions.sweep() == 0
        assert await sessions.samples("a") == samples
        await say(await sessions.open("a", renderer), renderer, [*messages, MORE], "more")
    async with Sessions(SqliteSessionStore(path)) as sessions:
        assert (await sessions.info("a")).turns == 3
        assert len(await sessions.samples("a")) == 1


async def test_a_clock_that_jumps_deletes_no_session(renderer: Renderer, tmp_path: Path) -> None:
    path, wall, ticks = str(tmp_path / "sessions.db"), 1e9, 50.0
    options: dict[str, Any] = {"ttl_seconds": 86400, "expire_unread": True}
    clocks: dict[str, Any] = {"clock": lambda: wall, "monotonic": lambda: ticks}
    async with Sessions(SqliteSessionStore(path), **options, **clocks) as sessions:
        await talk(sessions, "a", renderer, 1)
        for jump in (28 * 3600, -60 * 3600, 400 * 86400):
            wall += jump
            assert await sessions.sweep() == 0
    wall += 28 * 3600
    ticks = 3.0  # the machine was started anew
    async with Sessions(SqliteSessionStore(path), **options, **clocks) as sessions:
        assert await sessions.sweep() == 0
        ticks += 86300
        assert await sessions.sweep() == 0
    async with Sessions(SqliteSessionStore(path), **options, **clocks) as sessions:
        ticks += 101
        assert await sessions.sweep() == 1


def flip(path: str, at: int, turn: int, bit: int) -> None:
    """Flips one bit of a stored turn."""
    with sqlite3.connect(path) as connection:
        where = "session = 1 AND turn = ?"
        (data,) = connection.execute(f"SELECT data FROM turns WHERE {where}", (turn,)).fetchone()
        damaged = bytearray(data)
        damaged[at % len(data)] ^= 1 << bit
        connection.execute(f"UPDATE turns SET data = ? WHERE {where}", (bytes(damaged), turn))
    connection.close()


async def test_a_turn_with_one_bit_flipped_is_never_read_as_good(
    renderer: Renderer, tmp_path: Path
) -> None:
    path = str(tmp_path / "sessions.db")
    async with Sessions(SqliteSessionStore(path)) as sessions:
        messages = await talk(sessions, "a", renderer, 3)
        samples = await sessions.samples("a")
    for number in range(21):
        where = (number * 37, number % 3, number % 8)
        flip(path, *where)
        async with Sessions(SqliteSessionStore(path)) as sessions:
            with pytest.raises(Unavailable, match="not as it was written"):
                await sessions.samples("a")
            with pytest.raises(Unavailable, match="not as it was written"):
                await say(await sessions.open("a", renderer), renderer, [*messages, MORE], "more")
        flip(path, *where)
    async with Sessions(SqliteSessionStore(path)) as sessions:
        assert await sessions.samples("a") == samples


async def test_a_file_with_damaged_pages_is_a_typed_error(
    renderer: Renderer, tmp_path: Path
) -> None:
    path = tmp_path / "sessions.db"
    async with Sessions(SqliteSessionStore(str(path))) as sessions:
        for name in ("a", "b"):
            messages = await talk(sessions, name, renderer, 12)
        await say(await sessions.open("b", renderer), renderer, [*messages, MORE], "x" * 20_000)
    with sqlite3.connect(path) as connection:
        (root,) = connection.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'turns'"
        ).fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    connection.close()
    data = bytearray(path.read_bytes())
    data[(root - 1) * size : (root - 1) * size + 40] = b"\xff" * 40
    path.write_bytes(data)
    async with Sessions(SqliteSessionStore(str(path))) as sessions:
        for name in ("a", "b"):
            with pytest.raises(Unavailable, match="cannot be read"):
                await sessions.samples(name)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE sessions SET turns = 'many'",
        "UPDATE sessions SET tokenizer = 7",
        "UPDATE sessions SET used = 'yesterday'",
        "UPDATE sessions SET terms = x'ff00'",
        "UPDATE sessions SET name = x'ff'",
        "UPDATE sessions SET turns = 99",
        "UPDATE turns SET turn = turn + 9",
        "UPDATE turns SET data = 'text'",
        "UPDATE breaks SET cause = x'00'",
    ],
)
async def test_damaged_rows_are_typed_errors_and_spare_the_others(
    renderer: Renderer, tmp_path: Path, damage: str
) -> None:
    path = str(tmp_path / "sessions.db")
    async with Sessions(SqliteSessionStore(path)) as sessions:
        await talk(sessions, "bad", renderer, 2)
        session = await sessions.open("bad", renderer)
        edited = [QUESTION, {"role": "assistant", "content": "I never said this"}, MORE]
        await say(session, renderer, edited, "so")
        await talk(sessions, "good", renderer, 2)
        good = await sessions.samples("good")
    with sqlite3.connect(path) as connection:
        row = "id" if "sessions" in damage else "session"
        assert connection.execute(f"{damage} WHERE {row} = 1").rowcount
    connection.close()
    name = "(damaged row 1)" if "name" in damage else "bad"
    async with Sessions(SqliteSessionStore(path)) as sessions:
        assert await sessions.samples("good") == good
        with pytest.raises(Unavailable, match="delete the session"):
            await sessions.samples(name)
        with pytest.raises(Unavailable, match="delete the session"):
            await sessions.open(name, renderer)
        await talk(sessions, "new", renderer, 1)
        assert len(await sessions.page()) == (2 if "name" in damage else 3)
        await sessions.delete(name)
        await talk(sessions, "bad", renderer, 1)
        assert len(await sessions.samples("bad")) == 1


async def test_a_deleted_session_takes_no_more_turns_and_its_id_is_free(renderer: Renderer) -> None:
    async with Sessions() as sessions:
        messages = await talk(sessions, "a", renderer, 1)
        session = await sessions.open("a", renderer)
        plan = await session.plan([*messages, MORE])
        await sessions.delete("a")
        with pytest.raises(Conflict, match="'a' was deleted"):
            await session.commit(plan, [(completion(renderer, plan, "x"), messages[1])])
        with pytest.raises(NotFound):
            await sessions.delete("a")
        await talk(sessions, "a", renderer, 2)
        assert (await sessions.info("a")).turns == 2


async def test_turns_that_cannot_be_stored_were_never_there(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    async with Sessions() as sessions:
        messages = await talk(sessions, "a", renderer, 2)
        before = await sessions.samples("a")
        info, total = await sessions.info("a"), sessions.stats()["bytes"]
        session = await sessions.open("a", renderer)
        with monkeypatch.context() as patch:
            patch.setattr(tables, "write_turns", full)
            with pytest.raises(Unavailable, match="disk is full"):
                await say(session, renderer, [*messages, MORE], "lost")
            with pytest.raises(Unavailable, match="disk is full"):
                await talk(sessions, "b", renderer, 1)
        assert await sessions.samples("a") == before
        assert ((await sessions.info("a")).turns, sessions.stats()["bytes"]) == (info.turns, total)
        assert len(sessions) == 1
        assert sessions.stats()["unwritten"] == 2
        await say(await sessions.open("a", renderer), renderer, [*messages, MORE], "kept")
        assert (await sessions.info("a")).turns == 3


async def test_a_client_that_leaves_while_its_turn_is_stored_loses_nothing(
    renderer: Renderer,
) -> None:
    async with Sessions() as sessions:
        session = await sessions.open("a", renderer)
        plan = await session.plan([QUESTION])
        choices = [(completion(renderer, plan, "x"), {"role": "assistant", "content": "x"})]
        task = asyncio.create_task(session.commit(plan, choices))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(await sessions.samples("a")) == 1


async def test_ids_of_another_tokenizer_are_refused(renderer: Renderer, tmp_path: Path) -> None:
    path = str(tmp_path / "sessions.db")
    async with Sessions(SqliteSessionStore(path)) as sessions:
        await talk(sessions, "a", renderer, 1)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE sessions SET tokenizer = x'00'")
    connection.close()
    async with Sessions(SqliteSessionStore(path)) as sessions:
        with pytest.raises(Conflict, match="another tokenizer"):
            await sessions.open("a", renderer)


def another_format(path: str) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE other (x)")
    connection.close()


@pytest.mark.parametrize(
    "spoil", [another_format, lambda path: Path(path).write_bytes(b"not a database" * 100)]
)
async def test_a_file_that_is_no_session_file_is_refused(
    tmp_path: Path, spoil: Callable[[str], object]
) -> None:
    path = str(tmp_path / "sessions.db")
    spoil(path)
    with pytest.raises(BadRequest, match=r"sessions\.db"):
        async with Sessions(SqliteSessionStore(path)):
            pass


async def test_a_second_gateway_on_the_same_file_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "sessions.db")
    async with Sessions(SqliteSessionStore(path)):
        with pytest.raises(BadRequest, match=f"another gateway, process {os.getpid()}"):
            async with Sessions(SqliteSessionStore(path)):
                pass


async def test_turns_that_cannot_be_read_are_not_the_callers_fault(
    renderer: Renderer, tmp_path: Path
) -> None:
    path = tmp_path / "sessions.db"
    async with Sessions(SqliteSessionStore(str(path))) as sessions:
        await talk(sessions, "a", renderer, 2)
    assert path.stat().st_mode & 0o077 == 0
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE turns SET data = x'93', checksum = x'' WHERE turn = 1")
    connection.close()
    async with Sessions(SqliteSessionStore(str(path))) as sessions:
        with pytest.raises(Unavailable, match="'a' cannot be read back"):
            await sessions.open("a", renderer)
        with pytest.raises(Unavailable, match="'a' cannot be read back"):
            await sessions.samples("a")
        kept = await sessions.open("b", renderer)
    with pytest.raises(Unavailable, match="not open"):
        await say(kept, renderer, [QUESTION], "too late")


async def test_many_expire_at_once(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry, "SWEEP_BATCH", 3)
    now = 0.0
    async with Sessions(ttl_seconds=1, expire_unread=True, monotonic=lambda: now) as sessions:
        for at in range(8):
            await talk(sessions, str(at), renderer, 1)
        now = 2.0
        assert await sessions.sweep() == 8
        assert await sessions.page() == []


async def test_a_damaged_session_is_not_served_as_if_it_were_whole(
    renderer: Renderer, tmp_path: Path
) -> None:
    path = str(tmp_path / "sessions.db")
    async with Sessions(SqliteSessionStore(path)) as sessions:
        messages = await talk(sessions, "a", renderer, 3)
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM turns WHERE turn = 2")
    connection.close()
    async with Sessions(SqliteSessionStore(path)) as sessions:
        with pytest.raises(Unavailable, match="2 of its 3 turns"):
            await sessions.open("a", renderer)
        with pytest.raises(Unavailable, match="2 of its 3 turns"):
            await sessions.samples("a")
        await talk(sessions, "b", renderer, 1)
    assert len(messages) == 6


async def test_the_first_requests_share_one_digest_of_the_tokenizer(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(renderer_module, "_DIGESTS", WeakKeyDictionary())
    monkeypatch.setattr(
        renderer_module, "blake2b", lambda *a, **k: made.append(1) or blake2b(*a, **k)
    )
    async with Sessions() as sessions:
        first = asyncio.create_task(sessions.open("s0", renderer))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(*(sessions.open(f"s{at}", renderer) for at in range(1, 20)))
        await sessions.open("later", renderer)
    assert len(made) == 1


async def test_turns_of_one_moment_share_a_transaction(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    transact = store._transact

    def counted(db: sqlite3.Connection, jobs: list[Any]) -> Any:
        batches.append(len(jobs))
        return transact(db, jobs)

    monkeypatch.setattr(store, "_transact", counted)
    async with Sessions() as sessions:
        opened = [await sessions.open(f"s{at}", renderer) for at in range(8)]
        plans = [await each.plan([QUESTION]) for each in opened]
        reply = {"role": "assistant", "content": "3"}
        commits = (
            each.commit(plan, [(completion(renderer, plan, "3"), reply)])
            for each, plan in zip(opened, plans, strict=True)
        )
        await asyncio.gather(*commits)
        assert batches == [8]
        assert [len(await sessions.samples(f"s{at}")) for at in range(8)] == [1] * 8


async def test_the_ids_kept_as_json_count_as_memory(renderer: Renderer) -> None:
    async with Sessions() as sessions:
        session = await sessions.open("s", renderer)
        messages: list[Any] = [QUESTION]
        await say(session, renderer, messages, "3")
        without = sessions.cache.nbytes
        plan = await session.plan([*messages, MORE])
        assert isinstance(plan.prompt_ids, LazyIds)
        sessions.cache.find("s")
        assert sessions.cache.nbytes >= without + 2 * (plan.parent.end if plan.parent else 0)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_session_that_is_being_deleted_is_gone_unless_the_file_keeps_it(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    begun, go_on, remove = threading.Event(), threading.Event(), tables.remove

    def slow(connection: sqlite3.Connection, ids: list[int]) -> None:
        begun.set()
        go_on.wait(30)
        if fails:
            raise OSError("disk full")
        remove(connection, ids)

    monkeypatch.setattr(tables, "remove", slow)
    async with Sessions() as sessions:
        await talk(sessions, "a", renderer, 2)
        deleting = asyncio.create_task(sessions.delete("a"))
        try:
            await asyncio.to_thread(begun.wait, 30)
            for attempt in (sessions.info("a"), sessions.samples("a"), sessions.delete("a")):
                with pytest.raises(NotFound, match="no session 'a'"):
                    await attempt
            with pytest.raises(Conflict, match="being deleted: try again"):
                await sessions.open("a", renderer)
        finally:
            go_on.set()
        if not fails:
            await deleting
            assert len(sessions) == 0
            return
        with pytest.raises(Unavailable, match="disk full"):
            await deleting
        assert (await sessions.info("a")).turns == 2


async def test_a_finished_session_takes_no_more_turns_and_its_reward_stands_on_its_samples(
    renderer: Renderer, tmp_path: Path
) -> None:
    path = str(tmp_path / "sessions.db")
    async with Sessions(SqliteSessionStore(path)) as sessions:
        messages = await talk(sessions, "a", renderer, 2)
        (before,) = await sessions.samples("a")
        assert before.reward is None
        open_turn = await sessions.open("a", renderer)
        await sessions.keys.finish("a", -1.5)
        await sessions.keys.finish("a", -1.5)
        with pytest.raises(Conflict):
            await sessions.keys.finish("a", 0.0)
        with pytest.raises(NotFound):
            await sessions.keys.finish("b", 0.0)
        for session in (open_turn, await sessions.open("a", renderer)):
            with pytest.raises(Forbidden, match="finished"):
                await session.plan([*messages, MORE])
    async with Sessions(SqliteSessionStore(path)) as sessions:
        (sample,) = await sessions.samples("a")
        assert sample == replace(before, reward=-1.5)
        assert Sample.from_json(sample.to_json()) == sample


async def test_a_turn_that_was_sampled_while_its_session_was_finished_is_not_stored(
    renderer: Renderer,
) -> None:
    async with Sessions() as sessions:
        messages = await talk(sessions, "a", renderer, 1)
        session = await sessions.open("a", renderer)
        plan = await session.plan([*messages, MORE])
        await sessions.keys.finish("a", 1.0)
        with pytest.raises(Conflict, match="finished meanwhile"):
            await session.commit(plan, [(completion(renderer, plan, "x"), messages[1])])
        assert (await sessions.info("a")).turns == 1


async def test_turns_of_many_sessions_at_once_are_all_counted(renderer: Renderer) -> None:
    async with Sessions() as sessions:
        await asyncio.gather(*(talk(sessions, f"s{at}", renderer, 3) for at in range(8)))
        assert sessions.stats()["turns"] == 24
