"""Recorded runs of coding agents: requests with filler for what was cut, and what was answered."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "data" / "harness"
CUT = re.compile(
    r"(.*?)(?: \[cut: (\d+) characters, (\w+)\]| ?…\[trimmed, (\d+) characters, sha256 (\w+)\])",
    re.DOTALL,
)
WORDS = ("the", "file", "is", "read", "and", "then", "a", "line", "of", "it", "changes", "while",
         "every", "test", "goes", "on", "to", "pass", "for", "now")  # fmt: skip


@dataclass(frozen=True, slots=True)
class RecordedReply:
    """What the recording server answered: the content of one assistant turn, or an error.

    `marks` are ids and signatures that the agent may send back, by what they are of.
    """

    status: int
    thought: str = ""
    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    whole: bool = True
    length: bool = False
    marks: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Exchange:
    method: str
    path: str
    headers: dict[str, str]
    body: Any
    reply: RecordedReply


def runs() -> list[str]:
    return sorted(path.stem for path in DATA.glob("*.json"))


def load(run: str) -> list[Exchange]:
    """The exchanges of a run, in their order."""
    packed = json.loads((DATA / f"{run}.json").read_text())
    shared = packed["shared"]

    def unpack(value: Any) -> Any:
        if isinstance(value, dict):
            if value.keys() == {"$"}:
                return unpack(shared[value["$"]])
            return {key: unpack(each) for key, each in value.items()}
        if isinstance(value, list):
            return [unpack(each) for each in value]
        return filled(value) if isinstance(value, str) else value

    return [
        Exchange(each["method"], each["path"], each["headers"], each["body"], reply(each))
        for each in unpack(packed["exchanges"])
    ]


def filled(text: str) -> str:
    """The text with filler where it was cut, the same for the same digest."""
    match = CUT.fullmatch(text)
    if match is None:
        return text
    length, digest = int(match[2] or match[4]), match[3] or match[5]
    chosen = random.Random(digest)
    filler = " ".join(chosen.choice(WORDS) for _ in range(length // 3 + 8))
    return (match[1] + f" {digest} " + filler)[:length]


def reply(exchange: dict[str, Any]) -> RecordedReply:
    response = exchange.get("response") or {"status": 0}
    status = response.get("status") or 0
    if status != 200:
        return RecordedReply(status, whole=False)
    path = exchange["path"].partition("?")[0]
    events = [each["data"] for each in response.get("events", ()) if isinstance(each["data"], dict)]
    if path.endswith("/messages"):
        return _messages(response.get("body"), events)
    if path.endswith("/responses"):
        return _responses(response.get("body"), events)
    if path.endswith("/completions"):
        return _chat(response.get("body"), events)
    return RecordedReply(status, marks={"plain": ""})


def _messages(body: Any, events: list[Any]) -> RecordedReply:
    blocks: dict[int, dict[str, Any]] = {}
    reason = None
    if body is not None:
        for at, block in enumerate(body["content"]):
            blocks[at] = {**block, "json": json.dumps(block.get("input"))}
        reason = body["stop_reason"]
    for data in events:
        if data["type"] == "content_block_start":
            blocks[data["index"]] = {**data["content_block"], "json": ""}
        elif data["type"] == "content_block_delta":
            delta = dict(data["delta"])
            kind = delta.pop("type")
            for key, value in delta.items():
                target = "json" if kind == "input_json_delta" else key
                blocks[data["index"]][target] = blocks[data["index"]].get(target, "") + value
        elif data["type"] == "message_delta":
            reason = data["delta"]["stop_reason"]
    return RecordedReply(
        200,
        thought="".join(b["thinking"] for b in blocks.values() if b["type"] == "thinking"),
        text="".join(b["text"] for b in blocks.values() if b["type"] == "text"),
        calls=[
            {"id": b["id"], "name": b["name"], "arguments": b["json"]}
            for b in blocks.values()
            if b["type"] == "tool_use"
        ],
        whole=body is not None or bool(events and events[-1]["type"] == "message_stop"),
        length=reason in ("max_tokens", "model_context_window_exceeded"),
    )


def _responses(body: Any, events: list[Any]) -> RecordedReply:
    items = [data["item"] for data in events if data["type"] == "response.output_item.done"]
    end = events[-1] if events else {"type": "response.completed", "response": body}
    ends = ("response.completed", "response.incomplete")
    marks: dict[str, str] = {}
    thought = text = ""
    calls = []
    for item in (body or {}).get("output", items):
        kind = item["type"]
        if kind == "reasoning":
            thought += "".join(part["text"] for part in item.get("summary") or ())
            marks |= {"reasoning": item["id"], "sealed": item.get("encrypted_content") or ""}
        elif kind == "message":
            text += "".join(part["text"] for part in item["content"])
            marks["message"] = item["id"]
        else:
            name = item["name"]
            if item.get("namespace"):
                name = f"{item['namespace']}.{name}"
            arguments = item.get("arguments")
            if arguments is None:
                arguments = json.dumps({"input": item["input"]})
            calls.append({"id": item["call_id"], "name": name, "arguments": arguments})
            marks[f"item {item['call_id']}"] = item["id"]
    if end["type"] in ends:
        marks["response"] = end["response"]["id"]
    return RecordedReply(
        200,
        thought,
        text,
        calls,
        whole=end["type"] in ends,
        length=end["type"] == "response.incomplete",
        marks=marks,
    )


def _chat(body: Any, events: list[Any]) -> RecordedReply:
    messages = [body["choices"][0]["message"]] if body is not None else []
    reasons = [body["choices"][0]["finish_reason"]] if body is not None else []
    for data in events:
        for choice in data.get("choices", ()):
            messages.append(choice["delta"])
            reasons.append(choice.get("finish_reason"))
    calls: dict[int, dict[str, Any]] = {}
    for message in messages:
        for at, call in enumerate(message.get("tool_calls") or ()):
            known = calls.setdefault(call.get("index", at), {"id": "", "name": "", "arguments": ""})
            known["id"] = known["id"] or call.get("id") or ""
            known["name"] += call["function"].get("name") or ""
            known["arguments"] += call["function"].get("arguments") or ""
    return RecordedReply(
        200,
        thought="".join(m.get("reasoning_content") or "" for m in messages),
        text="".join(m.get("content") or "" for m in messages),
        calls=list(calls.values()),
        whole=any(reasons),
        length="length" in reasons,
    )
