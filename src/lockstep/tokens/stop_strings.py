"""Stop strings: where one is complete in a growing text, and what of the text is then shown."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that is complete; the last `tokens` tokens hold part of it."""

    stop: str
    tokens: int


class StopMatcher:
    """Looks for stop strings in the bytes of tokens as they come; text before it does not count."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, stop.encode()) for stop in stops]
        self._longest = max(len(data) for _, data in self._stops)
        self._tail = b""
        self._sizes: deque[int] = deque()

    def feed(self, data: bytes) -> StopMatch | None:
        """The stop string that this token completes, the one that begins first; else None."""
        # Of what came before, no more can belong to a match than one byte less than the longest.
        kept = self._tail[-(self._longest - 1) :] if self._longest > 1 else b""
        text = kept + data
        self._sizes.append(len(data))
        self._tail = text
        total = sum(self._sizes)
        while self._sizes and total - self._sizes[0] >= len(text):
            total -= self._sizes.popleft()
        matches = [
            (at, -len(wanted), stop)
            for stop, wanted in self._stops
            # A match must end in the new token: one that was passed over stays so.
            if (at := text.find(wanted, max(0, len(kept) - len(wanted) + 1))) >= 0
        ]
        if not matches:
            return None
        at, _, stop = min(matches)
        return StopMatch(stop, self._tokens_from(len(text) - at))

    def _tokens_from(self, size: int) -> int:
        """How many of the last tokens it takes to have the last `size` bytes."""
        count = covered = 0
        for each in reversed(self._sizes):
            if covered >= size:
                break
            covered += each
            count += 1
        return count


def text_before_stop(pieces: Sequence[bytes], stop: str, *, include: bool = False) -> str:
    """The text of tokens of which the last completed `stop`, cut where that begins.

    With `include` it is cut where the stop string ends.
    """
    text, wanted = b"".join(pieces), stop.encode()
    before = len(text) - (len(pieces[-1]) if pieces else 0)
    at = text.find(wanted, max(0, before - len(wanted) + 1))
    if at < 0:  # a special token that is not part of the text
        return text.decode(errors="replace")
    return text[: at + len(wanted) * include].decode(errors="replace")


class HeldText:
    """Holds back the end of a growing text as long as it may belong to a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def feed(self, text: str) -> str:
        """What can be shown now: all that no stop string can cut any more."""
        if not text:  # a token without text has not passed over anything
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
        """The rest, cut at the stop string that ended the text, if one did."""
        held, self._held = self._held, ""
        at = -1 if stop is None else held.find(stop)
        if stop is None or at < 0:
            return held
        return held[: at + len(stop) * include]
