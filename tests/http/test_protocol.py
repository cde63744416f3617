"""HTTP/1.1 as our listeners speak it: framing, pipelining, what is refused, clients that leave."""

from __future__ import annotations

import asyncio
import json

import pytest

from lockstep.http.server.closing import reset
from lockstep.http.server.limits import ServerLimits
from tests.http.peer import HOST, Handlers, connected, running, talking

SMALL = ServerLimits(head_bytes=8 << 10, framing_bytes=4 << 10)
CHUNKED = f"{HOST}\ntransfer-encoding: chunked"


async def test_a_connection_is_kept_from_one_request_to_the_next() -> None:
    async with talking(Handlers()) as peer:
        for body in (b"one", b"", b"three"):
            peer.send(f"POST /echo?a=b%20c {HOST}\ncontent-length: {len(body)}", body)
            head, came = await peer.response()
            assert head.startswith("http/1.1 200 ok\r\n")
            assert "x-query: a=b+c" in head
            assert came == body


async def test_a_body_may_come_in_chunks_and_byte_by_byte() -> None:
    async with talking(Handlers()) as peer:
        raw = f"POST /echo {CHUNKED}\n\n".replace("\n", "\r\n").encode()
        for byte in raw + b"4\r\nfour\r\n3\r\nsix\r\n0\r\n\r\n":
            peer.writer.write(bytes([byte]))
            await peer.writer.drain()
        assert (await peer.response())[1] == b"foursix"


async def test_requests_sent_ahead_are_answered_in_their_order() -> None:
    handlers = Handlers()
    async with talking(handlers) as peer:
        for name in ("first", "second", "third"):
            peer.send(f"GET /named?name={name} {HOST}")
        await asyncio.sleep(0.03)
        peer.send(f"POST /echo {HOST}\ncontent-length: 6", b"fou")
        await asyncio.sleep(0.01)
        peer.writer.write(b"rth")
        responses = [(await peer.response())[1] for _ in range(4)]
        assert responses == [b"first", b"second", b"third", b"fourth"]
        assert handlers.order == ["first", "second", "third", "echo"]


async def test_more_requests_than_are_read_ahead_are_still_answered_in_their_order() -> None:
    async with talking(Handlers(), ServerLimits(pipelined_bytes=1000)) as peer:
        bodies = [b"first", *(bytes([65 + number]) * 50_000 for number in range(20))]
        peer.send(f"GET /named?name=first {HOST}")
        for body in bodies[1:]:
            peer.send(f"POST /echo {HOST}\ncontent-length: {len(body)}", body)
        assert [(await peer.response())[1] for _ in bodies] == bodies


@pytest.mark.parametrize("size", [100, 100_000, 3_000_000])
async def test_a_client_that_leaves_is_noticed_whatever_the_size_of_its_body(size: int) -> None:
    handlers = Handlers()
    async with talking(handlers) as peer:
        peer.send(f"POST /wait {HOST}\ncontent-length: {size}", b"x" * size)
        await asyncio.wait_for(handlers.begun.wait(), 60)
        peer.writer.close()
        await asyncio.wait_for(handlers.left.wait(), 60)


@pytest.mark.parametrize("coding", ["gzip, chunked", "gzip", "chunked, chunked", "identity"])
async def test_a_transfer_coding_other_than_chunked_is_refused(coding: str) -> None:
    async with talking(Handlers()) as peer:
        peer.send(f"POST /echo {HOST}\ntransfer-encoding: {coding}", b"0\r\n\r\n")
        assert (await peer.rest()).startswith(b"HTTP/1.1 400 ")


async def test_a_client_that_sends_far_ahead_is_made_to_wait() -> None:
    handlers = Handlers()
    limits = ServerLimits(pipelined_bytes=1000, sweep_seconds=0.02)
    async with talking(handlers, limits) as peer:
        peer.send(f"GET /wait {HOST}")
        await asyncio.wait_for(handlers.begun.wait(), 2)
        for _ in range(100):
            peer.send(f"POST /echo {HOST}\ncontent-length: 500000", b"x" * 500_000)
        await asyncio.sleep(0.5)
        assert peer.writer.transport.get_write_buffer_size() > 20_000_000
        reset(peer.writer.transport)
        await asyncio.wait_for(handlers.left.wait(), 5)


async def test_a_client_that_waits_for_100_continue_gets_it() -> None:
    async with talking(Handlers()) as peer:
        peer.send(f"POST /echo {HOST}\nexpect: 100-continue\ncontent-length: 2")
        assert (await peer.head()).startswith("http/1.1 100 ")
        peer.writer.write(b"ok")
        assert (await peer.response())[1] == b"ok"


