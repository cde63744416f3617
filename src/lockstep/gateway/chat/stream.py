"""A streamed chat response: its chunks add up to the whole response, token for token.

Text that may still turn out to be a tag or a tool call is held back, and its tokens and logprobs
with it. The last chunk of each choice comes after the turn was stored in its session.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from time import time
from typing import Any

from lockstep.fleet.routing.pool import Pool
from lockstep.fleet.worker import Worker
from lockstep.gateway.chat.turn import ChatTurn, reply
from lockstep.http import sse
from lockstep.protocol.common.lazy_ids import as_list
from lockstep.protocol.common.response import StreamDelta
from lockstep.protocol.dynamo.nvext import NvextResponse
from lockstep.protocol.openai import chat_response as wire
from lockstep.protocol.vllm.generate_response import usage_of
from lockstep.render.streaming_parser import MessagePart, StreamingParser
from lockstep.tokens import Completion
from lockstep.tokens.errors import ContractError, Misaligned, MissingFinish


class _Progress:
    """The state of one choice: the tokens received so far, and how many were sent on."""

    def __init__(self, parser: StreamingParser) -> None:
        self.parser = parser
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.sent = 0
        self.scored = 0
        self.calls = 0

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


class ChatStream:
    """The events of one turn: `start` waits for the first tokens, `events` yields all of them."""

    def __init__(self, turn: ChatTurn, pool: Pool) -> None:
        self._turn = turn
        self._shape = turn.shape
        self._worker: str | None = None
        self._items: AsyncGenerator[StreamDelta | Completion, None] = pool.stream(
            turn.affinity, self._open
        )
        self._first: StreamDelta | Completion | None = None
        self._first_at: float | None = None
        self._choices = [_Progress(turn.new_parser()) for _ in range(turn.request.sampling.n)]

    def _open(self, worker: Worker) -> AsyncIterator[StreamDelta | Completion]:
        self._worker = worker.id
        return worker.stream(self._turn.request)

    async def start(self) -> None:
        """Returns with the first tokens. Raises the error of a worker that fails before them."""
        self._first = await anext(self._items, None)
        self._first_at = time()

    async def events(self) -> AsyncIterator[bytes]:
        async with aclosing(self._items):
            for index in range(len(self._choices)):
                yield sse.event(self._opening(index))
            completions: list[Completion] = []
            item = self._first
            while item is not None:
                if isinstance(item, Completion):
                    completions.append(item)
                elif part := self._progress(item).add(item):
                    yield sse.event(self._chunk(item.index, part))
                item = await anext(self._items, None)
        for chunk in await self._ended(completions):
            yield sse.event(chunk)

    def _progress(self, delta: StreamDelta) -> _Progress:
        if not 0 <= delta.index < len(self._choices):
            raise ContractError(
                f"the worker sent tokens of choice {delta.index}, but the request has "
                f"{len(self._choices)} choices"
            )
        return self._choices[delta.index]

    async def _ended(self, completions: list[Completion]) -> list[wire.ChatCompletionBody]:
        """The last chunks: text that was held back, finish reasons, and the usage."""
        if sorted(one.index for one in completions) != list(range(len(self._choices))):
            raise MissingFinish(
                f"the stream ended with {len(completions)} of {len(self._choices)} choices finished"
            )
        replies, rest = [], {}
        for completion in completions:
            choice = self._choices[completion.index]
            choice.complete(completion)
            parsed, rest[completion.index] = choice.parser.finish(completion.token_ids)
            replies.append(reply(completion, parsed))
        chunks = [
            self._chunk(each.completion.index, rest[each.completion.index], each)
            for each in await self._turn.commit(replies)
        ]
        if self._turn.chat.include_usage:
            tokens = sum(len(choice.token_ids) for choice in self._choices)
            chunk = self._body([])
            chunk.usage = usage_of(len(self._turn.request.prompt_ids), tokens)
            chunks.append(chunk)
        return chunks

    def _opening(self, index: int) -> wire.ChatCompletionBody:
        delta = wire.AssistantMessage(role="assistant", content="")
        chunk = self._body([wire.ChatChoice(index=index, delta=delta)])
        if self._shape.token_ids and index == 0:
            chunk.prompt_token_ids = as_list(self._turn.request.prompt_ids)
        return chunk

    def _chunk(
        self, index: int, part: MessagePart, end: wire.ChatReply | None = None
    ) -> wire.ChatCompletionBody:
        """The new part of a choice: its text, and every token since the chunk before."""
        shape, choice = self._shape, self._choices[index]
        new_ids = choice.token_ids[choice.sent :]
        choice.sent = len(choice.token_ids)
        item = wire.ChatChoice(
            index=index, delta=self._delta(choice, part), logprobs=self._scores(choice, end)
        )
        if shape.token_ids:
            item.token_ids = new_ids
        chunk = self._body([item])
        if end is not None:
            wire.ending(shape, item, end)
            completion = end.completion
            chunk.system_fingerprint = wire.fingerprint(completion)
            if shape.prompt_logprobs and index == 0:
                chunk.prompt_logprobs = wire.prompt_entries(shape, completion.prompt_logprobs)
            if shape.extra_fields:
                timing = self._turn.timing(self._first_at)
                chunk.nvext = wire.extension(
                    shape, completion, new_ids, worker=self._worker, timing=timing
                )
        elif "completion_token_ids" in shape.extra_fields:
            chunk.nvext = NvextResponse(completion_token_ids=new_ids)
        return chunk

    def _scores(self, choice: _Progress, end: wire.ChatReply | None) -> wire.ChatLogprobs | None:
        """Logprobs of the tokens not sent yet. Alternatives are known at the end only."""
        shape = self._shape
        early = not shape.top and len(choice.logprobs) == len(choice.token_ids)
        if not shape.logprobs or (end is None and not early):
            return None
        start, choice.scored = choice.scored, len(choice.token_ids)
        tops = None if end is None else end.completion.top_logprobs
        return wire.entries(
            shape,
            choice.token_ids[start:],
            choice.logprobs[start:],
            None if tops is None else tops[start:],
        )

    def _delta(self, choice: _Progress, part: MessagePart) -> wire.AssistantMessage:
        delta = wire.AssistantMessage()
        if part.content:
            delta.content = part.content
        if part.reasoning and self._shape.reasoning:
            delta.reasoning = delta.reasoning_content = part.reasoning
        if part.calls:
            calls: list[Any] = [
                {
                    "index": choice.calls + at,
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for at, call in enumerate(part.calls)
            ]
            choice.calls += len(calls)
            delta.tool_calls = calls
        return delta

    def _body(self, choices: list[wire.ChatChoice]) -> wire.ChatCompletionBody:
        shape = self._shape
        return wire.ChatCompletionBody(
            id=shape.id,
            object="chat.completion.chunk",
            created=shape.created,
            model=shape.model,
            choices=choices,
        )
