"""Responses that can be gone on from, or be read again, by their id."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from lockstep.protocol.openai.responses_response import ResponseObject
from lockstep.render.messages import Plain
from lockstep.tokens.errors import NotFound

MOST = 4096
MOST_CHARACTERS = 256 << 20
"""Responses that are kept, and characters of their conversations; the oldest leave first."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and its conversation up to and with what it said; instructions left out."""

    body: ResponseObject
    messages: list[Plain]
    size: int


class StoredResponses:
    """The responses of each owner, in memory; nobody finds those of another."""

    def __init__(self, most: int = MOST, most_characters: int = MOST_CHARACTERS) -> None:
        self._most, self._most_characters = most, most_characters
        self._kept: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._size = 0

    def keep(self, owner: str, body: ResponseObject, messages: list[Plain]) -> None:
        size = sum(len(str(message)) for message in messages)
        self._drop((owner, body.id))
        self._kept[owner, body.id] = StoredResponse(body, messages, size)
        self._size += size
        while len(self._kept) > self._most or self._size > self._most_characters:
            self._drop(next(iter(self._kept)))

    def find(self, owner: str, response_id: str) -> StoredResponse | None:
        return self._kept.get((owner, response_id))

    def require(self, owner: str, response_id: str) -> StoredResponse:
        """The response of that id. Raises NotFound."""
        kept = self.find(owner, response_id)
        if kept is None:
            raise NotFound(f"Response with id '{response_id}' not found.", param="response_id")
        return kept

    def delete(self, owner: str, response_id: str) -> None:
        """Forgets a response. Raises NotFound."""
        self.require(owner, response_id)
        self._drop((owner, response_id))

    def _drop(self, key: tuple[str, str]) -> None:
        if (kept := self._kept.pop(key, None)) is not None:
            self._size -= kept.size
