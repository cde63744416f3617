"""Raw HTTP requests that no careful client would send, and their responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from lockstep.http.client.client import HttpClient
from lockstep.protocol.common.decode_error import error_of

SHOWN = 160


@dataclass(frozen=True, slots=True)
class RawReply:
    """A response. `fields` is empty unless its body is a JSON object."""

    status: int
    body: bytes | bytearray

    @property
    def fields(self) -> dict[str, Any]:
        try:
            fields = msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return {}
        return fields if isinstance(fields, dict) else {}

    @property
    def refused(self) -> bool:
        return 400 <= self.status < 500

    @property
    def missing(self) -> bool:
        """Whether the server has no such route."""
        return self.status in (404, 405, 501)

    def describe(self) -> str:
        """Return the status, and the message of an error."""
        if self.status < 300:
            return str(self.status)
        message = " ".join(error_of(self.status, self.body).message.split())
        excerpt = message if len(message) <= SHOWN else message[:SHOWN] + "..."
        return f"{self.status} ({excerpt})"


class Raw:
    """Sender of arbitrary requests without retries; raises Unavailable and DeadlineExceeded."""

    def __init__(self, *, api_key: str | None = None, timeout: float = 30.0) -> None:
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout = timeout

    async def send(
        self, method: str, url: str, body: object = None, *, token: str | None = None
    ) -> RawReply:
        headers = dict(self._headers)
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        raw = b"" if body is None else msgspec.json.encode(body)
        parts = urlsplit(url)
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        # A server may drop a connection after an error, so each request gets its own.
        client = HttpClient(f"{parts.scheme}://{parts.netloc}", retries=0, timeout=self._timeout)
        try:
            return RawReply(*await client.exchange(method, target, raw, headers=headers))
        finally:
            await client.close()