async def test_an_answer_without_a_length_comes_in_chunks() -> None:
    async with talking(Handlers()) as peer:
        peer.send(f"GET /pieces {HOST}\nconnection: close")
        head = await peer.head()
        assert "transfer-encoding: chunked" in head
        assert "connection: close" in head
        assert await peer.rest() == b"4\r\none \r\n3\r\ntwo\r\n0\r\n\r\n"


async def test_an_old_client_gets_the_end_of_the_connection_as_the_end() -> None:
    async with talking(Handlers()) as peer:
        peer.send("GET /pieces HTTP/1.0")
        head = await peer.head()
        assert "connection: close" in head
        assert "transfer-encoding" not in head
        assert await peer.rest() == b"one two"


async def test_an_old_client_does_not_take_a_broken_answer_for_a_whole_one() -> None:
    async with talking(Handlers()) as peer:
        peer.send("GET /broken HTTP/1.0")
        with pytest.raises(ConnectionResetError):
            await peer.rest()


async def test_head_has_no_body() -> None:
    async with talking(Handlers()) as peer:
        peer.send(f"HEAD /echo {HOST}\nconnection: close")
        assert (await peer.head()).startswith("http/1.1 200")
        assert await peer.rest() == b""


async def test_a_refused_body_is_read_over_so_that_the_refusal_arrives() -> None:
    async with talking(Handlers()) as peer:
        peer.send(
            f"POST /limited {HOST}\ncontent-type: application/json\ncontent-length: 3000000",
            b"x" * 1_500_000,
        )
        head, _ = await peer.response()
        assert head.startswith("http/1.1 413")
        peer.writer.write(b"x" * 1_500_000)
        peer.send(f"GET /echo {HOST}")
        assert (await peer.response())[0].startswith("http/1.1 200")
    async with talking(Handlers()) as peer:
        peer.send(
            f"POST /limited {HOST}\ncontent-type: application/json\nconnection: close\n"
            "content-length: 3000000",
            b"x" * 2000,
        )
        await asyncio.sleep(0.1)
        peer.writer.write(b"x" * 2_998_000)
        await peer.writer.drain()
        assert (await peer.rest()).startswith(b"HTTP/1.1 413")


# What never becomes a part of a request


async def test_trailers_do_not_become_headers() -> None:
    trailers = b"host: evil\r\nauthorization: Bearer stolen\r\nx-session-id: other\r\n"
    async with talking(Handlers()) as peer:
        peer.send(f"POST /headers {CHUNKED}", b"1\r\nx\r\n0\r\n" + trailers + b"\r\n")
        _, body = await peer.response()
        assert sorted(name for name, _ in json.loads(body)) == ["host", "transfer-encoding"]
        peer.send(f"POST /headers {CHUNKED}", b"1\r\nx\r\n")
        await asyncio.sleep(0.05)
        peer.writer.write(b"0\r\n" + trailers + b"\r\n")
        assert b"evil" not in (await peer.response())[1]


@pytest.mark.parametrize(
    "endless", [b"0\r\nx-trailer: " + b"x" * 100, b"1;extension=" + b"x" * 100, b"0" * 100]
)
async def test_trailers_chunk_extensions_and_sizes_without_end_are_cut_off(endless: bytes) -> None:
    handlers = Handlers()
    async with talking(handlers, SMALL) as peer:
        peer.send(f"POST /echo {CHUNKED}", b"1\r\nx\r\n")
        await asyncio.sleep(0.05)
        peer.writer.write(endless)
        for _ in range(20):
            peer.writer.write(b"0" * 1000)
            await asyncio.sleep(0.005)
        assert (await peer.rest()).split(b"\r\n")[0] in (
            b"HTTP/1.1 431 Request Header Fields Too Large",
            b"HTTP/1.1 400 Bad Request",
        )
        assert handlers.order == []


async def test_many_small_trailers_are_cut_off_too() -> None:
    async with talking(Handlers(), SMALL) as peer:
        peer.send(f"POST /echo {CHUNKED}", b"1\r\nx\r\n0\r\n")
        for number in range(1000):
            peer.writer.write(b"x-%d: 1\r\n" % number)
            if number % 100 == 0:
                await asyncio.sleep(0.01)
        assert (await peer.rest()).startswith(b"HTTP/1.1 431 ")


async def test_a_body_in_very_small_chunks_is_not_taken_for_extensions() -> None:
    async with talking(Handlers(), SMALL) as peer:
        peer.send(f"POST /echo {CHUNKED}")
        for _ in range(20):
            peer.writer.write(b"1\r\nx\r\n" * 500)
            await asyncio.sleep(0.002)
        peer.writer.write(b"0\r\n\r\n")
        assert (await peer.response())[1] == b"x" * 10_000


