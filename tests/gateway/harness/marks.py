"""What an agent sends back of our answers: the ids of a recording and ours in their place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx

from tests.gateway.dialects import named_events
from tests.gateway.harness.capture import Exchange, RecordedReply

PLAIN_ID = re.compile(r"[A-Za-z0-9_-]+")
REPLIES = ("reasoning", "function_call", "custom_tool_call")


class Marks:
    """Maps the ids and signatures that a recorded agent was given to those we gave it."""

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}
        self._signatures: dict[str, str] = {}
        self._arguments: dict[str, str] = {}
        self._texts: set[str] = set()

    def knows(self, reply: RecordedReply) -> bool:
        """Whether a turn was said in this replay already."""
        if reply.calls:
            return all(call["id"] in self._ids for call in reply.calls)
        return reply.text in self._texts or not reply.text

    def mapped(self, value: Any) -> Any:
        """The request with our ids in place of the recorded ones, and cut arguments made whole."""
        if isinstance(value, str):
            return self._ids.get(value, value)
        if isinstance(value, list):
            return [self.mapped(each) for each in value]
        if not isinstance(value, dict):
            return value
        mapped = {key: self.mapped(each) for key, each in value.items()}
        if value.get("type") == "thinking" and value["thinking"] in self._signatures:
            mapped["signature"] = self._signatures[value["thinking"]]
        function = mapped.get("function")
        call = value.get("id")
        known = self._arguments.get(call) if isinstance(call, str) else None
        if known is not None and isinstance(function, dict):
            cut = sound(function["arguments"]) == function["arguments"]
            function["arguments"] = known if cut else function["arguments"]
        return mapped

    def learn(self, exchange: Exchange, response: httpx.Response) -> None:
        """Takes the ids of our answer for those of the recorded one."""
        reply, path = exchange.reply, exchange.path.partition("?")[0]
        self._texts.add(reply.text)
        streamed = response.headers["content-type"].startswith("text/event-stream")
        body = _whole(path, response.text) if streamed else response.json()
        calls: list[str] = []
        for item in body.get("content") or body.get("output") or ():
            kind = item["type"]
            if kind == "thinking":
                self._signatures[reply.thought] = item["signature"]
            elif kind == "reasoning":
                self._take(reply.marks.get("reasoning"), item["id"])
                self._take(reply.marks.get("sealed"), item["encrypted_content"])
            elif kind == "message":
                self._take(reply.marks.get("message"), item["id"])
            elif kind != "text":
                calls.append(item.get("call_id") or item["id"])
                if len(calls) <= len(reply.calls):
                    recorded = reply.calls[len(calls) - 1]["id"]
                    self._take(reply.marks.get(f"item {recorded}"), item["id"])
        if reply.text.strip() != reply.text:
            self._ids[reply.text] = (
                reply.text.strip()
            )  # an agent gets the text without space around
        if "choices" in body:
            calls = [call["id"] for call in body["choices"][0]["message"].get("tool_calls") or ()]
        if "response" in reply.marks:
            self._take(reply.marks["response"], body["id"])
        for recorded_call, ours in zip(reply.calls, calls, strict=False):
            assert PLAIN_ID.fullmatch(ours)
            name = recorded_call["id"]
            self._take(name, ours)
            self._take(re.sub(r"[^A-Za-z0-9_-]", "_", name), ours)
            compact = json.dumps(
                sound(recorded_call["arguments"]), separators=(",", ":"), ensure_ascii=False
            )
            self._arguments[name] = compact

    def _take(self, recorded: str | None, ours: str) -> None:
        if recorded:
            self._ids[recorded] = ours


def sound(arguments: str) -> Any:
    """Arguments as they are read; text that is no JSON as it is."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments


def missing_turns(exchange: Exchange, marks: Marks) -> Iterator[Exchange]:
    """The requests that must have come before this one, for turns that were not said yet."""
    body = exchange.body
    if not isinstance(body, dict):
        return
    key = "input" if "input" in body else "messages"
    items = body.get(key)
    if not isinstance(items, list):
        return
    at = 0
    while at < len(items):
        start = at
        while at < len(items) and _is_reply(items[at]):
            at += 1
            if key == "messages":
                break
        if at == start:
            at += 1
            continue
        reply = _recorded(items[start:at])
        if at < len(items) and start and not marks.knows(reply):
            yield Exchange(
                exchange.method,
                exchange.path,
                exchange.headers,
                {**body, key: items[:start]},
                reply,
            )


def _is_reply(item: dict[str, Any]) -> bool:
    return item.get("role") == "assistant" or item.get("type") in REPLIES


def _recorded(items: list[dict[str, Any]]) -> RecordedReply:
    """What was said in a turn, as the agent sends it back."""
    text, thought, calls, marks = "", "", [], dict[str, str]()
    for item in items:
        kind = item.get("type")
        if kind == "reasoning":
            parts = item.get("content") or item.get("summary") or ()
            thought += "".join(part["text"] for part in parts)
            sealed = item.get("encrypted_content") or ""
            marks |= {"reasoning": item.get("id") or "", "sealed": sealed}
        elif kind in REPLIES:
            arguments = item.get("arguments")
            if arguments is None:
                arguments = json.dumps({"input": item["input"]})
            space = f"{item['namespace']}." if item.get("namespace") else ""
            call = {"id": item["call_id"], "name": space + item["name"], "arguments": arguments}
            calls.append(call)
        else:
            thought += item.get("reasoning_content") or ""
            content = item.get("content") or ""
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
            for block in blocks:
                if block["type"] == "thinking":
                    thought += block["thinking"]
                elif block["type"] == "tool_use":
                    arguments = json.dumps(block["input"])
                    calls.append({"id": block["id"], "name": block["name"], "arguments": arguments})
                else:
                    text += block["text"]
            for call in item.get("tool_calls") or ():
                calls.append({"id": call["id"], **call["function"]})
    return RecordedReply(200, thought, text, calls, marks=marks)


def _whole(path: str, text: str) -> dict[str, Any]:
    """The whole answer that a stream adds up to, as far as it is needed here."""
    if path.endswith("/completions"):
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        calls = [
            call
            for chunk in chunks
            for choice in chunk["choices"]
            for call in choice["delta"].get("tool_calls") or ()
        ]
        return {"choices": [{"message": {"tool_calls": calls}}]}
    events = named_events(text)
    if path.endswith("/responses"):
        return dict(events[-1][1]["response"])
    blocks: list[dict[str, Any]] = []
    for name, data in events:
        if name == "content_block_start":
            blocks.append(data["content_block"])
        elif name == "content_block_delta" and "signature" in data["delta"]:
            blocks[-1]["signature"] = data["delta"]["signature"]
    return {"content": blocks}
