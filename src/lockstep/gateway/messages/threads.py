"""Threads of Anthropic's messages: conversations that the gateway holds.

A client then sends only its new messages, as the tool runner of Anthropic's SDK does.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from lockstep.protocol.anthropic.messages_request import (
    AnthropicTool,
    Block,
    InputMessage,
    MessagesRequest,
    TextBlock,
)
from lockstep.protocol.anthropic.messages_response import AnthropicMessage
from lockstep.tokens.errors import BadRequest, ThreadNotFound

MOST_THREADS, MOST_CHARACTERS = 4096, 256 << 20
"""Limits of the stored positions of threads and of their messages; the oldest are dropped first,
and the SDK then sends the whole history again.
"""
CREATE_ONLY = ("system", "tools")
"""Fields that a thread keeps from the request that created it."""


@dataclass(frozen=True, slots=True)
class ThreadPosition:
    """The conversation of a thread up to and including one response."""

    messages: list[InputMessage]
    system: str | list[TextBlock] | None
    tools: list[AnthropicTool] | None
    size: int


class MessageThreads:
    """The threads of each owner, which no other owner can continue."""

    def __init__(self, most: int = MOST_THREADS, most_characters: int = MOST_CHARACTERS) -> None:
        self._most, self._most_characters = most, most_characters
        self._positions: OrderedDict[tuple[str, str], ThreadPosition] = OrderedDict()
        self._size = 0

    def resolve(self, owner: str, request: MessagesRequest) -> MessagesRequest:
        """Return the request with the whole conversation of the thread that it continues.

        Raises ThreadNotFound, and BadRequest for a field that only creating a thread sets.
        """
        thread = request.thread
        if thread is None or thread.type == "create":
            return request
        if thread.previous_message_id is None:
            where = "thread.previous_message_id"
            raise BadRequest(f"{where}: Field required", param=where)
        for name in CREATE_ONLY:
            if getattr(request, name) is not None:
                raise BadRequest(
                    f"{name}: a thread keeps what it was created with: leave it out, or create "
                    "another thread",
                    param=name,
                )
        position = self._positions.get((owner, thread.previous_message_id))
        if position is None:
            raise ThreadNotFound(
                f"thread.previous_message_id: no thread of this session ends with "
                f"{thread.previous_message_id!r}: send the whole history in a new thread",
                param="thread.previous_message_id",
            )
        return msgspec.structs.replace(
            request,
            messages=[*position.messages, *request.messages],
            system=position.system,
            tools=position.tools,
        )

    def add(self, owner: str, request: MessagesRequest, response: AnthropicMessage) -> None:
        """Store the position after a response to a resolved request, if that is of a thread."""
        if request.thread is None:
            return
        reply = InputMessage(
            role="assistant", content=msgspec.convert(response.content, list[Block])
        )
        messages = [*request.messages, reply]
        size = sum(len(str(message)) for message in messages)
        self._drop((owner, response.id))
        self._positions[owner, response.id] = ThreadPosition(
            messages, request.system, request.tools, size
        )
        self._size += size
        while len(self._positions) > self._most or self._size > self._most_characters:
            self._drop(next(iter(self._positions)))

    def _drop(self, key: tuple[str, str]) -> None:
        if (position := self._positions.pop(key, None)) is not None:
            self._size -= position.size