@pytest.mark.parametrize("pause", [0.0, 0.01])
async def test_a_head_without_end_is_cut_off(pause: float) -> None:
    async with talking(Handlers(), SMALL) as peer:
        peer.writer.write(b"GET /echo HTTP/1.1\r\nhost: x\r\nx-long: ")
        for _ in range(20):
            peer.writer.write(b"x" * 1000)
            await asyncio.sleep(pause)
        assert (await peer.rest()).startswith(b"HTTP/1.1 431 ")


async def test_a_complete_head_that_is_too_large_is_refused() -> None:
    handlers = Handlers()
    async with talking(handlers, SMALL) as peer:
        lines = "\n".join(f"x-{number}: {'y' * 100}" for number in range(100))
        peer.send(f"POST /echo {HOST}\n{lines}\ncontent-length: 0")
        assert (await peer.rest()).startswith(b"HTTP/1.1 431 ")
        assert handlers.order == []


async def test_a_large_body_before_it_does_not_count_as_the_head_of_the_next_request() -> None:
    async with talking(Handlers(), SMALL) as peer:
        body = b"x" * 30_000
        peer.send(f"POST /echo {HOST}\ncontent-length: {len(body)}", body + b"GET /echo HT")
        assert (await peer.response())[1] == body
        peer.writer.write(b"TP/1.1\r\nhost: x\r\n\r\n")
        assert (await peer.response())[0].startswith("http/1.1 200")


@pytest.mark.parametrize("hosts", ["", "host: a\nhost: a", "host: a\nHost: evil"])
async def test_a_request_has_exactly_one_host(hosts: str) -> None:
    handlers = Handlers()
    async with talking(handlers) as peer:
        peer.send(f"POST /echo HTTP/1.1\n{hosts}\ncontent-length: 0".replace("\n\n", "\n"))
        response = await peer.rest()
        assert response.startswith(b"HTTP/1.1 400 ")
        assert b"bad_host" in response
        assert handlers.order == []


@pytest.mark.parametrize("sent", [
    b"nonsense\r\n\r\n",
    b"GET http://[ HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
    b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n"
    b"0\r\n\r\n",
    b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nxx",
])  # fmt: skip
async def test_what_cannot_be_read_for_sure_is_refused(sent: bytes) -> None:
    handlers = Handlers()
    async with talking(handlers) as peer:
        peer.writer.write(sent)
        response = await peer.rest()
        assert response.startswith(b"HTTP/1.1 400 ")
        assert json.loads(response.partition(b"\r\n\r\n")[2])["error"]["code"] == 400
        assert handlers.order == []


@pytest.mark.parametrize("pause", [0.0, 0.05])
async def test_a_broken_chunk_never_passes_for_a_body(pause: float) -> None:
    handlers = Handlers()
    async with talking(handlers) as peer:
        peer.send(f"POST /limited {CHUNKED}\ncontent-type: application/json", b"5\r\nhello\r\n")
        await asyncio.sleep(pause)
        peer.writer.write(b"nonsense\r\n")
        response = await peer.rest()
        assert response.startswith(b"HTTP/1.1 400 ")
        assert response.count(b"HTTP/1.1") == 1
        assert handlers.order == ["ClientGone"]


# Other protocols


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
async def test_an_upgrade_is_ignored_and_its_request_served(protocol: str) -> None:
    upgrade = f"connection: Upgrade, HTTP2-Settings\nupgrade: {protocol}\nhttp2-settings: AAEAAE"
    async with talking(Handlers()) as peer:
        for body in (b"", b"hello"):
            peer.send(f"POST /echo {HOST}\n{upgrade}\ncontent-length: {len(body)}", body)
            head, came = await peer.response()
            assert head.startswith("http/1.1 200")
            assert came == body
        peer.send(f"POST /echo {HOST}\n{upgrade}\ntransfer-encoding: chunked")
        await asyncio.sleep(0.02)
        peer.writer.write(b"2\r\nhi\r\n0\r\n\r\n")
        peer.send(f"POST /echo {HOST}\ncontent-length: 4", b"next")
        assert [(await peer.response())[1] for _ in range(2)] == [b"hi", b"next"]


async def test_connect_is_refused() -> None:
    async with talking(Handlers()) as peer:
        peer.send("CONNECT other:80 HTTP/1.1\nhost: other")
        assert (await peer.rest()).startswith(b"HTTP/1.1 405 ")


# Requests behind a refused one


async def test_nothing_runs_after_a_connection_was_refused() -> None:
    handlers = Handlers()
    async with talking(handlers) as peer:
        peer.writer.write(b"nonsense\r\n\r\n")
        peer.send(f"POST /echo {HOST}\ncontent-length: 0")
        await asyncio.sleep(0.05)
        peer.send(f"POST /echo {HOST}\ncontent-length: 0")
        assert (await peer.rest()).count(b"HTTP/1.1") == 1
        assert handlers.order == []


