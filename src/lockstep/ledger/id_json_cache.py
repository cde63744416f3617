"""Keeps the ids of a conversation as JSON, so that a turn encodes only the ids it adds."""

from __future__ import annotations

import msgspec

from lockstep.ledger.tree import Node
from lockstep.protocol.json.lazy_ids import PlannedIds

ENCODER = msgspec.json.Encoder()


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
