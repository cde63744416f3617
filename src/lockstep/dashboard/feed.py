"""The event stream: changes since the last event, computed once for all viewers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from time import time

import msgspec

log = logging.getLogger(__name__)
TICK_SECONDS = 0.5
QUIET_SECONDS = 15.0
"""Time without a change after which a comment is sent, so that viewers see that the server is
alive.
"""
MOST_VIEWERS = 64

Parts = Mapping[str, Mapping[str, msgspec.Struct] | msgspec.Struct | None]
Encoded = dict[str, dict[str, bytes] | bytes]


class Feed:
    """Feed of changes. It calls `read` at every tick, only while there are viewers.

    A part that is a mapping is sent row by row, only the rows that changed; a removed row is null.
    A slow viewer skips states but loses no change: it gets the difference from the state it was
    last sent.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[Parts]],
        stop: asyncio.Event,
        seconds: float = TICK_SECONDS,
    ) -> None:
        self._read, self._stop, self._seconds = read, stop, seconds
        self._frame: Encoded = {}
        self._ticking: asyncio.Task[None] | None = None
        self._ticked = asyncio.Event()
        self.viewers = 0

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Yield events: the whole state, then changes, until the server stops."""
        self.viewers += 1
        try:
            if self._ticking is None:
                self._ticking = asyncio.create_task(self._tick())
            sent: dict[tuple[str, str], bytes] = {}
            quiet = 0.0
            while not self._stop.is_set():
                ticked = self._ticked
                if changed := _changed(self._frame, sent):
                    quiet = 0.0
                    yield b'data: {"at":%.3f,%b}\n\n' % (time(), changed)
                elif quiet >= QUIET_SECONDS:
                    quiet = 0.0
                    yield b": nothing new\n\n"
                quiet += self._seconds
                await ticked.wait()
                if self._ticking is None:
                    return  # the viewer reconnects
        finally:
            self.viewers -= 1
            if not self.viewers:
                if self._ticking is not None:
                    self._ticking.cancel()
                self._ticking, self._frame = None, {}

    async def _tick(self) -> None:
        try:
            while not self._stop.is_set():
                await self._look()
                self._wake()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), self._seconds)
        except Exception:
            log.exception("the dashboard could not be updated")
        finally:
            if self._ticking is asyncio.current_task():
                self._ticking = None
                self._wake()

    def _wake(self) -> None:
        ticked, self._ticked = self._ticked, asyncio.Event()
        ticked.set()

    async def _look(self) -> None:
        """Encode changed parts; unchanged parts keep their bytes, by which viewers recognize
        them.
        """
        frame: Encoded = {}
        for name, part in (await self._read()).items():
            before = self._frame.get(name)
            if isinstance(part, Mapping):
                earlier_rows = before if isinstance(before, dict) else {}
                frame[name] = {key: _same(earlier_rows.get(key), row) for key, row in part.items()}
            else:
                frame[name] = _same(before if isinstance(before, bytes) else None, part)
        self._frame = frame


def _same(before: bytes | None, now: msgspec.Struct | None) -> bytes:
    encoded = msgspec.json.encode(now)
    return before if before == encoded else encoded


def _changed(frame: Encoded, sent: dict[tuple[str, str], bytes]) -> bytes:
    """Return the parts that differ from what was sent, as the inside of a JSON object."""
    parts = []
    for name, part in frame.items():
        if isinstance(part, bytes):
            if sent.get((name, "")) is not part:
                sent[name, ""] = part
                parts.append(b'"%b":%b' % (name.encode(), part))
            continue
        rows = []
        for key, row in part.items():
            if sent.get((name, key)) is not row:
                sent[name, key] = row
                rows.append(b"%b:%b" % (msgspec.json.encode(key), row))
        for gone in [at for at in sent if at[0] == name and at[1] not in part]:
            del sent[gone]
            rows.append(msgspec.json.encode(gone[1]) + b":null")
        if rows:
            parts.append(b'"%b":{%b}' % (name.encode(), b",".join(rows)))
    return b",".join(parts)
