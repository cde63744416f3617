"""One tenant's attacks do not slow down the short requests of another.

Each attack is compared with ordinary requests: as many clients of the same tenant, which send what
an honest program sends in its place. Both load the machine, so that neither the number of cores nor
other work on it decides the test. Attack and control alternate; a machine that stalls once is
measured again.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from time import monotonic
from typing import Any

import pytest

from tests.abuse.target import Listener, Target

FACTOR = 3.0
SAMPLES, ROUNDS, ATTEMPTS, ATTACKERS = 20, 2, 3, 8
GENERATE = "/inference/v1/generate"
NOISY, QUIET = "noisy-tenant-key", "quiet-tenant-key"
TERMS = " & ".join(f"/.*a.{{{n}}}b.*/" for n in range(1, 25))
NUMBERS = count()


def generate(prompt: list[int] | None = None, *, stream: bool = False, **params: Any) -> bytes:
    sampling = {"max_tokens": 40, "ignore_eos": True, **params}
    body = {"token_ids": prompt or [1, 2, 3], "stream": stream, "sampling_params": sampling}
    return json.dumps(body).encode()


def structured(**spec: Any) -> bytes:
    return generate(structured_outputs=spec, ignore_eos=False)


def chain(links: int) -> str:
    """A grammar in which every rule needs the next one twice."""
    rules = [f"r{at}: r{at + 1} r{at + 1}" for at in range(links)]
    return "\n".join(["start: r0", *rules, f'r{links}: "a"'])


def references(links: int) -> dict[str, Any]:
    """A JSON schema whose definitions refer to each other in a chain."""
    defined: dict[str, Any] = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(links)}
    return {"$ref": "#/$defs/d0", "$defs": {**defined, f"d{links}": {"type": "boolean"}}}


Body = Callable[[int], bytes]
"""A body for each number, of which no two requests have the same."""


def same(body: bytes) -> Body:
    return lambda _: body


def long_prompt(number: int, **params: Any) -> bytes:
    """A prompt that is not in the cache, whatever was sent before."""
    return generate([5 + number % 500, 5 + number // 500 % 500, *[5] * 400], **params)


PLAIN = same(generate())
STREAM = same(generate(stream=True, max_tokens=900, n=4, logprobs=20))
SMALL_GRAMMAR = same(structured(regex="[ab]{40}"))


@dataclass(frozen=True)
class Attack:
    """What the noisy tenant sends, and what honest clients send in its place.

    With `reads` false, responses are not read; with `sessions`, each request opens a session.
    """

    body: Body
    control: Body = PLAIN
    reads: bool = True
    sessions: bool = False


BIASES = {str(token): 0.5 for token in range(500)}
CHOICES = [f"word {at}" for at in range(60_000)]
CHAIN, REFERENCES = chain(5000), references(5000)
ATTACKS = {
    "1.95 million allowed ids": Attack(same(generate(allowed_token_ids=[7] * 1_950_000))),
    "65,536 repeated ids": Attack(same(generate(allowed_token_ids=[7] * 65_536))),
    "a prefix of a million ids": Attack(same(generate(required_prefix_token_ids=[7] * 10**6))),
    "60,000 choices": Attack(same(structured(choice=CHOICES)), SMALL_GRAMMAR),
    "500 biases": Attack(same(generate(logit_bias=BIASES))),
    "prompt logprobs": Attack(lambda number: long_prompt(number, prompt_logprobs=5), long_prompt),
    "slow readers": Attack(STREAM, STREAM, reads=False),
    "many sessions": Attack(PLAIN, sessions=True),
    "a grammar without end": Attack(
        lambda number: structured(grammar=f'start: A "{number}"\nA: {TERMS}'), SMALL_GRAMMAR
    ),
    "5,000 chained rules": Attack(
        lambda number: structured(grammar=f'{CHAIN} "{number}"'), SMALL_GRAMMAR
    ),
    "5,000 chained references": Attack(
        lambda number: structured(json={**REFERENCES, "title": str(number)}), SMALL_GRAMMAR
    ),
}


@pytest.fixture(scope="module")
def gateway() -> Iterator[Listener]:
    """A gateway with two tenants, and the limits that it has by default."""
    target = Target(limits=(), in_flight=None, LOCKSTEP_API_KEYS=f"{NOISY},{QUIET}")
    try:
        yield target.listeners["gateway"]
    finally:
        target.stop()


class Client:
    """A client that sends one request after the other until `stop`, from any thread."""

    def __init__(self, listener: Listener, key: str) -> None:
        self._listener, self._key = listener, key
        self._sock: socket.socket | None = None
        self.ended = threading.Event()

    def send(self, body: bytes, *lines: str, reads: bool = True) -> bytes:
        """The response. Raises OSError when the client was stopped before its end."""
        with self._listener.connect() as sock:
            self._sock = sock
            sock.settimeout(120)
            head = ("connection: close", f"authorization: Bearer {self._key}", *lines)
            sock.sendall(self._listener.post(body, *head, path=GENERATE))
            if not reads:
                self.ended.wait(120)
            response = bytearray()
            while piece := sock.recv(1 << 16):
                response += piece
            return bytes(response)

    def stop(self) -> None:
        """End the client, and its request: it must not keep the server busy after its test."""
        self.ended.set()
        if self._sock is not None:
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def attack(self, attack: Attack, *, control: bool) -> None:
        while not self.ended.is_set():
            number = next(NUMBERS)
            body = (attack.control if control else attack.body)(number)
            session = (f"x-session-id: noisy-{number}",) if attack.sessions and not control else ()
            with suppress(OSError):
                self.send(body, *session, reads=control or attack.reads)


def latency(listener: Listener) -> float:
    begun = monotonic()
    response = Client(listener, QUIET).send(generate(max_tokens=2))
    assert response.startswith(b"HTTP/1.1 200 "), response
    return monotonic() - begun


@contextmanager
def busy(listener: Listener, attack: Attack, *, control: bool) -> Iterator[None]:
    """ATTACKERS clients of the other tenant that send the attack, or its control."""
    clients = [Client(listener, NOISY) for _ in range(ATTACKERS)]
    with ThreadPoolExecutor(ATTACKERS) as threads:
        for client in clients:
            threads.submit(client.attack, attack, control=control)
        try:
            yield
        finally:
            for client in clients:
                client.stop()


def measure(listener: Listener, attack: Attack) -> tuple[float, float]:
    """The 99th percentile of the other tenant's latency beside the control, and the attack."""
    latencies: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(ROUNDS):
        for control, measured in latencies.items():
            with busy(listener, attack, control=control):
                measured += [latency(listener) for _ in range(SAMPLES)]
    return percentile(latencies[True]), percentile(latencies[False])


def percentile(latencies: list[float]) -> float:
    return sorted(latencies)[int(0.99 * len(latencies))]


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_slows_its_neighbour_down_no_more_than_ordinary_load(
    gateway: Listener, name: str
) -> None:
    measured = []
    for _ in range(ATTEMPTS):
        beside_control, beside_attack = measure(gateway, ATTACKS[name])
        if beside_attack <= FACTOR * beside_control:
            return
        measured.append((round(beside_control, 3), round(beside_attack, 3)))
    raise AssertionError(f"seconds beside control and attack: {measured}")
