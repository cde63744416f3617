"""The HTTP client: retries only before a response begins, deadlines, and clean leaving."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest

from lockstep.http.client import client as http
from lockstep.http.client.client import HttpClient
from lockstep.tokens.errors import (
    BadRequest,
    Busy,
    ContractError,
    DeadlineExceeded,
    EngineFailure,
    LockstepError,
    Unavailable,
    UnknownModel,
)
from tests.backends.scripted import Reply, Request, events, serving, whole


def replies(*scripted: Reply) -> Iterator[Reply]:
    yield from scripted
    while True:
        yield scripted[-1]


def in_turn(*scripted: Reply):
    turn = replies(*scripted)

    def script(request: Request) -> Reply:
        return next(turn)

    return script


async def test_a_reset_before_the_response_is_retried_a_bounded_number_of_times() -> None:
    async with serving(in_turn(Reply(fault="reset"), Reply(fault="reset"), whole({}))) as server:
        client = HttpClient(server.url, backoff=0.01, retries=2)
        assert await client.post("/x", b"{}") == b"{}"
        assert len(server.requests) == 3
        await client.close()
    async with serving(in_turn(Reply(fault="reset"))) as server:
        client = HttpClient(server.url, backoff=0.01, retries=1)
        with pytest.raises(Unavailable, match="failed 2 times"):
            await client.post("/x", b"{}")
        assert len(server.requests) == 2
        await client.close()


async def test_a_response_that_breaks_off_is_not_requested_again() -> None:
    async with serving(in_turn(Reply((b"{",), fault="cut"))) as server:
        client = HttpClient(server.url, backoff=0.01)
        with pytest.raises(Unavailable, match="broke off"):
            await client.post("/x", b"{}")
        assert len(server.requests) == 1
        await client.close()


async def test_a_connection_dropped_after_a_500_does_not_fail_the_next_request() -> None:
    broken = whole({"error": {"message": "boom", "code": 500}}, 500, fault="goodbye")
    async with serving(in_turn(broken, whole({"ok": 1}))) as server:
        client = HttpClient(server.url, backoff=0.01)
        with pytest.raises(EngineFailure, match="boom"):
            await client.post("/x", b"{}")
        assert await client.post("/x", b"{}") == b'{"ok": 1}'
        await client.close()


async def test_an_exchange_gives_the_status_and_the_body_of_an_error_too() -> None:
    async with serving(in_turn(whole({"error": "boom"}, 500), whole({"ok": 1}))) as server:
        client = HttpClient(server.url)
        assert await client.exchange("POST", "/x", b"{}") == (500, b'{"error": "boom"}')
        assert await client.exchange("GET", "/x") == (200, b'{"ok": 1}')
        await client.close()


async def test_nobody_listening_is_unavailable() -> None:
    async with serving(in_turn(whole({}))) as server:
        url = server.url
    client = HttpClient(url, backoff=0.01, retries=1)
    with pytest.raises(Unavailable):
        await client.post("/x", b"{}")
    await client.close()


async def test_a_deadline_is_kept_and_the_server_sees_the_client_leave() -> None:
    async with serving(in_turn(Reply(fault="hang"))) as server:
        client = HttpClient(server.url)
        with pytest.raises(DeadlineExceeded, match=r"0\.1 s"):
            await client.post("/x", b"{}", timeout=0.1)
        await asyncio.wait_for(server.gone.wait(), 2)
        await client.close()


@pytest.mark.failure_mode("F47")
async def test_cancelling_closes_the_connection() -> None:
    async with serving(in_turn(Reply((b"{",), fault="hang"))) as server:
        client = HttpClient(server.url)
        task = asyncio.create_task(client.post("/x", b"{}"))
        while not server.requests:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(server.gone.wait(), 2)
        assert server.left == 1
        await client.close()


@pytest.mark.failure_mode("F47")
async def test_leaving_a_stream_early_closes_the_connection() -> None:
    async with serving(in_turn(events(b"{}", done=False, fault="hang"))) as server:
        client = HttpClient(server.url)
        stream = client.events("/x", b"{}")
        assert await anext(stream) == b"{}"
        await stream.aclose()
        await asyncio.wait_for(server.gone.wait(), 2)
        await client.close()


async def test_a_stalled_stream_meets_its_deadline_and_a_cut_one_is_unavailable() -> None:
    script = in_turn(events(b"1", done=False, fault="hang"), events(b"1", done=False, fault="cut"))
    async with serving(script) as server:
        client = HttpClient(server.url)
        with pytest.raises(DeadlineExceeded):
            [event async for event in client.events("/x", b"{}", timeout=0.1)]
        with pytest.raises(Unavailable, match="broke off"):
            [event async for event in client.events("/x", b"{}")]
        await client.close()


async def test_a_reader_that_takes_long_still_gets_what_came_in_time() -> None:
    async with serving(in_turn(events(b"1", b"2", b"3", pause=0.02))) as server:
        client = HttpClient(server.url)
        stream = client.events("/x", b"{}", timeout=0.3)
        assert await anext(stream) == b"1"
        await asyncio.sleep(0.6)
        assert [event async for event in stream] == [b"2", b"3"]
        assert len([event async for event in client.events("/x", b"{}", timeout=5)]) == 3
        await client.close()


async def test_a_stream_that_stalls_while_its_reader_takes_long_has_no_time_left() -> None:
    async with serving(in_turn(events(b"1", done=False, fault="hang"))) as server:
        client = HttpClient(server.url)
        stream = client.events("/x", b"{}", timeout=0.2)
        assert await anext(stream) == b"1"
        await asyncio.sleep(0.4)
        with pytest.raises(DeadlineExceeded):
            async with asyncio.timeout(2):
                await anext(stream)
        await client.close()


async def test_connections_are_kept_between_answers_and_after_streams() -> None:
    script = in_turn(whole({}), events(b"1"), whole({}), events(b"2"))
    async with serving(script) as server:
        client = HttpClient(server.url)
        for _ in range(2):
            await client.post("/x", b"{}")
            assert len([event async for event in client.events("/x", b"{}")]) == 1
        assert server.connections == 1
        await client.close()


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
        client = HttpClient(server.url)
        with pytest.raises(error) as caught:
            await client.post("/x", b"{}")
        assert type(caught.value) is error
        assert caught.value.message
        with pytest.raises(error):
            [event async for event in client.events("/x", b"{}")]
        await client.close()


async def test_a_lockstep_server_names_the_exact_error() -> None:
    fault = {"error": {"message": "gone", "code": 409, "reason": "version_unavailable"}}
    async with serving(in_turn(whole(fault, 409))) as server:
        client = HttpClient(server.url)
        with pytest.raises(LockstepError) as caught:
            await client.post("/x", b"{}")
        assert caught.value.code == "version_unavailable"
        await client.close()


async def test_a_closed_link_says_so() -> None:
    client = HttpClient("http://127.0.0.1:1")
    await client.close()
    with pytest.raises(Unavailable, match="closed"):
        await client.get("/x")


async def raw_server(*responses: bytes, hold: bool = False):
    """A server that sends these bytes, one response a request, then hangs up unless it holds."""
    seen: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for response in responses:
            seen.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(response)
            await writer.drain()
        if hold:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", seen


@pytest.mark.parametrize("response", [
    b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n",
    b"HTTP/1.0 200 OK\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{}",
])  # fmt: skip
async def test_every_framing_of_a_response_is_read(response: bytes) -> None:
    server, url, seen = await raw_server(response)
    async with server:
        client = HttpClient(url)
        assert await client.get("/a b?c=\u00e9") == b"{}"
        assert seen[0].startswith(b"GET /a%20b?c=%C3%A9 HTTP/1.1\r\n")
        await client.close()


@pytest.mark.parametrize("response", [
    b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\nnonsense\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-le",
    b"nonsense",
    b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\n{}",
])  # fmt: skip
async def test_a_response_that_is_not_whole_is_none_and_is_not_requested_again(
    response: bytes,
) -> None:
    server, url, seen = await raw_server(response)
    async with server:
        client = HttpClient(url, backoff=0.01)
        with pytest.raises(Unavailable, match="broke off"):
            await client.get("/x")
        assert len(seen) == 1
        await client.close()


async def test_bytes_without_a_request_cost_the_connection_and_never_become_a_response() -> None:
    good = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
    more = good.replace(b"{}", b"[]")
    server, url, seen = await raw_server(good + more, more, hold=True)
    async with server:
        client = HttpClient(url)
        for _ in range(2):  # each on a new connection, where the first response comes again
            assert await client.get("/x") == b"{}"
        assert len(seen) == 2
        await client.close()


async def test_a_head_without_end_is_not_read_for_ever() -> None:
    server, url, _ = await raw_server(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000, hold=True)
    async with server:
        client = HttpClient(url, backoff=0.01)
        with pytest.raises(Unavailable, match="the head of the response is larger"):
            await client.get("/x", timeout=2)
        await client.close()


async def test_a_header_with_a_line_break_is_not_sent() -> None:
    async with serving(in_turn(whole({}))) as server:
        client = HttpClient(server.url)
        with pytest.raises(BadRequest, match="control characters"):
            await client.post("/x", b"{}", headers={"X-Request-Id": "a\r\nx-admin: 1"})
        assert not server.requests
        await client.close()


async def test_only_so_many_connections_are_open_at_once() -> None:
    async with serving(in_turn(whole({}))) as server:
        client = HttpClient(server.url, connections=2)
        await asyncio.gather(*[client.post("/x", b"{}") for _ in range(20)])
        assert server.connections <= 2
        await client.close()


async def test_a_consumer_that_waits_makes_the_server_wait() -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        event = b"data: " + b"x" * 65_000 + b"\n\n"
        for _ in range(2000):
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
            sent += 1

    server = await asyncio.start_server(flood, "127.0.0.1", 0)
    async with server:
        client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        stream = client.events("/x", b"{}")
        await anext(stream)
        await asyncio.sleep(0.3)
        assert sent < 1000
        await stream.aclose()
        await client.close()


async def test_connections_nobody_needs_any_more_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http, "KEEPALIVE", 0.05)
    async with serving(in_turn(whole({}))) as server:
        client = HttpClient(server.url)
        await asyncio.gather(*[client.post("/x", b"{}") for _ in range(5)])
        await asyncio.sleep(0.1)
        await client.post("/x", b"{}")
        assert server.connections == 6
        await client.close()


async def test_a_request_names_one_host() -> None:
    seen: list[bytes] = []

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for host in ("workers.example", None):
        client = HttpClient(f"http://127.0.0.1:{port}", host=host)
        await client.get("/health")
        await client.close()
    server.close()
    named, own = (head.lower().split(b"\r\n") for head in seen)
    assert [line for line in named if line.startswith(b"host:")] == [b"host: workers.example"]
    assert [line for line in own if line.startswith(b"host:")] == [b"host: 127.0.0.1:%d" % port]


OUT_OF_DESCRIPTORS = """
import asyncio, os, resource, socket, sys
import uvloop
from lockstep.http.client.client import HttpClient
from lockstep.tokens.errors import Busy

