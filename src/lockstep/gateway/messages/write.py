"""A turn in Anthropic's shapes, the whole message or its events: the one translation back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Literal

from lockstep.gateway.turn.sample import StreamedPart, TurnStream
from lockstep.gateway.turn.turn import GatewayTurn
from lockstep.protocol.anthropic import messages_response as wire
from lockstep.protocol.common.thinking_seal import seal
from lockstep.protocol.openai.chat_response import ChatReply
from lockstep.tokens.errors import WORKER_FAILURES, LockstepError, Unavailable

Kind = Literal["thinking", "text"]
StoreMessage = Callable[[wire.AnthropicMessage], None]


def whole_message(turn: GatewayTurn, reply: ChatReply) -> wire.AnthropicMessage:
    """Return the response of a turn. Raises Unavailable for one that was aborted."""
    stop_reason, stop_sequence = stop_of(turn, reply)
    message = reply.message
    content: list[wire.Fields] = []
    if thought := message.get("reasoning_content"):
        content.append(wire.thinking_block(thought, seal(thought)))
    if text := message.get("content"):
        content.append(wire.text_block(text))
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = json.loads(function["arguments"] or "{}")
        content.append(wire.tool_use_block(call["id"], function["name"], arguments))
    return wire.AnthropicMessage(
        id=_id(turn),
        model=turn.model,
        content=content,
        usage=_usage(turn, len(reply.completion.token_ids)),
        stop_reason=stop_reason,
        stop_sequence=stop_sequence,
    )


def stop_of(turn: GatewayTurn, reply: ChatReply) -> tuple[wire.StopReason, str | None]:
    """Return why a turn ended. Raises Unavailable for an abort, which no stop reason stands for."""
    if reply.finish == "abort":
        raise Unavailable("the turn was aborted before it ended: send the request again")
    if reply.finish == "tool_calls":
        return "tool_use", None
    if reply.finish == "length":
        clamped = "x-lockstep-max-tokens" in turn.headers
        return ("model_context_window_exceeded" if clamped else "max_tokens"), None
    stopped = reply.completion.stop_reason
    return ("end_turn", None) if stopped is None else ("stop_sequence", stopped)


class MessageStream:
    """The events of one turn; an error after the start becomes an event. `store` gets the whole
    message before the client has the last event.
    """

    def __init__(self, turn: GatewayTurn, parts: TurnStream, store: StoreMessage) -> None:
        self._turn = turn
        self._parts = parts
        self._store = store
        self._index = -1
        self._open: Kind | None = None
        self._thought = ""

    async def events(self) -> AsyncIterator[bytes]:
        opening = wire.AnthropicMessage(
            id=_id(self._turn), model=self._turn.model, content=[], usage=self._usage()
        )
        yield wire.event("message_start", message=opening)
        yield wire.event("ping")
        try:
            async with aclosing(self._parts.read()) as parts:
                async for part in parts:
                    for event in self._part_events(part):
                        yield event
        except LockstepError as error:
            if self._turn.open_end and isinstance(error, WORKER_FAILURES):
                raise  # the stream ends here, without an event
            yield wire.event("error", **_without_type(error, self._turn.id))

    def _part_events(self, streamed: StreamedPart) -> Iterator[bytes]:
        part = streamed.part
        if part.reasoning:
            self._thought += part.reasoning
            yield from self._open_block("thinking")
            yield self._delta(type="thinking_delta", thinking=part.reasoning)
        if part.content:
            yield from self._open_block("text")
            yield self._delta(type="text_delta", text=part.content)
        for call in part.calls:
            yield from self._close_block()
            self._index += 1
            block = wire.tool_use_block(call.id, call.name or "", {})
            yield wire.event("content_block_start", index=self._index, content_block=block)
            yield self._delta(type="input_json_delta", partial_json=call.arguments or "{}")
            yield wire.event("content_block_stop", index=self._index)
        if streamed.end is not None:
            yield from self._end_events(streamed.end)

    def _end_events(self, reply: ChatReply) -> Iterator[bytes]:
        stop_reason, stop_sequence = stop_of(self._turn, reply)
        self._store(whole_message(self._turn, reply))
        yield from self._close_block()
        delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
        yield wire.event("message_delta", delta=delta, usage=self._usage())
        yield wire.event("message_stop")

    def _open_block(self, kind: Kind) -> Iterator[bytes]:
        if self._open == kind:
            return
        yield from self._close_block()
        self._index += 1
        self._open = kind
        block = wire.thinking_block("", "") if kind == "thinking" else wire.text_block("")
        yield wire.event("content_block_start", index=self._index, content_block=block)

    def _close_block(self) -> Iterator[bytes]:
        if self._open == "thinking":
            # The seal lets `translate` detect thinking that the client changed.
            yield self._delta(type="signature_delta", signature=seal(self._thought))
        if self._open is not None:
            self._open = None
            yield wire.event("content_block_stop", index=self._index)

    def _delta(self, **delta: str) -> bytes:
        return wire.event("content_block_delta", index=self._index, delta=delta)

    def _usage(self) -> wire.MessagesUsage:
        return _usage(self._turn, len(self._parts.choices[0].token_ids))


def _id(turn: GatewayTurn) -> str:
    return f"msg_{turn.id}"


def _usage(turn: GatewayTurn, output_tokens: int) -> wire.MessagesUsage:
    return wire.MessagesUsage(
        input_tokens=len(turn.request.prompt_ids), output_tokens=output_tokens
    )


def _without_type(error: LockstepError, request_id: str) -> wire.Fields:
    return {key: value for key, value in wire.error_of(error, request_id).items() if key != "type"}
