"""The key by which a request is routed: its session, or the first tokens of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from lockstep.protocol.json.lazy_ids import LazyIds

BLOCK = 64
"""Leading tokens come in blocks of this many; what is shorter has no prefix to share."""
BLOCKS = 4
MOST = BLOCK * BLOCKS


@dataclass(frozen=True, slots=True)
class Affinity:
    """Affinity of a request: its session first, else the blocks its prompt starts with.

    `worker` pins it to one worker by id, whatever else holds.
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
        """The affinity of a prompt: the same for requests that could share a cached prefix."""
        if session is not None:
            return cls(session=session, worker=worker)
        named = f"{adapter}\0{salt}\0".encode()
        digest = blake2b(named + _whole_blocks(prompt_ids), digest_size=8).digest()
        return cls(prefix=digest, worker=worker)

    @property
    def key(self) -> bytes:
        """What the rendezvous hash is made of."""
        return self.session.encode() if self.session is not None else self.prefix


def _whole_blocks(prompt_ids: Sequence[int]) -> bytes:
    """The whole blocks that a prompt starts with, as JSON; all of it when it has none."""
    if isinstance(prompt_ids, LazyIds):
        leading = prompt_ids.leading_json(MOST)
        if leading is not None:
            return leading
    head = list(prompt_ids[:MOST])
    whole = len(head) // BLOCK * BLOCK
    return msgspec.json.encode(head[: whole or MOST])[1:-1]
