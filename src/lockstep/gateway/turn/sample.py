"""The sampling stage of a turn: the choices of one worker, whole or in parts as they arrive.

Text that may still become a tag or a tool call is held back. The last part of a choice is returned
after the turn was stored in its session.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from time import time
from typing import NamedTuple

from starlette.requests import Request

from lockstep.fleet.routing.pool import Pool
from lockstep.fleet.worker import Worker
from lockstep.gateway.turn.cut import is_cut, keep_cut
from lockstep.gateway.turn.progress import ChoiceProgress
from lockstep.gateway.turn.turn import GatewayTurn, reply_of
from lockstep.http.http_request import unless_gone
from lockstep.protocol.common.response import StreamDelta
from lockstep.protocol.openai.chat_response import ChatReply
from lockstep.render.streaming_parser import MessagePart
from lockstep.tokens import Completion
from lockstep.tokens.errors import WORKER_FAILURES, ContractError, MissingFinish, Unavailable

log = logging.getLogger(__name__)
RESTARTS = 2
"""How often a turn is sampled again after a failure of its worker before the client got content."""


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


class StreamedPart(NamedTuple):
    """A new part of one choice; with the last part, `end` is the whole reply."""

    choice: int
    part: MessagePart
    end: ChatReply | None = None


class TurnStream:
    """The parts of one turn. `start` waits for the first tokens, `read` yields all parts.

    A worker that fails before the first part is replaced, and the turn sampled again: the client
    notices nothing. What had arrived of a turn that is cut is stored in its session as aborted.
    """

    def __init__(self, turn: GatewayTurn, pool: Pool) -> None:
        self._turn, self._pool = turn, pool
        self._worker: Worker | None = None
        self._mark = 0
        self._restarts = self._lost = 0
        self._stored = False
        self.first_at: float | None = None
        self._first: StreamDelta | Completion | None = None
        self.choices: list[ChoiceProgress] = []
        self._items = self._sample()

    @property
    def worker(self) -> str | None:
        """The id of the worker that samples the turn, once one was chosen."""
        return None if self._worker is None else self._worker.id

    @classmethod
    async def started(cls, http: Request, turn: GatewayTurn, pool: Pool) -> TurnStream:
        """Return the stream once its first tokens have arrived: until then an error still has a
        status. Raises what `start` raises, and ClientGone."""
        stream = cls(turn, pool)
        await unless_gone(http, stream.start())
        return stream

    def _sample(self) -> AsyncGenerator[StreamDelta | Completion, None]:
        turn = self._turn
        # In place: the writer of a dialect holds the list.
        self.choices[:] = [
            ChoiceProgress(turn.new_parser()) for _ in range(turn.request.sampling.n)
        ]
        return self._pool.stream(turn.affinity, self._open, turn.request, deaths=self._lost)

    def _open(self, worker: Worker) -> AsyncIterator[StreamDelta | Completion]:
        self._worker, self._mark = worker, worker.accepted.mark()
        return worker.stream(self._turn.request)

    async def start(self) -> None:
        """Wait for the first tokens. Raises the error of a worker that fails before them."""
        self._first = await anext(self._items, None)
        self.first_at = time()

    async def read(self) -> AsyncGenerator[StreamedPart, None]:
        """Yield the parts as they arrive. Raises ContractError for a stream that breaks it."""
        sent = False
        while True:
            completions: list[Completion] = []
            try:
                # Closing the items closes the connection to the worker, which then stops sampling.
                async with aclosing(self._items):
                    item = self._first
                    while item is not None:
                        if isinstance(item, Completion):
                            completions.append(item)
                        elif part := self._choice(item).add(item):
                            sent = True
                            yield StreamedPart(item.index, part)
                        item = await anext(self._items, None)
                parts = await self._finish(completions)
                break
            except BaseException as error:
                if is_cut(error) and not self._stored:
                    self._keep(completions, error)
                if sent or not await self._restart(error):
                    raise
        for part_with_end in parts:
            yield part_with_end

    def _keep(self, completions: list[Completion], error: BaseException) -> None:
        worker = self._worker
        version = None if worker is None else worker.accepted.throughout(self._mark)
        finished = {completion.index: completion for completion in completions}
        keep_cut(self._turn, self.choices, finished, version, error)

    async def _restart(self, error: BaseException) -> bool:
        """Start to sample the turn again, if its worker failed in a way that another may not."""
        if not isinstance(error, WORKER_FAILURES) or self._stored:
            return False
        if self._restarts >= RESTARTS:
            return False
        self._restarts += 1
        self._lost += isinstance(error, Unavailable)
        log.warning(
            "turn %s: sampled again, as its worker failed before any content: %s",
            self._turn.id, error,
        )  # fmt: skip
        self._items = self._sample()
        self._first = await anext(self._items, None)
        return True

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
            for reply in await self._commit(replies)
        ]

    async def _commit(self, replies: list[ChatReply]) -> list[ChatReply]:
        # Cancelling the commit does not undo its write: from here on the turn is not cut.
        self._stored = True
        return await self._turn.commit(replies)
