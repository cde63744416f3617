"""Clients that are slow, silent, many or gone cost a listener nothing for long."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from time import monotonic, sleep

import pytest

from tests.abuse.target import SECONDS, Listener, Target, until_closed

JSON = "content-type: application/json"
LONGEST = 30.0
"""Seconds within which a deadline of one second has taken effect, on a machine with other work."""
GENERATE = "/inference/v1/generate"


def dribble(sock: socket.socket, piece: bytes) -> float:
    """Sends a piece every now and then; the seconds until the server has had enough."""
    begun = monotonic()
    sock.settimeout(0.05)
    while monotonic() - begun < LONGEST:
        try:
            if not sock.recv(1 << 16):
                break
        except TimeoutError:
            pass
        except ConnectionError:
            break
        try:
            sock.sendall(piece)
        except ConnectionError:
            break
    return monotonic() - begun


def test_a_request_that_does_not_come_to_its_end_is_given_up(listener: Listener) -> None:
    starts = {
        "head": b"POST / HTTP/1.1\r\nx-slow: ",
        "body": listener.head(JSON, "content-length: 100000") + b"{",
        "chunk": listener.head(JSON, "transfer-encoding: chunked") + b"fffff\r\n{",
    }

    def attack(part: str, piece: bytes) -> float:
        with listener.connect() as sock:
            sock.sendall(starts[part])
            return dribble(sock, piece)

    with ThreadPoolExecutor(2 * len(starts)) as threads:
        attacks = {
            (part, piece): threads.submit(attack, part, piece)
            for part in starts
            for piece in (b"", b"x")
        }
    for which, ended in attacks.items():
        assert SECONDS / 2 < ended.result() < LONGEST, which
    assert listener.alive()


def test_answers_that_nobody_reads_are_given_up(target: Target, listener: Listener) -> None:
    """Requests are sent ahead without end, and not one answer is read."""
    before = target.memory("gateway") + target.memory("worker")
    sent = listener.head(path="/" + "x" * 4000, method="GET") * 50
    with listener.connect(receive_buffer=4096) as sock:
        sock.settimeout(0.2)
        begun = monotonic()
        while monotonic() - begun < LONGEST:
            try:
                sock.sendall(sent)
            except TimeoutError:
                continue
            except ConnectionError:
                break
        assert monotonic() - begun < LONGEST
    assert target.memory("gateway") + target.memory("worker") - before < 40
    assert listener.alive()


def test_what_is_sent_ahead_is_made_to_wait(target: Target, listener: Listener) -> None:
    before = target.memory("gateway") + target.memory("worker")
    sent, taken = listener.post() * 50, 0
    with listener.connect(receive_buffer=4096) as sock:
        sock.settimeout(0.2)
        begun = monotonic()
        while monotonic() - begun < 1.5:
            try:
                taken += sock.send(sent)
            except (TimeoutError, ConnectionError):
                continue
    assert taken < 40 << 20
    assert target.memory("gateway") + target.memory("worker") - before < 40
    assert listener.alive()


def generate(**params: object) -> bytes:
    sampling = {"max_tokens": 900, "min_tokens": 900, "ignore_eos": True, **params}
    body = {"token_ids": [1, 2, 3], "stream": True, "sampling_params": sampling}
    return json.dumps(body).encode()


def until(met: Callable[[], bool], seconds: float = LONGEST) -> bool:
    end = monotonic() + seconds
    while not met():
        if monotonic() > end:
            return False
        sleep(0.05)
    return True


@pytest.mark.failure_mode("F47")
@pytest.mark.parametrize("name", ["gateway", "worker"])
def test_a_client_that_leaves_is_noticed_behind_pipelined_requests(
    target: Target, name: str
) -> None:
    listener = target.listeners[name]
    with listener.connect() as sock:
        sock.sendall(listener.post(generate(n=4), path=GENERATE) + listener.post() * 30)
        assert until(lambda: target.running() > 0)
    assert until(lambda: target.running() == 0)
    assert listener.alive()


@pytest.mark.failure_mode("F47")
def test_streams_that_nobody_reads_give_their_places_back(target: Target) -> None:
    """Four of them are all that this gateway takes at once; a fifth request is answered."""
    gateway = target.listeners["gateway"]
    with ExitStack() as stack:
        for _ in range(4):
            sock = stack.enter_context(gateway.connect(receive_buffer=2048))
            sock.sendall(gateway.post(generate(n=4, logprobs=20), path=GENERATE))
        assert until(lambda: target.running() > 0)
        short = generate(max_tokens=1, min_tokens=1).replace(b'"stream": true', b'"stream": false')
        begun = monotonic()
        assert gateway.status(gateway.post(short, path=GENERATE)) == 200
        assert monotonic() - begun < LONGEST
    assert until(lambda: target.running() == 0)


def test_more_connections_than_there_may_be_hurt_nobody(target: Target, listener: Listener) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(listener.connect()) for _ in range(300)]
        assert listener.alive()
        assert target.serving() == 1
        ended = sum(_ended(sock) for sock in idle)
        assert 140 <= ended < 300
    assert listener.alive()


def _ended(sock: socket.socket) -> bool:
    sock.settimeout(0.001)
    try:
        return sock.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_when_every_connection_is_in_use_a_new_one_is_told_to_come_back(
    listener: Listener,
) -> None:
    assert until(lambda: _told_to_come_back(listener))
    assert until(lambda: _responds(listener))


def _told_to_come_back(listener: Listener) -> bool:
    """Whether a request beside 150 unfinished ones gets 503. Each of those has a second: on a busy
    machine the first may be gone before the last is there."""
    with ExitStack() as stack:
        for _ in range(150):
            stack.enter_context(listener.connect()).sendall(b"POST / HTTP/1.1\r\n")
        sleep(0.2)
        with listener.connect() as late:
            late.sendall(listener.post(None, "connection: close"))
            return b"HTTP/1.1 503 " in until_closed(late)


def _responds(listener: Listener) -> bool:
    try:
        return listener.alive()
    except ConnectionError:
        return False
