"""Stop strings: detection in a growing text, and the text that remains visible."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A completed stop string; the last `tokens` tokens contain part of it."""

    stop: str
    tokens: int


class StopMatcher:
    """Search for stop strings in the bytes of tokens as they arrive."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, stop.encode()) for stop in stops]
        self._longest = max(len(data) for _, data in self._stops)
        self._tail = b""
        self._sizes: deque[int] = deque()

    def feed(self, data: bytes) -> StopMatch | None:
        """Return the stop string that this token completes, the one that starts first; else
        None.
        """
        # A match can include at most one byte less than the longest stop string of the earlier
        # text.
        tail = self._tail[-(self._longest - 1) :] if self._longest > 1 else b""
        text = tail + data
        self._sizes.append(len(data))
        self._tail = text
        total = sum(self._sizes)
        while self._sizes and total - self._sizes[0] >= len(text):
            total -= self._sizes.popleft()
        matches = [
            (at, -len(wanted), stop)
            for stop, wanted in self._stops
            # A match must end in the new token: earlier text was searched already.
            if (at := text.find(wanted, max(0, len(tail) - len(wanted) + 1))) >= 0
        ]
        if not matches:
            return None
        at, _, stop = min(matches)
        return StopMatch(stop, self._tokens_from(len(text) - at))

    def _tokens_from(self, size: int) -> int:
        """Return how many of the last tokens contain the last `size` bytes."""
        count = covered = 0
        for data in reversed(self._sizes):
            if covered >= size:
                break
            covered += data
            count += 1
        return count


class HeldText:
    """Buffer that holds back the end of a growing text while it may belong to a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def feed(self, text: str) -> str:
        """Return the text that can be shown now: no stop string can cut it any more."""
        if not text:  # a token without text changes nothing
            return ""
        held = self._held + text
        start = len(held)
        for stop in self._stops:
            at = held.find(stop, max(0, len(held) - len(text) - len(stop) + 1))
            if at >= 0:
                start = min(start, at)
            for size in range(min(len(stop) - 1, len(held)), 0, -1):
                if held.endswith(stop[:size]):
                    start = min(start, len(held) - size)
                    break
        self._held = held[start:]
        return held[:start]

    def finish(self, stop: str | None, *, include: bool = False) -> str:
        """Return the rest, cut at the stop string that ended the text, if any."""
        held, self._held = self._held, ""
        at = -1 if stop is None else held.find(stop)
        if stop is None or at < 0:
            return held
        return held[: at + len(stop) * include]
