"""What a session keeps of its last turn, so that the next one reads and encodes only what is new:
the messages as they were read, and the prompt's ids as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from lockstep.ledger.tree import Node
from lockstep.protocol.json.lazy_ids import PlannedIds
from lockstep.render.messages import Message, Plain

ENCODER = msgspec.json.Encoder()
CHARACTERS = 1 << 20
"""Of text up to which messages are written as JSON again: a millisecond."""


@dataclass(frozen=True, slots=True)
class ReadMessages:
    """Messages that were read, to render and to compare. `json` is what they were read from,
    without the closing bracket, and empty where that is not known."""

    plain: tuple[Plain, ...] = ()
    history: tuple[Message, ...] = ()
    json: bytes = b""


class ReadHistory:
    """The messages of the last request of a session.

    A client sends its history again with every turn, and most send it as it was. It is known by
    its bytes and nothing less: where one differs, all of it is read and compared as ever.
    """

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept = ReadMessages()

    @property
    def nbytes(self) -> int:
        return len(self._kept.json)

    def known(self, messages: Iterable[Any]) -> ReadMessages:
        """Those that these messages begin with, and the JSON of all. Messages must be as decoding
        JSON gives them: other values may be written alike and not be the same."""
        json = _written(messages)
        kept = self._kept
        # A comma or the bracket: there the last message ends in both.
        if kept.json and json.startswith(kept.json) and json[len(kept.json)] in b",]":
            return ReadMessages(kept.plain, kept.history, json[:-1])
        return ReadMessages(json=json[:-1])

    def keep(self, json: bytes, plain: Iterable[Plain], history: tuple[Message, ...]) -> None:
        """Keeps messages as they were read from that JSON."""
        self._kept = ReadMessages(tuple(plain), history, json) if json else ReadMessages()


def _written(messages: Iterable[Any]) -> bytes:
    """Empty for what is too much to be written here, or cannot be."""
    if not isinstance(messages, list):
        return b""
    contents = [message.get("content") for message in messages if type(message) is dict]
    if sum([len(text) for text in contents if type(text) is str]) > CHARACTERS:
        return b""
    try:
        return ENCODER.encode(messages)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return b""  # nothing that can be read, or half a surrogate pair: not for this to say


class IdJsonCache:
    """The JSON of the branch that was used last, without the closing bracket."""

    __slots__ = ("_json", "_node")

    def __init__(self) -> None:
        self._node: Node | None = None
        self._json = b""

    @property
    def nbytes(self) -> int:
        return len(self._json)

    def prompt(self, node: Node, added: list[int]) -> PlannedIds:
        """The ids of all turns up to this one, and then those of `added`."""
        json = b"".join((self._upto(node), b",", ENCODER.encode(added)[1:]))
        return PlannedIds(json, node.end, added)

    def _upto(self, node: Node) -> bytes:
        new: list[Node] = []
        at: Node | None = node
        while at is not None and at is not self._node:
            new.append(at)
            at = at.parent
        # A branch that leaves the kept one, or begins anew, is written from its first id on.
        parts = [self._json if at is not None else b""]
        for each in reversed(new):
            parts += (ENCODER.encode(ids.tolist())[1:-1] for ids in (each.prompt, each.sampled))
        joined = b",".join(filter(None, parts))
        self._node, self._json = node, joined if joined.startswith(b"[") else b"[" + joined
        return self._json
