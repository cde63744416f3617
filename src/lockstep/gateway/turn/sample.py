"""The sampling stage of a turn: the choices of one worker, whole or in parts as they arrive.

Text that may still become a tag or a tool call is held back. The last part of a choice is returned
after the turn was stored in its session.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from time import time
from typing import NamedTuple

from starlette.requests import Request

from lockstep.fleet.routing.pool import Pool
from lockstep.fleet.worker import Worker
from lockstep.gateway.turn.turn import GatewayTurn, reply_of
from lockstep.http.http_request import unless_gone
from lockstep.protocol.common.response import StreamDelta
from lockstep.protocol.openai.chat_response import ChatReply
from lockstep.render.streaming_parser import MessagePart, StreamingParser
from lockstep.tokens import Completion
from lockstep.tokens.errors import ContractError, Misaligned, MissingFinish


async def sample_turn(http: Request, turn: GatewayTurn, pool: Pool) -> tuple[str, list[ChatReply]]:
    """Sample a turn, store it, and return the worker's id and the replies.

    Raises ClientGone when the client disconnects, and cancels the worker's request with it.
    """

    async def call(worker: Worker) -> tuple[str, list[Completion]]:
        return worker.id, await worker.generate(turn.request)

    async def sample() -> tuple[str, list[ChatReply]]:
        # `call` may run on several workers, one after the other; reading and storing must not be
        # part of it, or an error of the store would eject a healthy worker.
        worker, completions = await pool.run(turn.affinity, call, turn.request)
        replies = [await turn.read(completion) for completion in completions]
        return worker, await turn.commit(replies)

    return await unless_gone(http, sample())


class ChoiceProgress:
    """The tokens of one choice that have arrived, and the parser of its message."""

    def __init__(self, parser: StreamingParser) -> None:
        self.parser = parser
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []

    def add(self, delta: StreamDelta) -> MessagePart:
        """Take new tokens and return the part of the message that they complete."""
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        return self.parser.feed(delta.token_ids)

    def complete(self, completion: Completion) -> None:
        """Take the finished choice. Raises Misaligned unless it starts with what was streamed."""
        count = len(self.token_ids)
        if completion.token_ids[:count] != self.token_ids or (
            len(self.logprobs) == count
            and _as_float32(completion.logprobs[:count]) != _as_float32(self.logprobs)
        ):
            raise Misaligned(
                f"choice {completion.index}: the finished choice does not begin with the {count} "
                "tokens that were streamed"
            )
        self.token_ids, self.logprobs = completion.token_ids, completion.logprobs


def _as_float32(logprobs: list[float]) -> array[float]:
    # Dynamo streams the shortest decimals of 32-bit floats and ends with the same numbers as
    # doubles: -0.12345679 and -0.12345679104328156 are one logprob.
    return array("f", logprobs)


class StreamedPart(NamedTuple):
    """A new part of one choice; with the last part, `end` is the whole reply."""

    choice: int
    part: MessagePart
    end: ChatReply | None = None


class TurnStream:
    """The parts of one turn. `start` waits for the first tokens, `read` yields all parts."""

    def __init__(self, turn: GatewayTurn, pool: Pool) -> None:
        self._turn = turn
        self.worker: str | None = None
        self.first_at: float | None = None
        self.choices = [ChoiceProgress(turn.new_parser()) for _ in range(turn.request.sampling.n)]
        self._items: AsyncGenerator[StreamDelta | Completion, None] = pool.stream(
            turn.affinity, self._open, turn.request
        )
        self._first: StreamDelta | Completion | None = None

    @classmethod
    async def started(cls, http: Request, turn: GatewayTurn, pool: Pool) -> TurnStream:
        """Return the stream once its first tokens have arrived: until then an error still has a
        status. Raises what `start` raises, and ClientGone."""
        stream = cls(turn, pool)
        await unless_gone(http, stream.start())
        return stream

    def _open(self, worker: Worker) -> AsyncIterator[StreamDelta | Completion]:
        self.worker = worker.id
        return worker.stream(self._turn.request)

    async def start(self) -> None:
        """Wait for the first tokens. Raises the error of a worker that fails before them."""
        self._first = await anext(self._items, None)
        self.first_at = time()

    async def read(self) -> AsyncGenerator[StreamedPart, None]:
        """Yield the parts as they arrive. Raises ContractError for a stream that breaks it."""
        completions: list[Completion] = []
        # Closing the items closes the connection to the worker, which then stops sampling.
        async with aclosing(self._items):
            item = self._first
            while item is not None:
                if isinstance(item, Completion):
                    completions.append(item)
                elif part := self._choice(item).add(item):
                    yield StreamedPart(item.index, part)
                item = await anext(self._items, None)
        for part_with_end in await self._finish(completions):
            yield part_with_end

    def _choice(self, delta: StreamDelta) -> ChoiceProgress:
        if not 0 <= delta.index < len(self.choices):
            raise ContractError(
                f"the worker sent tokens of choice {delta.index}, but the request has "
                f"{len(self.choices)} choices"
            )
        return self.choices[delta.index]

    async def _finish(self, completions: list[Completion]) -> list[StreamedPart]:
        """Store the turn and return the last parts: text that was held back, and the replies."""
        if sorted(completion.index for completion in completions) != list(range(len(self.choices))):
            raise MissingFinish(
                f"the stream ended with {len(completions)} of {len(self.choices)} choices finished"
            )
        # All choices are parsed before one is stored: the turn is stored whole or not at all.
        replies, rest = [], {}
        for completion in completions:
            choice = self.choices[completion.index]
            choice.complete(completion)
            parsed, rest[completion.index] = choice.parser.finish(
                completion.token_ids, completion.stop_reason
            )
            replies.append(reply_of(completion, parsed))
        return [
            StreamedPart(reply.completion.index, rest[reply.completion.index], reply)
            for reply in await self._turn.commit(replies)
        ]
