"""Token ids that stay JSON until somebody looks at them: whoever only hands them on need not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

DECODER = msgspec.json.Decoder(list[int])
IN_IDS = b"0123456789, \t\r\n"


class RawIds(Sequence[int]):
    """Reads as the list of plain integers >= 0 that its JSON is; decoded at the first look."""

    __slots__ = ("_ids", "json")

    def __init__(self, json: bytes) -> None:
        self.json = json
        self._ids: list[int] | None = None

    @classmethod
    def of(cls, raw: msgspec.Raw) -> RawIds | None:
        """The ids in valid JSON, or None when it is no list of at least one plain integer >= 0."""
        json = bytes(raw)
        # No sign, no point, no quote, no second list: what is left can only be plain integers.
        if json.translate(None, IN_IDS) != b"[]" or not json.strip(b"[] \t\r\n"):
            return None
        return cls(json)

    def decoded(self) -> list[int]:
        if self._ids is None:
            self._ids = DECODER.decode(self.json)
        return self._ids

    @property
    def raw(self) -> msgspec.Raw:
        """The ids as they came, to be written as they are."""
        return msgspec.Raw(self.json)

    def __len__(self) -> int:
        return self.json.count(b",") + 1 if self._ids is None else len(self._ids)

    def __getitem__(self, at: Any) -> Any:
        return self.decoded()[at]

    def __eq__(self, other: object) -> bool:
        return self.decoded() == (other.decoded() if isinstance(other, RawIds) else other)

    def __hash__(self) -> int:
        return hash(tuple(self.decoded()))
