"""Where a request ends is never in doubt: what could be read in two ways is refused."""

from __future__ import annotations

import pytest

from tests.abuse.target import Listener, Responses, Target, until_closed

CHUNKED = "transfer-encoding: chunked"
JSON = "content-type: application/json"
SMUGGLED = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
HEADS: dict[str, tuple[str, ...]] = {
    "length and chunks": ("content-length: 4", CHUNKED),
    "chunks and length": (CHUNKED, "content-length: 4"),
    "two lengths": ("content-length: 4", "content-length: 5"),
    "a list of lengths": ("content-length: 4, 4",),
    "a length with a sign": ("content-length: +4",),
    "a negative length": ("content-length: -1",),
    "a length in hex": ("content-length: 0x4",),
    "a length of a hundred digits": ("content-length: " + "9" * 100,),
    "a coding nobody knows": ("transfer-encoding: xchunked",),
    "chunks that are not last": ("transfer-encoding: chunked, gzip",),
    "space before the colon": ("transfer-encoding : chunked",),
    "a folded header": (CHUNKED, "x-a: b\r\n c: d"),
    "a nul in a header": ("x-a: b\0c",),
    "a header without a name": (": b",),
}
BODIES: dict[str, bytes] = {
    "no size": b"x\r\n{}\r\n0\r\n\r\n",
    "a size with a sign": b"+2\r\n{}\r\n0\r\n\r\n",
    "a size past 64 bits": b"fffffffffffffffff\r\n{}\r\n0\r\n\r\n",
    "more than its size": b"2\r\n{}xx\r\n0\r\n\r\n",
    "a bare line feed": b"2\n{}\n0\n\n",
}


@pytest.mark.parametrize("lines", HEADS.values(), ids=HEADS.keys())
def test_a_doubtful_head_is_refused_and_nothing_behind_it_is_run(
    listener: Listener, lines: tuple[str, ...]
) -> None:
    with listener.connect() as sock:
        sock.sendall(listener.head(JSON, *lines) + b"0\r\n\r\n" + SMUGGLED)
        answers = until_closed(sock)
    assert answers.startswith(b"HTTP/1.1 400 ")
    assert answers.count(b"HTTP/1.1 ") == 1
    assert listener.alive()


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_a_doubtful_chunk_is_refused_and_nothing_behind_it_is_run(
    listener: Listener, body: bytes
) -> None:
    with listener.connect() as sock:
        sock.sendall(listener.head(JSON, CHUNKED) + body + SMUGGLED)
        answers = until_closed(sock)
    assert answers.startswith(b"HTTP/1.1 400 ")
    assert answers.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(("first", "status"), [
    (b"GET / HTTP/1.1\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n", 403),
    (b"GET http://evil.example/ HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n", 403),
    (b"CONNECT localhost:443 HTTP/1.1\r\nhost: localhost\r\n\r\n", 405),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    (b"GET / HTTP/9.9\r\nhost: localhost\r\n\r\n", 400),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    (b"GET /\x1b[2J HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
])  # fmt: skip
def test_first_lines_and_hosts_that_are_not_served(
    listener: Listener, first: bytes, status: int
) -> None:
    with listener.connect() as sock:
        sock.sendall(first)
        answers = until_closed(sock)
    assert answers.startswith(b"HTTP/1.1 %d " % status)
    assert answers.count(b"HTTP/1.1 ") == 1


def test_an_upgrade_to_http_2_is_ignored(listener: Listener) -> None:
    upgrade = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAEAAE")
    assert listener.status(listener.post(None, *upgrade)) == 200


def test_trailers_are_no_headers(target: Target, listener: Listener) -> None:
    """A host, a token or a session in a trailer changes nothing."""
    trailers = b"host: evil.example\r\norigin: https://evil.example\r\nx-session-id: [bad]\r\n"
    size = b"%x\r\n" % len(listener.body)
    body = size + listener.body + b"\r\n0\r\n" + trailers + b"\r\n"
    assert listener.status(listener.head(JSON, CHUNKED) + body) == 200
    for name in ("admin", "system"):
        admin_listener = target.listeners[name]
        bare = admin_listener.head(JSON, CHUNKED).replace(admin_listener.token.encode(), b"")
        token = admin_listener.token.encode()
        assert admin_listener.status(bare + b"2\r\n{}\r\n0\r\n" + token + b"\r\n") == 401


@pytest.mark.parametrize("kind", ["trailers", "chunk extensions", "headers"])
def test_what_surrounds_a_body_has_a_size(target: Target, listener: Listener, kind: str) -> None:
    before = target.memory("gateway") + target.memory("worker")
    line = b"x-%07d: " + b"v" * 1000 + b"\r\n"
    with listener.connect() as sock:
        if kind == "headers":
            sock.sendall(listener.head(JSON)[:-2])
        elif kind == "trailers":
            sock.sendall(listener.head(JSON, CHUNKED) + b"2\r\n{}\r\n0\r\n")
        else:
            sock.sendall(listener.head(JSON, CHUNKED) + b"2;")
        answers = b""
        try:
            for number in range(20_000):
                sock.sendall(b"e" * 1000 if kind == "chunk extensions" else line % number)
        except ConnectionError:
            pass
        answers = until_closed(sock)
    assert answers == b"" or answers.startswith(b"HTTP/1.1 431 ")
    assert target.memory("gateway") + target.memory("worker") - before < 30
    assert listener.alive()


def test_pipelined_requests_are_answered_in_their_order(listener: Listener) -> None:
    with listener.connect() as sock:
        sent = listener.post() + listener.head(path="/nowhere", method="GET")
        sock.sendall(sent * 20)
        answers = Responses(sock)
        statuses = [answers.next()[0] for _ in range(40)]
    assert statuses == [200, 404] * 20


def test_a_client_that_closes_its_sending_side_has_gone(listener: Listener) -> None:
    """Nobody may be waiting any more: what was begun ends, and half a body is none."""
    for sent in (listener.post(), listener.post()[:-1], listener.head()[:-2]):
        with listener.connect() as sock:
            sock.sendall(sent)
            sock.shutdown(1)
            answers = until_closed(sock)
        assert answers.count(b"HTTP/1.1 ") <= 1
        assert sent == listener.post() or b" 200 " not in answers
    assert listener.alive()
