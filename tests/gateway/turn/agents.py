"""A small agent for each dialect: it streams, keeps what it received, and sends it back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx

SHELL = {"type": "object", "properties": {"command": {"type": "string"}}}


@dataclass
class Received:
    """What a client received of one turn, and how the stream ended."""

    thought: str = ""
    text: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    seals: list[str] = field(default_factory=list)
    ended: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def parts(self) -> int:
        return bool(self.thought) + bool(self.text) + sum(bool(c["arguments"]) for c in self.calls)


class Agent:
    """An agent with a history; `dialect` is chat, messages or responses, `program` its name."""

    def __init__(
        self, http: httpx.AsyncClient, dialect: str, session: str, program: str = "opencode/1.18"
    ) -> None:
        self._http, self.dialect, self.session = http, dialect, session
        self.program = program
        self.history: list[Any] = []
        self.say("Write hello.")

    def say(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    def blank(self) -> None:
        """Insert a blank assistant message, as some agents do after a cut."""
        content: Any = [] if self.dialect == "messages" else ""
        if self.dialect == "responses":
            content = [{"type": "output_text", "text": ""}]
        self.history.append({"role": "assistant", "content": content})

    def keep(self, turn: Received, *, thought: bool = True, calls: int | None = None) -> None:
        """Put what was received into the history, with the results of its calls."""
        kept = turn.calls if calls is None else turn.calls[:calls]
        keep = {"chat": self._keep_chat, "messages": self._keep_messages}
        keep.get(self.dialect, self._keep_items)(turn, kept, turn.thought if thought else "")

    def _keep_chat(self, turn: Received, calls: list[Any], thought: str) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": turn.text}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": call["arguments"]},
                }
                for call in calls
            ]
        self.history.append(message)
        for call in calls:
            self.history.append({"role": "tool", "tool_call_id": call["id"], "content": "ok"})

    def _keep_messages(self, turn: Received, calls: list[Any], thought: str) -> None:
        blocks: list[Any] = []
        if thought:
            seal = turn.seals[0] if turn.seals else ""
            blocks.append({"type": "thinking", "thinking": thought, "signature": seal})
        if turn.text:
            blocks.append({"type": "text", "text": turn.text})
        results = []
        for call in calls:
            # Claude Code sends the arguments parsed, with its own order of keys.
            arguments = json.loads(call["arguments"])
            blocks.append(
                {"type": "tool_use", "id": call["id"], "name": call["name"], "input": arguments}
            )
            results.append({"type": "tool_result", "tool_use_id": call["id"], "content": "ok"})
        self.history.append({"role": "assistant", "content": blocks})
        if results:
            self.history.append({"role": "user", "content": results})

    def _keep_items(self, turn: Received, calls: list[Any], thought: str) -> None:
        if thought:
            part = {"type": "summary_text", "text": thought}
            self.history.append({"type": "reasoning", "summary": [part]})
        if turn.text:
            content = [{"type": "output_text", "text": turn.text}]
            self.history.append({"type": "message", "role": "assistant", "content": content})
        for call in calls:
            self.history.append(
                {
                    "type": "function_call",
                    "call_id": call["id"],
                    "name": call["name"],
                    "arguments": call["arguments"],
                }
            )
        for call in calls:
            self.history.append(
                {"type": "function_call_output", "call_id": call["id"], "output": "ok"}
            )

    async def turn(self, *, leave_after: int | None = None, **headers: str) -> Received:
        """Stream a turn; hang up after that many parts of the message have begun."""
        turn = Received()
        stream = self._stream(turn, headers)
        async with aclosing(stream):
            async for _ in stream:
                if leave_after is not None and turn.parts >= leave_after:
                    turn.ended = "left"
                    break
        return turn

    async def _stream(self, turn: Received, headers: dict[str, str]) -> AsyncIterator[None]:
        path, body = self._request()
        url = f"/sessions/{self.session}{path}"
        headers = {"user-agent": self.program, **headers}
        async with self._http.stream("POST", url, json=body, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                turn.lines.append(line)
                if line.startswith("data: ") and line != "data: [DONE]":
                    self._take(turn, json.loads(line.removeprefix("data: ")))
                    yield

    def _request(self) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {"model": "tiny", "stream": True}
        if self.dialect == "responses":
            tool = {"type": "function", "name": "shell", "parameters": SHELL}
            return "/v1/responses", {**body, "input": self.history, "tools": [tool], "store": False}
        body["messages"] = self.history
        if self.dialect == "messages":
            tools = [{"name": "shell", "input_schema": SHELL}]
            return "/v1/messages", {**body, "max_tokens": 1000, "tools": tools}
        tools = [{"type": "function", "function": {"name": "shell", "parameters": SHELL}}]
        return "/v1/chat/completions", {**body, "tools": tools}

    def _take(self, turn: Received, data: Any) -> None:
        if self.dialect == "chat":
            _take_chat(turn, data)
        elif self.dialect == "messages":
            _take_messages(turn, data)
        else:
            _take_responses(turn, data)


def _take_chat(turn: Received, data: Any) -> None:
    if "error" in data:
        turn.ended = "error"
    for choice in data.get("choices", ()):
        delta = choice["delta"]
        turn.thought += delta.get("reasoning_content") or ""
        turn.text += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            turn.calls.append({"id": call["id"], **call["function"]})
        turn.ended = choice["finish_reason"] or turn.ended


def _take_messages(turn: Received, data: Any) -> None:
    if data["type"] == "error":
        turn.ended = "error"
    elif data["type"] == "message_stop":
        turn.ended = "stop"
    elif data["type"] == "content_block_start" and data["content_block"]["type"] == "tool_use":
        block = data["content_block"]
        turn.calls.append({"id": block["id"], "name": block["name"], "arguments": ""})
    elif data["type"] == "content_block_delta":
        delta = data["delta"]
        turn.thought += delta.get("thinking", "")
        turn.text += delta.get("text", "")
        turn.seals += [delta["signature"]] if "signature" in delta else []
        if "partial_json" in delta:
            turn.calls[-1]["arguments"] += delta["partial_json"]


def _take_responses(turn: Received, data: Any) -> None:
    if data["type"] == "response.failed":
        turn.ended = "error"
    elif data["type"] == "response.completed":
        turn.ended = "stop"
    elif data["type"] == "response.reasoning_summary_text.delta":
        turn.thought += data["delta"]
    elif data["type"] == "response.output_text.delta":
        turn.text += data["delta"]
    elif data["type"] == "response.output_item.done" and data["item"]["type"] == "function_call":
        item = data["item"]
        turn.calls.append(
            {"id": item["call_id"], "name": item["name"], "arguments": item["arguments"]}
        )
