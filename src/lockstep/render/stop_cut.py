"""Truncation of a completion's text at the stop string that ended it; its ids stay complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lockstep.render.parsed_message import ParsedMessage

TokenData = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class StopCut:
    """The ids entirely before the cut, and the remaining text of the token that it splits."""

    ids: list[int]
    text: str


def cut_at_stop(ids: Sequence[int], stop: str, data: TokenData, *, include: bool) -> StopCut | None:
    """Return the cut in the text of ids whose last one completed `stop`; None if not in the text.

    The cut is before the stop string, or with `include` after it.
    """
    pieces = [data(token) for token in ids]
    text, wanted = b"".join(pieces), stop.encode()
    before = len(text) - (len(pieces[-1]) if pieces else 0)
    at = text.find(wanted, max(0, before - len(wanted) + 1))
    if at < 0:
        return None
    end, whole, size = at + len(wanted) * include, 0, 0
    while whole < len(pieces) and size + len(pieces[whole]) <= end:
        size += len(pieces[whole])
        whole += 1
    return StopCut(list(ids[:whole]), text[size:end].decode(errors="replace"))


def with_tail(message: ParsedMessage, before: str, tail: str) -> ParsedMessage:
    """Return the message with more text at its end; `before` is the text it was parsed from."""
    if not tail.strip():
        return message
    space = before[len(before.rstrip()) :]
    if message.reasoning_complete is False:
        reasoning = message.reasoning or ""
        return replace(message, reasoning=f"{reasoning}{space if reasoning else ''}{tail}".strip())
    content = message.content
    return replace(message, content=f"{content}{space if content else ''}{tail}".strip())


class HeldTokens:
    """Buffer that holds back tokens while their text may belong to a stop string."""

    def __init__(self, stops: Sequence[str], data: TokenData) -> None:
        self._stops = [stop.encode() for stop in stops]
        self._data = data
        self._ids: list[int] = []
        self._pieces: list[bytes] = []

    def feed(self, ids: Sequence[int]) -> list[int]:
        """Return the tokens that no stop string can cut any more."""
        if not self._stops:
            return list(ids)
        self._ids += ids
        self._pieces += map(self._data, ids)
        start, end, count = self._start(b"".join(self._pieces)), 0, 0
        while count < len(self._ids) and end + len(self._pieces[count]) <= start:
            end += len(self._pieces[count])
            count += 1
        released, self._ids, self._pieces = (
            self._ids[:count],
            self._ids[count:],
            self._pieces[count:],
        )
        return released

    def _start(self, text: bytes) -> int:
        """Return where the first stop string begins, or may begin."""
        start = len(text)
        for stop in self._stops:
            at = text.find(stop)
            if at < 0:
                sizes = range(min(len(stop) - 1, len(text)), 0, -1)
                held = next((size for size in sizes if text.endswith(stop[:size])), 0)
                at = len(text) - held
            start = min(start, at)
        return start
