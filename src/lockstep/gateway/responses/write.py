"""A turn in the shapes of the responses dialect, the whole object or its events: the one
translation back.

The events satisfy the SDK, Codex, opencode and Qwen Code, each of which needs others of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from lockstep.gateway.responses.tool_names import INPUT, ToolNames
from lockstep.gateway.turn.sample import StreamedPart, TurnStream
from lockstep.gateway.turn.turn import GatewayTurn
from lockstep.protocol.common.thinking_seal import seal
from lockstep.protocol.openai import responses_response as wire
from lockstep.protocol.openai.chat_response import ChatReply
from lockstep.protocol.openai.responses_request import ResponsesRequest
from lockstep.render.parsed_message import Call
from lockstep.tokens.errors import WORKER_FAILURES, LockstepError, Unavailable

StoreResponse = Callable[[wire.ResponseObject, ChatReply], None]


def empty_response(
    request: ResponsesRequest, response_id: str, created: int
) -> wire.ResponseObject:
    """Return the response before its first token, with the fields that echo the request."""
    reasoning, text = request.reasoning, request.text
    return wire.ResponseObject(
        id=response_id,
        created_at=created,
        model=request.model,
        status="in_progress",
        output=[],
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        previous_response_id=request.previous_response_id,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        tools=request.tools or [],
        tool_choice=request.tool_choice or "auto",
        store=request.store is not False,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning={
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        text={"format": (text.format if text is not None else None) or {"type": "text"}},
        metadata=request.metadata or {},
        user=request.user,
    )


def ended_response(
    response: wire.ResponseObject, turn: GatewayTurn, reply: ChatReply, output: list[wire.Fields]
) -> wire.ResponseObject:
    """Return the finished response. Raises Unavailable for a turn that was aborted."""
    if reply.finish == "abort":
        raise Unavailable("the turn was aborted before it ended: send the request again")
    cut = reply.finish == "length"
    return msgspec.structs.replace(
        response,
        status="incomplete" if cut else "completed",
        incomplete_details={"reason": "max_output_tokens"} if cut else None,
        output=output,
        usage=wire.ResponsesUsage.of(len(turn.request.prompt_ids), len(reply.completion.token_ids)),
    )


def output_items(turn_id: str, message: Mapping[str, Any], tools: ToolNames) -> list[wire.Fields]:
    """Return the output items of a whole turn."""
    output: list[wire.Fields] = []
    if thought := message.get("reasoning_content"):
        output.append(wire.reasoning_item(f"rs_{turn_id}", thought, seal(thought)))
    if text := message.get("content"):
        output.append(wire.message_item(f"msg_{turn_id}", text))
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        output.append(tools.call_item(call["id"], name, arguments, "completed"))
    return output


class ResponseStream:
    """The events of one turn; `store` gets the finished response before the client does."""

    def __init__(
        self,
        response: wire.ResponseObject,
        turn: GatewayTurn,
        parts: TurnStream,
        tools: ToolNames,
        store: StoreResponse,
    ) -> None:
        self._response = response
        self._turn = turn
        self._parts = parts
        self._tools = tools
        self._store = store
        self._number = 0
        self._output: list[wire.Fields] = []
        self._thought: str | None = None
        self._text: str | None = None
        self._texts = 0

    async def events(self) -> AsyncIterator[bytes]:
        yield self._event("response.created", response=self._response)
        yield self._event("response.in_progress", response=self._response)
        try:
            async with aclosing(self._parts.read()) as parts:
                async for part in parts:
                    for event in self._part_events(part):
                        yield event
        except LockstepError as error:
            if self._turn.open_end and isinstance(error, WORKER_FAILURES):
                raise  # the stream ends here, without an event
            yield failed_event(self._response, error, self._number)

    def _part_events(self, streamed: StreamedPart) -> Iterator[bytes]:
        part = streamed.part
        if part.reasoning:
            yield from self._reasoning_events(part.reasoning)
        if part.content:
            yield from self._text_events(part.content)
        for call in part.calls:
            yield from self._close_item()
            yield from self._call_events(call)
        if streamed.end is not None:
            yield from self._close_item()
            response = ended_response(self._response, self._turn, streamed.end, self._output)
            # Before the last event: a client may continue from the response as soon as it has it.
            self._store(response, streamed.end)
            yield self._event(f"response.{response.status}", response=response)

    def _reasoning_events(self, new: str) -> Iterator[bytes]:
        if self._thought is None:
            yield from self._close_item()
            self._thought = ""
            item = wire.reasoning_item(self._thought_id, "", seal(""))
            part = {"type": "summary_text", "text": ""}
            yield self._event("response.output_item.added", output_index=self._at, item=item)
            yield self._reasoning_event("response.reasoning_summary_part.added", part=part)
        self._thought += new
        yield self._reasoning_event("response.reasoning_summary_text.delta", delta=new)

    def _text_events(self, new: str) -> Iterator[bytes]:
        if self._text is None:
            yield from self._close_item()
            self._text = ""
            item = wire.message_item(self._text_id, None)
            yield self._event("response.output_item.added", output_index=self._at, item=item)
            yield self._text_event("response.content_part.added", part=wire.text_part(""))
        self._text += new
        yield self._text_event("response.output_text.delta", delta=new, logprobs=[])

    def _call_events(self, call: Call) -> Iterator[bytes]:
        name, arguments = call.name or "", call.arguments or "{}"
        item = self._tools.call_item(call.id, name, arguments, "completed")
        custom = item["type"] == "custom_tool_call"
        key = INPUT if custom else "arguments"
        prefix = "response.custom_tool_call_input" if custom else "response.function_call_arguments"
        place = {"item_id": item["id"], "output_index": self._at}
        added = {**item, key: "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=self._at, item=added)
        yield self._event(f"{prefix}.delta", **place, delta=item[key])
        yield self._event(f"{prefix}.done", **place, **{key: item[key]}, name=item["name"])
        yield self._item_done(item)

    def _close_item(self) -> Iterator[bytes]:
        """Yield the events that end the item being written, if there is one."""
        if self._thought is not None:
            text, part = self._thought, {"type": "summary_text", "text": self._thought}
            item = wire.reasoning_item(self._thought_id, text, seal(text))
            yield self._reasoning_event("response.reasoning_summary_text.done", text=text)
            yield self._reasoning_event("response.reasoning_summary_part.done", part=part)
            self._thought = None
            yield self._item_done(item)
        if self._text is not None:
            text = self._text
            item = wire.message_item(self._text_id, text)
            yield self._text_event("response.output_text.done", text=text, logprobs=[])
            yield self._text_event("response.content_part.done", part=wire.text_part(text))
            self._text = None
            self._texts += 1
            yield self._item_done(item)

    def _item_done(self, item: wire.Fields) -> bytes:
        at = self._at
        self._output.append(item)
        return self._event("response.output_item.done", output_index=at, item=item)

    @property
    def _at(self) -> int:
        return len(self._output)

    @property
    def _thought_id(self) -> str:
        return f"rs_{self._turn.id}"

    @property
    def _text_id(self) -> str:
        return f"msg_{self._turn.id}" + (f"_{self._texts}" if self._texts else "")

    def _reasoning_event(self, name: str, **fields: Any) -> bytes:
        place = {"item_id": self._thought_id, "output_index": self._at, "summary_index": 0}
        return self._event(name, **place, **fields)

    def _text_event(self, name: str, **fields: Any) -> bytes:
        place = {"item_id": self._text_id, "output_index": self._at, "content_index": 0}
        return self._event(name, **place, **fields)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return wire.event(name, number, **fields)


async def failed_events(
    response: wire.ResponseObject, error: LockstepError
) -> AsyncIterator[bytes]:
    """Yield the events of a response that failed before it began."""
    yield wire.event("response.created", 0, response=response)
    yield failed_event(response, error, 1)


def failed_event(response: wire.ResponseObject, error: LockstepError, number: int) -> bytes:
    """Return the event that ends a failed response."""
    failed = msgspec.structs.replace(response, status="failed", error=wire.failure_of(error))
    return wire.event("response.failed", number, response=failed)
