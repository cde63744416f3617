"""Token ids that stay JSON until they are accessed.

Most ids of a prompt only pass through a gateway, as JSON in and JSON out. Signatures that take such
ids say `Sequence[int]`; `as_list` and `as_json` return the other forms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import msgspec

from lockstep.tokens.errors import BadTokenId

DECODER = msgspec.json.Decoder(list[int])
ENCODER = msgspec.json.Encoder()
IN_IDS = b"0123456789, \t\r\n"


class LazyIds(Sequence[int]):
    """A JSON list of at least one plain integer >= 0, decoded on first access."""

    __slots__ = ("_ids", "json")

    def __init__(self, json: bytes) -> None:
        self.json = json
        self._ids: list[int] | None = None

    @classmethod
    def of(cls, raw: msgspec.Raw) -> LazyIds | None:
        """Wrap the ids in valid JSON; None if it is not a list of at least one plain integer >=
        0.
        """
        json = bytes(raw)
        # No sign, no point, no quote, no second list: the rest can only be plain integers.
        if json.translate(None, IN_IDS) != b"[]" or not json.strip(b"[] \t\r\n"):
            return None
        return cls(json)

    def decoded(self) -> list[int]:
        """Return the ids as a list. Raises BadTokenId for a number that is too long."""
        if self._ids is None:
            try:
                self._ids = DECODER.decode(self.json)
            except msgspec.ValidationError as error:
                raise BadTokenId(f"no token has such an id: {error}", param="token_ids") from None
        return self._ids

    def leading_json(self, count: int) -> bytes | None:
        """Return the first `count` ids as JSON without brackets or space; None if there are not
        more.
        """
        pieces = self.json.lstrip()[1:].split(b",", count)
        return b"".join(b",".join(pieces[:count]).split()) if len(pieces) > count else None

    def __len__(self) -> int:
        return self.json.count(b",") + 1 if self._ids is None else len(self._ids)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        return self.decoded()[at]

    def __eq__(self, other: object) -> bool:
        return self.decoded() == (other.decoded() if isinstance(other, LazyIds) else other)

    def __hash__(self) -> int:
        return hash(tuple(self.decoded()))


def as_list(ids: Sequence[int]) -> list[int]:
    """Return the ids as a list, without a copy if they are one."""
    if isinstance(ids, list):
        return ids
    return ids.decoded() if isinstance(ids, LazyIds) else list(ids)


def as_json(ids: Sequence[int]) -> msgspec.Raw:
    """Return the ids as JSON for an encoder, unchanged if they are JSON already."""
    return msgspec.Raw(ids.json if isinstance(ids, LazyIds) else ENCODER.encode(as_list(ids)))


class PlannedIds(LazyIds):
    """Ids of a prompt: JSON as a whole, and as a list those after the previous turn."""

    __slots__ = ("added", "start")

    def __init__(self, json: bytes, start: int, added: list[int]) -> None:
        super().__init__(json)
        self.start = start
        self.added = added

    def __len__(self) -> int:
        return self.start + len(self.added)

    def __iter__(self) -> Iterator[int]:
        return iter(self.decoded())

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice) and at.step is None:
            first, last, _ = at.indices(len(self))
            if first >= self.start:
                return self.added[first - self.start : max(last - self.start, 0)]
        return self.decoded()[at]
