"""Request bodies are read whole, however they were cut."""

from __future__ import annotations

import pytest
from starlette.requests import Request
from starlette.types import Message

from lockstep.http.http_request import body_bytes, read_body
from lockstep.protocol.json.strict import LIMITS


@pytest.mark.parametrize("size", [2, 1 << 10, 1 << 20])
async def test_the_size_of_a_body_is_that_of_all_its_pieces(size: int) -> None:
    raw = b'"' + b"x" * (size - 2) + b'"'
    pieces = [raw[: size // 2], raw[size // 2 :]]

    async def receive() -> Message:
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    headers = [(b"content-type", b"application/json")]
    http = Request({"type": "http", "headers": headers}, receive)
    assert await read_body(http, bytes, LIMITS) == raw
    assert body_bytes(http) == size
