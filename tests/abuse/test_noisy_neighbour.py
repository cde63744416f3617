"""One client's heavy requests do not slow down the short requests of another.

Quiet and attacked measurements alternate, so that other work on the machine slows down both. The
floor covers what a busy machine adds to a request of a few milliseconds; without the limits, the
attacks raised the median to seconds.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from statistics import median
from time import monotonic, sleep
from typing import Any

import pytest

from tests.abuse.target import Listener, Target

FACTOR, FLOOR = 3.0, 0.5
SAMPLES, ROUNDS, ATTACKERS = 8, 2, 8
GENERATE = "/inference/v1/generate"
TERMS = " & ".join(f"/.*a.{{{n}}}b.*/" for n in range(1, 25))
NUMBERS = count()


def generate(prompt: list[int] | None = None, **params: Any) -> bytes:
    sampling = {"max_tokens": 2, "ignore_eos": True, **params}
    return json.dumps({"token_ids": prompt or [1, 2, 3], "sampling_params": sampling}).encode()


BIASES = {str(token): 0.5 for token in range(500)}
ATTACKS: dict[str, bytes] = {
    "1.95 million ids": generate(allowed_token_ids=[7] * 1_950_000),
    "250,000 repeated ids": generate(allowed_token_ids=[7] * 250_000, max_tokens=40),
    "500 biases": generate(logit_bias=BIASES, max_tokens=40),
    "prompt logprobs": generate([5] * 400, prompt_logprobs=5),
    "a grammar without end": generate(
        structured_outputs={"grammar": f"start: A\nA: {TERMS}"}, ignore_eos=False
    ),
}


def send(listener: Listener, body: bytes, *lines: str) -> bytes:
    with listener.connect() as sock:
        sock.settimeout(120)
        sock.sendall(listener.post(body, "connection: close", *lines, path=GENERATE))
        response = bytearray()
        while piece := sock.recv(1 << 16):
            response += piece
        return bytes(response)


def latency(listener: Listener) -> float:
    begun = monotonic()
    assert send(listener, generate()).startswith(b"HTTP/1.1 200 ")
    return monotonic() - begun


@contextmanager
def attacked(listener: Listener, body: bytes) -> Iterator[None]:
    ended = threading.Event()

    def attack() -> None:
        while not ended.is_set():
            session = f"x-session-id: noisy-{next(NUMBERS)}"
            try:
                send(listener, body, *([session] if b"logit_bias" in body else []))
            except OSError:
                sleep(0.05)

    threads = [threading.Thread(target=attack, daemon=True) for _ in range(ATTACKERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(120)


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_does_not_slow_down_its_neighbour(target: Target, name: str) -> None:
    gateway = target.listeners["gateway"]
    quiet, loaded = [], []
    for _ in range(ROUNDS):
        quiet += [latency(gateway) for _ in range(SAMPLES)]
        with attacked(gateway, ATTACKS[name]):
            loaded += [latency(gateway) for _ in range(SAMPLES)]
    assert median(loaded) <= max(FACTOR * median(quiet), FLOOR), (median(quiet), median(loaded))
