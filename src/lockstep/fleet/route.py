"""What decides which worker gets a request."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

BLOCK = 64
"""Leading tokens come in blocks of this many; what is shorter has no prefix to share."""
BLOCKS = 4


@dataclass(frozen=True, slots=True)
class Route:
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
    ) -> Route:
        """The route of a prompt. Requests that could share a cached prefix get the same one."""
        if session is not None:
            return cls(session=session, worker=worker)
        whole = min(len(prompt_ids) // BLOCK, BLOCKS) * BLOCK
        head = array("i", prompt_ids[: whole or len(prompt_ids)]).tobytes()
        named = f"{adapter}\0{salt}\0".encode()
        return cls(prefix=blake2b(named + head, digest_size=8).digest(), worker=worker)

    @property
    def key(self) -> bytes:
        """What the rendezvous hash is made of."""
        return self.session.encode() if self.session is not None else self.prefix
