"""No request holds the event loop: while the worst bodies come in, others are served.

How long the loop's own thread computed between two ticks of the monitor bounds what one callback
computed, and does not depend on what else this machine does; latency is only looked at roughly.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any

import pytest

from tests.abuse.target import Listener, Target

HELD = 0.05
SLOW = 3.0
"""Seconds for /health, on two cores that others use too; it was up to a minute."""
MEGABYTES = 400
CHAT = "/v1/chat/completions"
IN_SESSION = "/sessions/s/v1/chat/completions"
SAYING = {"role": "user", "content": "hi"}
MANY = {"n": 32, "max_tokens": 100, "ignore_eos": True}
SAMPLE = re.compile(r'lockstep_event_loop_delay_seconds_bucket{clock="cpu",le="([^"]+)"} ([\d.]+)')


def tool(number: int, schema: Any = None) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}} if schema is None else schema
    return {"type": "function", "function": {"name": f"f{number}", "parameters": parameters}}


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [SAYING], "max_tokens": 1, **fields}).encode()


def raw_messages(count: int) -> bytes:
    return b'{"messages":[' + b",".join([json.dumps(SAYING).encode()] * count) + b"]}"


WORST: dict[str, tuple[str, bytes, tuple[int, ...]]] = {
    "20,000 tools": (CHAT, chat(tools=[tool(at) for at in range(20_000)]), (400, 413)),
    "100,000 tools": (CHAT, chat(tools=[tool(at) for at in range(100_000)]), (400, 413)),
    "1,000 tools": (CHAT, chat(tools=[tool(at) for at in range(1000)]), (400,)),
    "a tool of 4 MB": (CHAT, chat(tools=[tool(0, {"a": "words " * 700_000})]), (400,)),
    "10,000 messages": (CHAT, raw_messages(10_000), (400,)),
    "300,000 messages": (CHAT, raw_messages(300_000), (413,)),
    "10,000 messages in a session": (IN_SESSION, raw_messages(10_000), (400,)),
    "arguments of 2 MB": (
        IN_SESSION,
        chat(messages=[SAYING, {"role": "assistant", "tool_calls": [{
            "id": "c", "type": "function",
            "function": {"name": "f", "arguments": json.dumps({"a": ["b"] * 400_000})},
        }]}, {"role": "tool", "tool_call_id": "c", "content": "done"}]),
        (400,),
    ),
    "a text of 300 kB to tokenize": (
        "/tokenize",
        json.dumps({"prompt": "words " * 50_000, "return_token_bytes": True,
                    "return_token_strs": True}).encode(),
        (200,),
    ),
    "1,000,000 required ids": (CHAT, chat(required_prefix_token_ids=[7] * 1_000_000), (400,)),
    "200,000 required ids": (CHAT, chat(required_prefix_token_ids=[7] * 200_000), (400,)),
    "60,000 choices": (
        CHAT, chat(structured_outputs={"choice": [f"c{at}" for at in range(60_000)]}), (400,),
    ),
    "500,000 ids": ("/detokenize", json.dumps({"tokens": [7] * 500_000}).encode(), (200,)),
    "4,000 prompts": ("/v1/completions", json.dumps({"prompt": [[1] * 2000] * 4000}).encode(),
                      (400, 413)),
    "text that quotes 2 MB of JSON": (
        CHAT, chat(messages=[{**SAYING, "content": json.dumps([{"a": ["b"]}] * 100_000)}]), (400,),
    ),
}  # fmt: skip


def holds(target: Target) -> int:
    """How many ticks of the monitor had more computing before them than is allowed."""
    gateway = target.listeners["gateway"]
    with gateway.connect() as sock:
        sock.sendall(gateway.head("connection: close", path="/metrics", method="GET"))
        raw = b""
        while piece := sock.recv(1 << 16):
            raw += piece
    counts = {name: float(count) for name, count in SAMPLE.findall(raw.decode())}
    return int(counts["+Inf"] - counts[str(HELD)])


@contextmanager
def watched_health(gateway: Listener) -> Iterator[list[float]]:
    """How long /health took, asked again and again."""
    seconds: list[float] = []
    done = threading.Event()

    def request_often() -> None:
        while not done.is_set():
            begun = monotonic()
            gateway.status(gateway.head(path="/health", method="GET"))
            seconds.append(monotonic() - begun)
            sleep(0.02)

    requests = threading.Thread(target=request_often)
    requests.start()
    try:
        yield seconds
    finally:
        done.set()
        requests.join()


@pytest.mark.parametrize(("path", "fields"), [
    ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {**MANY, "logprobs": 20}}),
    (CHAT, {"messages": [SAYING], "logprobs": True, "top_logprobs": 20, **MANY}),
    ("/v1/completions", {"prompt": [1, 2], "logprobs": 20, **MANY}),
])  # fmt: skip
def test_no_answer_holds_the_event_loop(target: Target, path: str, fields: dict[str, Any]) -> None:
    gateway = target.listeners["gateway"]
    before = holds(target)
    assert gateway.status(gateway.post(json.dumps(fields).encode(), path=path)) == 200
    assert holds(target) == before


@pytest.mark.parametrize(("path", "body", "statuses"), WORST.values(), ids=WORST.keys())
def test_no_body_holds_the_event_loop(
    target: Target, path: str, body: bytes, statuses: tuple[int, ...]
) -> None:
    gateway = target.listeners["gateway"]
    before = holds(target)
    with watched_health(gateway) as seconds:
        assert gateway.status(gateway.post(body, path=path)) in statuses
    assert holds(target) == before
    assert max(seconds) < SLOW


def test_ten_prompts_of_three_megabytes_at_once_take_little_memory(target: Target) -> None:
    gateway = target.listeners["gateway"]
    body = chat(messages=[{**SAYING, "content": "hello wörld 12345 {a: b} " * 120_000}])
    before, slow = target.memory("gateway"), holds(target)
    with watched_health(gateway) as seconds, ThreadPoolExecutor(10) as threads:
        sent = gateway.post(body, path=CHAT)
        statuses = list(threads.map(gateway.status, [sent] * 10))
        assert statuses == [400] * 10
    assert target.memory("gateway") - before < MEGABYTES
    assert holds(target) == slow
    assert max(seconds) < SLOW


def test_series_of_metrics_do_not_grow_with_paths(target: Target) -> None:
    gateway = target.listeners["gateway"]

    def series() -> int:
        with gateway.connect() as sock:
            sock.sendall(gateway.head("connection: close", path="/metrics", method="GET"))
            raw = b""
            while piece := sock.recv(1 << 16):
                raw += piece
        return raw.count(b"\n")

    paths = ("/x{}", "/sessions/s{}/v1/nothing", "/sessions/{}/v1/models", "/v1/models/{}")
    for path in paths:
        gateway.status(gateway.head(path=path.format("first"), method="GET"))
    before = series()
    with gateway.connect() as sock:
        for number in range(500):
            heads = [gateway.head(path=path.format(number), method="GET") for path in paths]
            sock.sendall(b"".join(heads))
            sock.recv(1 << 16)
    assert series() <= before + 12
