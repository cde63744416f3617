"""The link to a server: retries only before an answer begins, deadlines, and clean leaving."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from lockstep.backends.http import Link
from lockstep.tokens.errors import (
    BadRequest,
    Busy,
    DeadlineExceeded,
    EngineFailure,
    LockstepError,
    Unavailable,
    UnknownModel,
)
from tests.backends.scripted import Reply, Request, events, serving, whole


def replies(*given: Reply) -> Iterator[Reply]:
    yield from given
    while True:
        yield given[-1]


def in_turn(*given: Reply):
    turn = replies(*given)

    def script(request: Request) -> Reply:
        return next(turn)

    return script


async def test_a_reset_before_the_answer_is_retried_a_bounded_number_of_times() -> None:
    async with serving(in_turn(Reply(fault="reset"), Reply(fault="reset"), whole({}))) as server:
        link = Link(server.url, backoff=0.01, retries=2)
        assert await link.post("/x", b"{}") == b"{}"
        assert len(server.requests) == 3
        await link.close()
    async with serving(in_turn(Reply(fault="reset"))) as server:
        link = Link(server.url, backoff=0.01, retries=1)
        with pytest.raises(Unavailable, match="failed 2 times"):
            await link.post("/x", b"{}")
        assert len(server.requests) == 2
        await link.close()


async def test_an_answer_that_breaks_off_is_not_asked_for_again() -> None:
    async with serving(in_turn(Reply((b"{",), fault="cut"))) as server:
        link = Link(server.url, backoff=0.01)
        with pytest.raises(Unavailable, match="broke off"):
            await link.post("/x", b"{}")
        assert len(server.requests) == 1
        await link.close()


async def test_a_connection_dropped_after_a_500_does_not_fail_the_next_request() -> None:
    broken = whole({"error": {"message": "boom", "code": 500}}, 500, fault="goodbye")
    async with serving(in_turn(broken, whole({"ok": 1}))) as server:
        link = Link(server.url, backoff=0.01)
        with pytest.raises(EngineFailure, match="boom"):
            await link.post("/x", b"{}")
        assert await link.post("/x", b"{}") == b'{"ok": 1}'
        await link.close()


async def test_nobody_listening_is_unavailable() -> None:
    async with serving(in_turn(whole({}))) as server:
        url = server.url
    link = Link(url, backoff=0.01, retries=1)
    with pytest.raises(Unavailable):
        await link.post("/x", b"{}")
    await link.close()


async def test_a_deadline_is_kept_and_the_server_sees_the_client_leave() -> None:
    async with serving(in_turn(Reply(fault="hang"))) as server:
        link = Link(server.url)
        with pytest.raises(DeadlineExceeded, match=r"0\.1 s"):
            await link.post("/x", b"{}", timeout=0.1)
        await asyncio.wait_for(server.gone.wait(), 2)
        await link.close()


@pytest.mark.failure_mode("F47")
async def test_cancelling_closes_the_connection() -> None:
    async with serving(in_turn(Reply((b"{",), fault="hang"))) as server:
        link = Link(server.url)
        task = asyncio.create_task(link.post("/x", b"{}"))
        while not server.requests:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(server.gone.wait(), 2)
        assert server.left == 1
        await link.close()


@pytest.mark.failure_mode("F47")
async def test_leaving_a_stream_early_closes_the_connection() -> None:
    async with serving(in_turn(events(b"{}", done=False, fault="hang"))) as server:
        link = Link(server.url)
        stream = link.events("/x", b"{}")
        assert await anext(stream) == b"{}"
        await stream.aclose()
        await asyncio.wait_for(server.gone.wait(), 2)
        await link.close()


async def test_a_stalled_stream_meets_its_deadline_and_a_cut_one_is_unavailable() -> None:
    script = in_turn(events(b"1", done=False, fault="hang"), events(b"1", done=False, fault="cut"))
    async with serving(script) as server:
        link = Link(server.url)
        with pytest.raises(DeadlineExceeded):
            [event async for event in link.events("/x", b"{}", timeout=0.1)]
        with pytest.raises(Unavailable, match="broke off"):
            [event async for event in link.events("/x", b"{}")]
        await link.close()


async def test_connections_are_kept_between_answers_and_after_streams() -> None:
    script = in_turn(whole({}), events(b"1"), whole({}), events(b"2"))
    async with serving(script) as server:
        link = Link(server.url)
        for _ in range(2):
            await link.post("/x", b"{}")
            assert len([event async for event in link.events("/x", b"{}")]) == 1
        assert server.connections == 1
        await link.close()


@pytest.mark.parametrize(("status", "body", "error"), [
    (400, {"error": {"message": "no", "param": "n"}}, BadRequest),
    (404, {"message": "Model not found", "code": 404}, UnknownModel),
    (404, b"", UnknownModel),
    (429, {"error": {"message": "full"}}, Busy),
    (503, b"upstream went away", Unavailable),
    (504, {"detail": "late"}, DeadlineExceeded),
    (500, b"<html>", EngineFailure),
])  # fmt: skip
async def test_error_bodies_become_typed_errors(
    status: int, body: bytes | dict, error: type[LockstepError]
) -> None:
    async with serving(in_turn(whole(body, status))) as server:
        link = Link(server.url)
        with pytest.raises(error) as caught:
            await link.post("/x", b"{}")
        assert type(caught.value) is error
        assert caught.value.message
        with pytest.raises(error):
            [event async for event in link.events("/x", b"{}")]
        await link.close()


async def test_a_lockstep_server_names_the_exact_error() -> None:
    fault = {"error": {"message": "gone", "code": 409, "reason": "version_unavailable"}}
    async with serving(in_turn(whole(fault, 409))) as server:
        link = Link(server.url)
        with pytest.raises(LockstepError) as caught:
            await link.post("/x", b"{}")
        assert caught.value.code == "version_unavailable"
        await link.close()


async def test_a_closed_link_says_so() -> None:
    link = Link("http://127.0.0.1:1")
    await link.close()
    with pytest.raises(Unavailable, match="closed"):
        await link.get("/x")
