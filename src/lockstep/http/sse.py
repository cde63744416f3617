"""Server-sent events, as every dialect streams its responses: encoding and decoding."""

from __future__ import annotations

import msgspec

DONE = b"data: [DONE]\n\n"
MEDIA_TYPE = "text/event-stream"


def event(payload: msgspec.Struct | dict[str, object]) -> bytes:
    """Return one event with this payload as its JSON data."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


def comment(payload: msgspec.Struct | dict[str, object]) -> bytes:
    """Return a comment with this payload as its JSON, which clients do not read."""
    return b": " + msgspec.json.encode(payload) + b"\n\n"


class EventReader:
    """Decoder of a byte stream into the data of its events, wherever the network cut it.

    `done` is true from `[DONE]` on; later data is not read.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[bytes] = []
        self.done = False

    @property
    def held(self) -> int:
        """Bytes of the event that is not complete."""
        return len(self._line) + sum(map(len, self._data))

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the data of the events that `chunk` completed."""
        between = not (self.done or self._line or self._data)
        if between and (whole := _whole_events(chunk)) is not None:
            self.done = whole[-1] == b"[DONE]"
            return whole[:-1] if self.done else whole
        events: list[bytes] = []
        at = 0
        while not self.done:
            end = chunk.find(b"\n", at)
            if end == -1:
                self._line += chunk[at:]
                break
            line = bytes(self._line) + chunk[at:end] if self._line else chunk[at:end]
            self._line.clear()
            at = end + 1
            self._take(line[:-1] if line.endswith(b"\r") else line, events)
        return events

    def _take(self, line: bytes, events: list[bytes]) -> None:
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line[5:6] == b" " else line[5:])
        elif not line and self._data:
            data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
            self._data = []
            if data == b"[DONE]":
                self.done = True
            else:
                events.append(data)


def _whole_events(chunk: bytes) -> list[bytes] | None:
    """Return the data of a chunk of complete one-line events, which most chunks are; else None."""
    if not chunk.startswith(b"data: ") or not chunk.endswith(b"\n\n") or b"\r" in chunk:
        return None
    events = chunk[6:-2].split(b"\n\ndata: ")
    plain = chunk.count(b"\n") == 2 * len(events) and b"[DONE]" not in events[:-1]
    return events if plain else None
