"""Server-sent events, as every dialect of this field streams its answers."""

from __future__ import annotations

import msgspec

DONE = b"data: [DONE]\n\n"
MEDIA_TYPE = "text/event-stream"


def event(payload: msgspec.Struct | dict[str, object]) -> bytes:
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"
