"""Caches of a session's last turn, so that the next one reads and encodes only what is new.

They hold the messages as read, and the prompt's ids as JSON.
"""

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
"""Histories shorter than this are re-encoded (about 1 ms) instead of cached."""


@dataclass(frozen=True, slots=True)
class ReadMessages:
    """Messages in the forms to render and to compare. `json` is their source without the closing
    bracket, or empty if unknown.
    """

    plain: tuple[Plain, ...] = ()
    history: tuple[Message, ...] = ()
    json: bytes = b""


class ReadHistory:
    """The messages of the last request of a session.

    A client sends its history again with every turn, mostly unchanged. It is recognised by its
    bytes only: if one byte differs, all of it is read and compared again.
    """

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept = ReadMessages()

    @property
    def nbytes(self) -> int:
        return len(self._kept.json)

    def known(self, messages: Iterable[Any]) -> ReadMessages:
        """Return the cached messages that these begin with, and the JSON of all. Messages must be
        as decoded from JSON: other values may be encoded alike without being equal.
        """
        json = _written(messages)
        last = self._kept
        # A comma or the bracket: the last message ends there in both.
        if last.json and json.startswith(last.json) and json[len(last.json)] in b",]":
            return ReadMessages(last.plain, last.history, json[:-1])
        return ReadMessages(json=json[:-1])

    def keep(self, json: bytes, plain: Iterable[Plain], history: tuple[Message, ...]) -> None:
        """Cache messages as read from that JSON."""
        self._kept = ReadMessages(tuple(plain), history, json) if json else ReadMessages()


def _written(messages: Iterable[Any]) -> bytes:
    """Return the messages as JSON; empty if they are too long or cannot be encoded."""
    if not isinstance(messages, list):
        return b""
    contents = [message.get("content") for message in messages if type(message) is dict]
    if sum([len(text) for text in contents if type(text) is str]) > CHARACTERS:
        return b""
    try:
        return ENCODER.encode(messages)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return b""  # unreadable, or half a surrogate pair: another check reports it


class IdJsonCache:
    """JSON of the branch that was used last, without the closing bracket."""

    __slots__ = ("_json", "_node")

    def __init__(self) -> None:
        self._node: Node | None = None
        self._json = b""

    @property
    def nbytes(self) -> int:
        return len(self._json)

    def prompt(self, node: Node, added: list[int]) -> PlannedIds:
        """Return the ids of all turns up to this one, followed by those of `added`."""
        json = b"".join((self._upto(node), b",", ENCODER.encode(added)[1:]))
        return PlannedIds(json, node.end, added)

    def _upto(self, node: Node) -> bytes:
        new: list[Node] = []
        at: Node | None = node
        while at is not None and at is not self._node:
            new.append(at)
            at = at.parent
        # A branch that leaves the cached one, or starts over, is encoded from its first id on.
        parts = [self._json if at is not None else b""]
        for turn in reversed(new):
            parts += (ENCODER.encode(ids.tolist())[1:-1] for ids in (turn.prompt, turn.sampled))
        joined = b",".join(filter(None, parts))
        self._node, self._json = node, joined if joined.startswith(b"[") else b"[" + joined
        return self._json
