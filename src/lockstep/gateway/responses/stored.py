"""Responses in memory, which clients continue or read again by their id."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from lockstep.protocol.openai.responses_response import Fields, ResponseObject
from lockstep.render.messages import Plain
from lockstep.tokens.errors import NotFound

MOST_RESPONSES, MOST_CHARACTERS = 4096, 256 << 20
"""Limits of the stored responses and of their conversations; the oldest are dropped first."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and its conversation including its own output, without the instructions."""

    body: ResponseObject
    messages: list[Plain]
    size: int


class StoredResponses:
    """The responses of each owner, which no other owner can read."""

    def __init__(self, most: int = MOST_RESPONSES, most_characters: int = MOST_CHARACTERS) -> None:
        self._most, self._most_characters = most, most_characters
        self._responses: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._items: dict[tuple[str, str], tuple[str, Fields]] = {}
        """The response and the output item, by owner and id of the item."""
        self._size = 0

    def add(self, owner: str, body: ResponseObject, messages: list[Plain]) -> None:
        """Store a response, and drop the oldest ones past a limit."""
        size = sum(len(str(message)) for message in messages)
        self._drop((owner, body.id))
        self._responses[owner, body.id] = StoredResponse(body, messages, size)
        self._items.update({(owner, item["id"]): (body.id, item) for item in body.output})
        self._size += size
        while len(self._responses) > self._most or self._size > self._most_characters:
            self._drop(next(iter(self._responses)))

    def find(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return the owner's response of that id, or None."""
        return self._responses.get((owner, response_id))

    def find_item(self, owner: str, item_id: str) -> Fields | None:
        """Return the output item of that id in the owner's responses, or None."""
        return self._items.get((owner, item_id), (None, None))[1]

    def require(self, owner: str, response_id: str) -> StoredResponse:
        """Return the owner's response of that id. Raises NotFound."""
        stored = self.find(owner, response_id)
        if stored is None:
            raise NotFound(f"Response with id '{response_id}' not found.", param="response_id")
        return stored

    def delete(self, owner: str, response_id: str) -> None:
        """Delete a response. Raises NotFound."""
        self.require(owner, response_id)
        self._drop((owner, response_id))

    def _drop(self, key: tuple[str, str]) -> None:
        if (stored := self._responses.pop(key, None)) is None:
            return
        self._size -= stored.size
        owner, response_id = key
        for item in stored.body.output:
            place = owner, item["id"]
            if place in self._items and self._items[place][0] == response_id:
                del self._items[place]
