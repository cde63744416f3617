"""Reads what came through a gateway, in each dialect, and compares it with what was sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.gateway.traffic import CannedCompletion, Case, Dialect

EXACT = 1e-6
"""Some write 32-bit numbers with fewer digits."""


def check(
    dialect: Dialect, head: bytes, body: bytes, completion: CannedCompletion, case: Case
) -> None:
    """Raises ValueError that says what in this response is not what the upstream sent."""
    stream = case.stream
    if b"x-lockstep-break:" in head.lower():
        raise ValueError(f"a session broke: {head.decode()}")
    if b"\r\ntransfer-encoding: chunked" in head.lower():
        body = joined(body)
    parts = list(events(body)) if stream else [json.loads(body)]
    # White space waits for what follows it, so that a few tokens may share an event; completions
    # of text join what came together.
    if stream and dialect != "completions" and len(parts) < 0.9 * len(completion.ids):
        raise ValueError(f"{len(parts)} events for {len(completion.ids)} tokens")
    choices = [choice for part in parts for choice in part.get("choices", ())]
    entries = [entry for choice in choices for entry in _entries(choice)]
    logprobs = [entry["logprob"] for entry in entries]
    if len(logprobs) != len(completion.logprobs):
        raise ValueError(f"{len(logprobs)} logprobs for {len(completion.logprobs)} tokens")
    for at, (got, sent) in enumerate(zip(logprobs, completion.logprobs, strict=True)):
        if abs(got - sent) > EXACT:
            raise ValueError(f"logprob {at} is {got}, sent was {sent}")
    if dialect in ("generate", "nvext"):
        ids = _ids(dialect, parts, choices)
        if ids != completion.ids:
            raise ValueError(f"ids {ids} came, sent were {completion.ids}")
    if dialect != "generate":
        text = "".join(_text(choice) for choice in choices)
        if text != completion.text:
            raise ValueError(f"text {text!r} came, sent was {completion.text!r}")
    if choices[-1]["finish_reason"] != "stop":
        raise ValueError(f"finish_reason is {choices[-1]['finish_reason']!r}")


def joined(body: bytes) -> bytes:
    """A chunked body without its chunks. Raises ValueError for a size that is none."""
    parts: list[bytes] = []
    at = 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        if not size:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2


def events(body: bytes) -> Iterator[dict[str, Any]]:
    """The events of a stream. Raises ValueError for one without the line that ends it."""
    ended = False
    for line in body.decode().splitlines():
        if line == "data: [DONE]":
            ended = True
        elif line.startswith("data: "):
            yield json.loads(line[6:])
    if not ended:
        raise ValueError("the stream has no end")


def _entries(choice: dict[str, Any]) -> list[dict[str, Any]]:
    logprobs = choice.get("logprobs") or {}
    if "token_logprobs" in logprobs:
        return [{"logprob": value} for value in logprobs["token_logprobs"]]
    if logprobs.get("values") is not None:
        return [{"logprob": value} for value in logprobs["values"]]
    return logprobs.get("content") or []


def _ids(dialect: Dialect, parts: list[Any], choices: list[dict[str, Any]]) -> list[int]:
    if dialect == "generate":
        return [token for choice in choices for token in choice["token_ids"]]
    extensions = [part.get("nvext") or {} for part in parts]
    return [token for one in extensions for token in one.get("completion_token_ids") or ()]


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or choice.get("delta") or {}).get("content") or "")
