"""The traffic of the gateway benchmark: its cases, their requests, and the canned completions.

It is made once and written to a file, which the processes of the benchmark read: the upstream and
Dynamo's worker respond with it, the load generator sends requests and compares.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import msgspec

Dialect = Literal["generate", "completions", "nvext", "chat"]
MODEL = "policy"
SESSION, MARKER = "S" * 16, "M" * 16
"""Stand for the name of a session and for what makes its first message differ from all others."""


class Case(msgspec.Struct, frozen=True):
    """Requests with prompts of about `prompt` tokens and responses of `out` tokens.

    With `turns`, the requests are conversations of that many turns, each in a session of its own,
    whose prompts grow from half to one and a half times `prompt`."""

    prompt: int
    out: int
    stream: bool = False
    turns: int = 0


CASES = {
    "2k": Case(2_048, 64),
    "2k-sessions": Case(2_048, 64, turns=16),
    "16k": Case(16_384, 64),
    "16k-sessions": Case(16_384, 64, turns=16),
    "stream": Case(2_048, 256, stream=True),
    "stream-sessions": Case(2_048, 256, stream=True, turns=6),
}


class CannedCompletion(msgspec.Struct, frozen=True):
    """The completion of `len(ids)` tokens that every request gets: the last id ends the turn."""

    ids: list[int]
    logprobs: list[float]
    pieces: list[str]

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Traffic(msgspec.Struct, frozen=True):
    """`prompts` by length, `turns` of each case as the messages of its last turn."""

    completions: dict[int, CannedCompletion]
    prompts: dict[int, list[list[int]]]
    turns: dict[str, list[dict[str, str]]]

    def write(self, path: Path) -> None:
        path.write_bytes(msgspec.msgpack.encode(self))

    @classmethod
    def read(cls, path: Path) -> Traffic:
        return msgspec.msgpack.decode(path.read_bytes(), type=cls)


def ids_body(dialect: Dialect, case: Case, ids: list[int]) -> bytes:
    """A request for a prompt of ids, each in its server's own way to take ids and give logprobs."""
    body: dict[str, object]
    if dialect == "generate":
        sampling = {"temperature": 1.0, "max_tokens": case.out, "logprobs": 0}
        body = {"model": MODEL, "token_ids": ids, "sampling_params": sampling}
    elif dialect == "completions":
        body = {"model": MODEL, "prompt": ids, "max_tokens": case.out, "logprobs": 1}
    else:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "(token-in mode)"}],
            "max_tokens": case.out,
            "logprobs": True,
            "nvext": {"token_data": ids, "extra_fields": ["completion_token_ids"]},
        }
    return _encode(body, case)


def chat_body(case: Case, messages: list[dict[str, str]]) -> bytes:
    """Return the chat request of an unmodified agent that wants logprobs."""
    return _encode(
        {"model": MODEL, "messages": messages, "max_tokens": case.out, "logprobs": True}, case
    )


def _encode(body: dict[str, object], case: Case) -> bytes:
    if case.stream:
        body["stream"] = True
    return json.dumps(body, separators=(",", ":")).encode()


PATHS: dict[Dialect, str] = {
    "generate": "/inference/v1/generate",
    "completions": "/v1/completions",
    "nvext": "/v1/chat/completions",
    "chat": "/v1/chat/completions",
}


def request(path: str, body: bytes, headers: str = "") -> bytes:
    """The whole HTTP request."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"{headers}content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
