"""A streamed chat response, whose chunks add up to the whole response, token for token.

Where text is held back, its tokens and logprobs are held back with it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from time import time
from typing import Any

from lockstep.gateway.turn.progress import ChoiceProgress
from lockstep.gateway.turn.sample import TurnStream
from lockstep.gateway.turn.turn import GatewayTurn
from lockstep.http import sse
from lockstep.protocol.common.response import usage_of
from lockstep.protocol.dynamo.nvext import NvextResponse, Timing
from lockstep.protocol.json.lazy_ids import as_list
from lockstep.protocol.openai import chat_response as wire
from lockstep.render.streaming_parser import MessagePart


def timing_of(turn: GatewayTurn, first_at: float | None) -> Timing:
    """Return how long a turn took; `first_at` is the Unix time of its first token, if known."""
    return Timing(
        request_received_ms=int(turn.received * 1000),
        ttft_ms=None if first_at is None else (first_at - turn.received) * 1000,
        total_time_ms=(time() - turn.received) * 1000,
    )


class _Sent:
    """Counts of what was sent of one choice."""

    def __init__(self) -> None:
        self.tokens = 0
        self.scored = 0
        self.calls = 0


class ChatStream:
    """The events of one turn, made of its parts."""

    def __init__(self, turn: GatewayTurn, shape: wire.ChatResponseShape, parts: TurnStream) -> None:
        self._turn = turn
        self._shape = shape
        self._parts = parts
        self._sent = [_Sent() for _ in parts.choices]

    async def events(self) -> AsyncIterator[bytes]:
        for index in range(len(self._sent)):
            yield sse.event(self._opening(index))
        async with aclosing(self._parts.read()) as parts:
            async for part in parts:
                yield sse.event(self._chunk(part.choice, part.part, part.end))
        if self._turn.chat.include_usage:
            yield sse.event(self._usage())

    def _usage(self) -> wire.ChatCompletionBody:
        tokens = sum(len(choice.token_ids) for choice in self._parts.choices)
        chunk = self._body([])
        chunk.usage = usage_of(len(self._turn.request.prompt_ids), tokens)
        return chunk

    def _opening(self, index: int) -> wire.ChatCompletionBody:
        delta = wire.AssistantMessage(role="assistant", content="")
        chunk = self._body([wire.ChatChoice(index=index, delta=delta)])
        if self._shape.token_ids and index == 0:
            chunk.prompt_token_ids = as_list(self._turn.request.prompt_ids)
        return chunk

    def _chunk(
        self, index: int, part: MessagePart, end: wire.ChatReply | None = None
    ) -> wire.ChatCompletionBody:
        """Return the chunk of a new part: its text, and every token since the last chunk."""
        shape, choice, sent = self._shape, self._parts.choices[index], self._sent[index]
        # Tokens of held-back text go out with the part that releases it, so that the ids of all
        # chunks together are those of the completion.
        new_ids = choice.token_ids[sent.tokens :]
        sent.tokens = len(choice.token_ids)
        item = wire.ChatChoice(
            index=index, delta=self._delta(sent, part), logprobs=self._scores(choice, sent, end)
        )
        if shape.token_ids:
            item.token_ids = new_ids
        chunk = self._body([item])
        if end is not None:
            wire.ending(shape, item, end)
            completion = end.completion
            chunk.system_fingerprint = wire.fingerprint(completion)
            chunk.logprob_mode = completion.logprob_mode
            if shape.prompt_logprobs and index == 0:
                chunk.prompt_logprobs = wire.prompt_entries(shape, completion.prompt_logprobs)
            if shape.extra_fields:
                timing = timing_of(self._turn, self._parts.first_at)
                chunk.nvext = wire.extension(
                    shape, completion, new_ids, worker=self._parts.worker, timing=timing
                )
        elif "completion_token_ids" in shape.extra_fields:
            chunk.nvext = NvextResponse(completion_token_ids=new_ids)
        return chunk

    def _scores(
        self, choice: ChoiceProgress, sent: _Sent, end: wire.ChatReply | None
    ) -> wire.ChatLogprobs | None:
        """Return the logprobs of tokens not sent yet; alternatives are known at the end only."""
        shape = self._shape
        # Some workers stream tokens without logprobs: those are sent with the last chunk.
        early = not shape.top and len(choice.logprobs) == len(choice.token_ids)
        if not shape.logprobs or (end is None and not early):
            return None
        start, sent.scored = sent.scored, len(choice.token_ids)
        tops = None if end is None else end.completion.top_logprobs
        return wire.entries(
            shape,
            choice.token_ids[start:],
            choice.logprobs[start:],
            None if tops is None else tops[start:],
        )

    def _delta(self, sent: _Sent, part: MessagePart) -> wire.AssistantMessage:
        delta = wire.AssistantMessage()
        if part.content:
            delta.content = part.content
        if part.reasoning and self._shape.reasoning:
            delta.reasoning = delta.reasoning_content = part.reasoning
        if part.calls:
            calls: list[Any] = [
                {
                    "index": sent.calls + at,
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for at, call in enumerate(part.calls)
            ]
            sent.calls += len(calls)
            wire.put_calls(self._shape, delta, calls)
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
