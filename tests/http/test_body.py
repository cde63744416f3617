"""Bodies: which of them are large is told by the bytes they came in."""

from __future__ import annotations

import pytest
from starlette.requests import Request
from starlette.types import Message

from lockstep.http.body import is_large, read_body
from lockstep.http.off_loop import LARGE_BYTES
from lockstep.protocol.json.limits import LIMITS


@pytest.mark.parametrize("size", [2, LARGE_BYTES, LARGE_BYTES + 1])
async def test_a_body_is_large_by_all_its_pieces(size: int) -> None:
    raw = b'"' + b"x" * (size - 2) + b'"'
    pieces = [raw[: size // 2], raw[size // 2 :]]

    async def receive() -> Message:
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    headers = [(b"content-type", b"application/json")]
    http = Request({"type": "http", "headers": headers}, receive)
    assert await read_body(http, bytes, LIMITS) == raw
    assert is_large(http) is (size > LARGE_BYTES)