async def test_a_request_between_one_under_way_and_a_refused_one_does_not_run() -> None:
    """The one under way gets its response first: it was sent rightly."""
    handlers = Handlers()
    async with talking(handlers) as peer:
        peer.writer.write(
            b"GET /named?name=first HTTP/1.1\r\nhost: x\r\n\r\n"
            b"GET /named?name=second HTTP/1.1\r\nhost: x\r\n\r\n"
            b"nonsense\r\n\r\n"
        )
        peer.send(f"GET /named?name=third {HOST}")
        assert (await peer.response())[1] == b"first"
        assert (await peer.response())[0].startswith("http/1.1 400 ")
        assert await peer.rest() == b""
        assert handlers.order == ["first"]


@pytest.mark.parametrize("more", ["", "\nconnection: close"])
async def test_nothing_runs_after_a_request_that_closes(more: str) -> None:
    handlers = Handlers()
    async with talking(handlers) as peer:
        first = f"GET /named?name=first {HOST}\nconnection: close\n\n"
        peer.send(f"{first}GET /named?name=second {HOST}{more}")
        assert (await peer.rest()).endswith(b"first")
        assert handlers.order == ["first"]


async def test_a_request_sent_ahead_that_closes_is_still_answered() -> None:
    async with talking(Handlers()) as peer:
        peer.writer.write(
            b"GET /named?name=first HTTP/1.1\r\nhost: x\r\n\r\n"
            b"GET /named?name=second HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        )
        assert (await peer.response())[1] == b"first"
        assert (await peer.rest()).endswith(b"second")


# Clients that leave


@pytest.mark.failure_mode("F47")
@pytest.mark.parametrize(
    "pipelined", [0, 1, 3, 1000], ids=lambda count: f"{count} pipelined requests"
)
async def test_a_handler_is_cancelled_when_its_client_leaves(pipelined: int) -> None:
    handlers = Handlers()
    async with talking(handlers) as peer:
        peer.send(f"GET /wait {HOST}")
        for _ in range(pipelined):
            peer.send(f"GET /echo {HOST}")
        await asyncio.wait_for(handlers.begun.wait(), 2)
        peer.send(f"POST /echo {HOST}\ncontent-length: 150000", b"x" * 150_000)
        await peer.writer.drain()
        await asyncio.sleep(0.05)
        peer.writer.close()
        await asyncio.wait_for(handlers.left.wait(), 2)
        await asyncio.sleep(0.05)
        assert handlers.order == []


@pytest.mark.parametrize("pipelined", [0, 1])
async def test_a_stream_is_closed_when_its_client_leaves(pipelined: int) -> None:
    handlers = Handlers()
    async with talking(handlers) as peer:
        peer.send(f"GET /events {HOST}")
        for _ in range(pipelined):
            peer.send(f"GET /echo {HOST}")
        await asyncio.wait_for(handlers.begun.wait(), 2)
        peer.writer.close()
        await asyncio.wait_for(handlers.left.wait(), 2)


async def test_the_head_of_a_stream_does_not_wait_for_its_first_event() -> None:
    handlers = Handlers()
    async with talking(handlers) as peer:
        peer.send(f"GET /events {HOST}")
        assert "text/event-stream" in await peer.head()
        handlers.released.set()
        assert (await asyncio.wait_for(peer.reader.readuntil(b"0\r\n\r\n"), 2)).count(b"data:") == 2


async def test_a_client_that_does_not_read_makes_the_handler_wait() -> None:
    handlers = Handlers()
    async with talking(handlers) as peer:
        peer.send(f"GET /flood {HOST}")
        await asyncio.sleep(0.3)
        assert 0 < len(handlers.order) < 350


# Answers that go wrong


async def test_an_answer_that_breaks_off_is_not_ended_like_a_whole_one() -> None:
    async with talking(Handlers()) as peer:
        peer.send(f"GET /broken {HOST}")
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(peer.reader.readuntil(b"0\r\n\r\n"), 2)


async def test_a_header_cannot_smuggle_in_another() -> None:
    async with talking(Handlers()) as peer:
        peer.send(f"GET /torn {HOST}")
        assert b"set-cookie" not in await peer.rest()


async def test_an_internal_error_says_nothing_of_its_cause_but_where_to_look(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(Handlers()) as port, connected(port) as peer:
        peer.send(f"GET /secret {HOST}\nx-request-id: mine-7")
        head, body = await peer.response()
        assert head.startswith("http/1.1 500 ")
        assert b"swordfish" not in body
        assert json.loads(body)["error"]["request_id"] == "mine-7"
        assert "swordfish" in caplog.text
        assert "mine-7" in caplog.text
