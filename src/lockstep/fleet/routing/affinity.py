"""The key by which a request is routed: its session, or the first tokens of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from lockstep.protocol.json.lazy_ids import LazyIds

BLOCK = 64
"""Tokens of a block. Prompts are compared by whole blocks; a shorter prompt shares no prefix."""
BLOCKS = 4
MOST = BLOCK * BLOCKS


@dataclass(frozen=True, slots=True)
class Affinity:
    """The routing key of a request: its session, or the blocks that its prompt starts with.

    `worker` pins the request to one worker by id.
    """

    session: str | None = None
    prefix: bytes = b""
    worker: str | None = None

    @classmethod
    def of(
        cls,
        prompt_ids: Sequence[int],
        *,
        session: str | None = None,
        salt: str | None = None,
        adapter: str | None = None,
        worker: str | None = None,
    ) -> Affinity:
        """Return the affinity of a prompt: equal for requests that could share a cached prefix."""
        if session is not None:
            return cls(session=session, worker=worker)
        named = f"{adapter}\0{salt}\0".encode()
        digest = blake2b(named + _whole_blocks(prompt_ids), digest_size=8).digest()
        return cls(prefix=digest, worker=worker)

    @property
    def key(self) -> bytes:
        """Input of the rendezvous hash."""
        return self.session.encode() if self.session is not None else self.prefix


def _whole_blocks(prompt_ids: Sequence[int]) -> bytes:
    """Return the whole blocks that a prompt starts with, as JSON; the entire prompt if it has
    none."""
    if isinstance(prompt_ids, LazyIds):
        leading = prompt_ids.leading_json(MOST)
        if leading is not None:
            return leading
    head = list(prompt_ids[:MOST])
    whole = len(head) // BLOCK * BLOCK
    return msgspec.json.encode(head[: whole or MOST])[1:-1]
