"""Streams of whole responses for harnesses that request one, with every block and item.

verifiers builds such streams itself, but only for a single text, as its own train client generates
nothing else in these dialects.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from verifiers.v1.dialects.anthropic import AnthropicDialect
from verifiers.v1.dialects.responses import ResponsesDialect

Event = tuple[str, dict[str, Any]]


def install() -> None:
    """Make verifiers' dialects stream responses with tool calls and thinking as well."""
    AnthropicDialect.stream_events = lambda self, raw: _encode(_messages(raw))
    ResponsesDialect.stream_events = lambda self, raw: _encode(_number(_responses(raw)))


def _encode(events: Iterator[Event]) -> list[bytes]:
    return [
        f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()
        for kind, fields in events
    ]


def _messages(raw: dict[str, Any]) -> Iterator[Event]:
    head = {**raw, "content": [], "stop_reason": None, "stop_sequence": None}
    yield "message_start", {"message": head}
    for index, block in enumerate(raw["content"]):
        empty, deltas = _block(block)
        yield "content_block_start", {"index": index, "content_block": empty}
        for delta in deltas:
            yield "content_block_delta", {"index": index, "delta": delta}
        yield "content_block_stop", {"index": index}
    ending = {name: raw.get(name) for name in ("stop_reason", "stop_sequence")}
    yield "message_delta", {"delta": ending, "usage": raw.get("usage") or {}}
    yield "message_stop", {}


def _block(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the empty block that starts a stream, and the deltas that fill it."""
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        return {**block, "thinking": "", "signature": ""}, [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block.get("signature", "")},
        ]
    arguments = json.dumps(block.get("input") or {})
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments}]


def _responses(raw: dict[str, Any]) -> Iterator[Event]:
    head = {**raw, "status": "in_progress", "output": []}
    yield "response.created", {"response": head}
    for index, item in enumerate(raw["output"]):
        empty = {**item, "content": []} if item["type"] == "message" else item
        yield "response.output_item.added", {"output_index": index, "item": empty}
        if item["type"] == "message":
            for at, part in enumerate(item["content"]):
                where = {"output_index": index, "item_id": item["id"], "content_index": at}
                logprobs = part.get("logprobs") or []
                yield "response.content_part.added", {**where, "part": {**part, "text": ""}}
                text = {**where, "logprobs": logprobs}
                yield "response.output_text.delta", {**text, "delta": part["text"]}
                yield "response.output_text.done", {**text, "text": part["text"]}
                yield "response.content_part.done", {**where, "part": part}
        elif item["type"] == "function_call":
            where = {"output_index": index, "item_id": item["id"]}
            arguments = item["arguments"]
            yield "response.function_call_arguments.delta", {**where, "delta": arguments}
            yield (
                "response.function_call_arguments.done",
                {**where, "arguments": arguments, "name": item["name"]},
            )
        yield "response.output_item.done", {"output_index": index, "item": item}
    status = raw.get("status")
    last = "response.incomplete" if status == "incomplete" else "response.completed"
    yield last, {"response": raw}


def _number(events: Iterator[Event]) -> Iterator[Event]:
    for number, (kind, fields) in enumerate(events):
        yield kind, {"sequence_number": number, **fields}
