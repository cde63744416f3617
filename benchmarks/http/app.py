"""The bare ASGI application of the HTTP benchmark: reads a body, responds with 6 kB of JSON.

It imports nothing, so that every server can load it in its own environment.
"""

from __future__ import annotations

from typing import Any

RESPONSE = b'{"choices": "' + b"x" * 6000 + b'"}'
HEADERS = [
    (b"content-type", b"application/json"),
    (b"content-length", str(len(RESPONSE)).encode()),
]


async def app(_: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    await send({"type": "http.response.body", "body": RESPONSE})