async def main():
    listening = socket.create_server(("127.0.0.1", 0))
    client = HttpClient(f"http://127.0.0.1:{listening.getsockname()[1]}", backoff=0.01)
    soft = len(os.listdir("/proc/self/fd"))
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft + 8, soft + 8))
    try:
        while True:
            held.append(os.dup(0))
    except OSError:
        pass
    try:
        await client.get("/health")
    except Busy as error:
        for one in held:
            os.close(one)
        print(error.message)

loops = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
with asyncio.Runner(loop_factory=loops[sys.argv[1]]) as runner:
    runner.run(main())
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_lack_of_descriptors_is_not_blamed_on_the_server(loop: str) -> None:
    command = [sys.executable, "-c", OUT_OF_DESCRIPTORS, loop]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "no file descriptor left" in ended.stdout, ended.stderr


@pytest.mark.parametrize("port", ["99999", "x", "-1", "9" * 5000])
def test_an_impossible_port_is_a_bad_url(port: str) -> None:
    with pytest.raises(BadRequest, match="port") as refused:
        HttpClient(f"http://127.0.0.1:{port}")
    assert refused.value.param == "url"


async def test_a_response_larger_than_its_limit_is_given_up() -> None:
    large = Reply((b"x" * 60_000,) * 20)
    async with serving(in_turn(large)) as server:
        client = HttpClient(server.url, response_bytes=200_000, retries=0)
        with pytest.raises(ContractError, match="more than 200000 bytes"):
            await client.post("/x", b"{}")
        await client.close()


async def test_an_event_without_end_is_given_up() -> None:
    endless = Reply((b"data: " + b"x" * 60_000,) * 20, streamed=True)
    async with serving(in_turn(endless)) as server:
        client = HttpClient(server.url, response_bytes=200_000, retries=0)
        with pytest.raises(ContractError, match="more than 200000 bytes"):
            async for _ in client.events("/x", b"{}"):
                pass
        await client.close()


@pytest.mark.failure_mode("F47")
async def test_what_a_caller_left_of_one_response_is_never_in_the_next() -> None:
    streamed = events(b'{"of": "the first"}', b'{"of": "the first"}', pause=0.05)
    async with serving(in_turn(streamed, whole({"of": "the second"}))) as server:
        client = HttpClient(server.url)
        batches = client.event_batches("/x", b"{}")
        assert await anext(batches) == [b'{"of": "the first"}']
        await asyncio.sleep(0.5)  # the rest of the response has come, and nobody takes it
        await batches.aclose()
        assert await client.post("/x", b"{}") == b'{"of": "the second"}'
        await client.close()
