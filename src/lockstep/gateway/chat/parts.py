"""A turn as it is sampled: the parts of its message, whatever dialect they are written in.

Text that may still turn out to be a tag or a tool call is held back. The last part of each choice
comes after the turn was stored in its session.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from time import time
from typing import NamedTuple

from lockstep.fleet.routing.pool import Pool
from lockstep.fleet.worker import Worker
from lockstep.gateway.chat.turn import ChatTurn, reply
from lockstep.protocol.common.response import StreamDelta
from lockstep.protocol.openai.chat_response import ChatReply
from lockstep.render.streaming_parser import MessagePart, StreamingParser
from lockstep.tokens import Completion
from lockstep.tokens.errors import ContractError, Misaligned, MissingFinish


class ChoiceProgress:
    """The tokens of one choice that were received so far, and their message."""

    def __init__(self, parser: StreamingParser) -> None:
        self.parser = parser
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []

    def add(self, delta: StreamDelta) -> MessagePart:
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        return self.parser.feed(delta.token_ids)

    def complete(self, completion: Completion) -> None:
        """Takes the finished choice. Raises Misaligned unless it begins as it was streamed."""
        count = len(self.token_ids)
        if completion.token_ids[:count] != self.token_ids or (
            len(self.logprobs) == count and completion.logprobs[:count] != self.logprobs
        ):
            raise Misaligned(
                f"choice {completion.index}: the finished choice does not begin with the {count} "
                "tokens that were streamed"
            )
        self.token_ids, self.logprobs = completion.token_ids, completion.logprobs


class StreamedPart(NamedTuple):
    """What is new of one choice; `end` is the whole of it, with its last part only."""

    choice: int
    part: MessagePart
    end: ChatReply | None = None


class PartStream:
    """The parts of one turn: `start` waits for the first tokens, `read` yields all of them."""

    def __init__(self, turn: ChatTurn, pool: Pool) -> None:
        self._turn = turn
        self.worker: str | None = None
        self.first_at: float | None = None
        self.choices = [ChoiceProgress(turn.new_parser()) for _ in range(turn.request.sampling.n)]
        self._items: AsyncGenerator[StreamDelta | Completion, None] = pool.stream(
            turn.affinity, self._open
        )
        self._first: StreamDelta | Completion | None = None

    def _open(self, worker: Worker) -> AsyncIterator[StreamDelta | Completion]:
        self.worker = worker.id
        return worker.stream(self._turn.request)

    async def start(self) -> None:
        """Returns with the first tokens. Raises the error of a worker that fails before them."""
        self._first = await anext(self._items, None)
        self.first_at = time()

    async def read(self) -> AsyncGenerator[StreamedPart, None]:
        """The parts as they come. Raises ContractError for a stream that breaks the contract."""
        completions: list[Completion] = []
        async with aclosing(self._items):
            item = self._first
            while item is not None:
                if isinstance(item, Completion):
                    completions.append(item)
                elif part := self._choice(item).add(item):
                    yield StreamedPart(item.index, part)
                item = await anext(self._items, None)
        for ended in await self._ended(completions):
            yield ended

    def _choice(self, delta: StreamDelta) -> ChoiceProgress:
        if not 0 <= delta.index < len(self.choices):
            raise ContractError(
                f"the worker sent tokens of choice {delta.index}, but the request has "
                f"{len(self.choices)} choices"
            )
        return self.choices[delta.index]

    async def _ended(self, completions: list[Completion]) -> list[StreamedPart]:
        """The last parts: text that was held back, and the whole choices."""
        if sorted(one.index for one in completions) != list(range(len(self.choices))):
            raise MissingFinish(
                f"the stream ended with {len(completions)} of {len(self.choices)} choices finished"
            )
        replies, rest = [], {}
        for completion in completions:
            choice = self.choices[completion.index]
            choice.complete(completion)
            parsed, rest[completion.index] = choice.parser.finish(
                completion.token_ids, completion.stop_reason
            )
            replies.append(reply(completion, parsed))
        return [
            StreamedPart(each.completion.index, rest[each.completion.index], each)
            for each in await self._turn.commit(replies)
        ]
