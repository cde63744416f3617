"""Takes large routed experts out of a body while it arrives, so that they are never put together.

A base64 string that is longer than what the network brings at once stays in the pieces that came;
only the rest of the JSON is collected. What is not recognised here stays in the JSON, and is right.
"""

from __future__ import annotations

import re

from lockstep.protocol.common.base64_extract import KEY, MARK, NEEDLE, Base64Text, ExtractedBody

LOOK_BACK = 4096
"""How far before new bytes the key may stand: its object holds a shape and a dtype, not more."""
OPEN = re.compile(
    rb'"routed_experts"\s*:\s*'
    rb'(?:\{(?:[^"{}\[\]]|"[^"\\]*"|\[[^\[\]"]*\])*?"data"\s*:\s*)?'
    rb'"([A-Za-z0-9+/=]*)\Z'
)
"""A body that ends inside the base64 of a `routed_experts` value."""


class Base64Extractor:
    """Feed it the body as it comes; `finish` gives the JSON and the values taken out."""

    def __init__(self) -> None:
        self._json = bytearray()
        self._values: list[Base64Text] = []
        self._open: list[bytes] | None = None

    def feed(self, chunk: bytes) -> None:
        if self._open is None:
            before = len(self._json)
            self._json += chunk
            self._look(max(before - LOOK_BACK, 0))
            return
        end = chunk.find(b'"')
        if chunk.find(b"\\", 0, len(chunk) if end == -1 else end) != -1:
            self._give_back()
            self._json += chunk
        elif end == -1:
            self._open.append(chunk)
        else:
            self._open.append(chunk[:end])
            self._json += f"{MARK}{len(self._values)}".encode()
            self._values.append(Base64Text(tuple(map(memoryview, self._open))))
            self._open = None
            self.feed(chunk[end:])

    def finish(self) -> ExtractedBody:
        self._give_back()
        return ExtractedBody(self._json, tuple(self._values))

    def _look(self, start: int) -> None:
        """Opens a value when the JSON so far ends inside one."""
        at = self._json.rfind(NEEDLE, start) - 1
        if at < 0 or self._json[at - 1 : at] == b"\\" or self._json[at : at + len(KEY)] != KEY:
            return
        if (found := OPEN.match(self._json, at)) is not None:
            text = found.start(1)
            del found  # it holds the buffer, which could not shrink
            self._open = [bytes(self._json[text:])]
            del self._json[text:]

    def _give_back(self) -> None:
        """Puts an unfinished value back into the JSON: it was cut off, or no plain base64."""
        for piece in self._open or ():
            self._json += piece
        self._open = None
