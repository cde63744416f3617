"""Reads what came through a gateway, in each dialect, and compares it with what was sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.gateway.traffic import CannedCompletion, Case, Dialect

EXACT = 1e-6
"""Some write 32-bit numbers with fewer digits."""
ENDS: dict[Dialect, bytes] = {
    "messages": b"event: message_stop",
    "responses": b"event: response.completed",
}
"""The line that ends a stream of the dialects that give text alone, without logprobs."""


def check(
    dialect: Dialect, head: bytes, body: bytes, completion: CannedCompletion, case: Case
) -> None:
    """Raises ValueError that says what in this response is not what the upstream sent."""
    stream = case.stream
    if b"x-lockstep-break:" in head.lower():
        raise ValueError(f"a session broke: {head.decode()}")
    if b"\r\ntransfer-encoding: chunked" in head.lower():
        body = joined(body)
    end = ENDS.get(dialect, b"data: [DONE]")
    parts = list(events(body, end)) if stream else [json.loads(body)]
    # White space waits for what follows it, so that a few tokens may share an event; completions
    # of text join what came together.
    if stream and dialect != "completions" and len(parts) < 0.9 * len(completion.ids):
        raise ValueError(f"{len(parts)} events for {len(completion.ids)} tokens")
    if dialect in ENDS:
        _check_text("".join(_agent_texts(parts)), completion)
        return
    choices = [choice for part in parts for choice in part.get("choices", ())]
    entries = [entry for choice in choices for entry in _entries(choice)]
    logprobs = [entry["logprob"] for entry in entries]
    sent_logprobs = completion.logprobs * case.n
    if len(logprobs) != len(sent_logprobs):
        raise ValueError(f"{len(logprobs)} logprobs for {len(sent_logprobs)} tokens")
    for at, (got, sent) in enumerate(zip(logprobs, sent_logprobs, strict=True)):
        if abs(got - sent) > EXACT:
            raise ValueError(f"logprob {at} is {got}, sent was {sent}")
    if dialect in ("generate", "nvext"):
        ids = _ids(dialect, parts, choices)
        if ids != completion.ids * case.n:
            raise ValueError(f"ids {ids} came, sent were {completion.ids}")
    if dialect != "generate":
        _check_text("".join(_text(choice) for choice in choices), completion)
    if choices[-1]["finish_reason"] != "stop":
        raise ValueError(f"finish_reason is {choices[-1]['finish_reason']!r}")


def _check_text(text: str, completion: CannedCompletion) -> None:
    if text != completion.text:
        raise ValueError(f"text {text!r} came, sent was {completion.text!r}")


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


def events(body: bytes, end: bytes = b"data: [DONE]") -> Iterator[dict[str, Any]]:
    """The events of a stream. Raises ValueError for one without the line that ends it."""
    ended = False
    for line in body.decode().splitlines():
        if line.encode() == end:
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


def _agent_texts(parts: list[Any]) -> Iterator[str]:
    """The text of a response in one of the dialects without logprobs, streamed or not."""
    for part in parts:
        if part.get("type") == "response.output_text.delta":
            yield part["delta"]
        elif part.get("type") == "content_block_delta":
            yield part["delta"]["text"]
        elif "type" not in part or part["type"] == "message":
            items = part.get("output", [part])
            yield from (block["text"] for item in items for block in item["content"])


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or choice.get("delta") or {}).get("content") or "")
