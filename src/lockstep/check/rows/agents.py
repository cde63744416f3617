"""Agent dialects: Anthropic messages and OpenAI responses, in the same sessions as chat."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

from lockstep.check.outcome import require
from lockstep.check.raw import RawReply
from lockstep.check.row import RowGroup
from lockstep.check.rows.text import renderer_of, there
from lockstep.check.target import Target

GROUP = RowGroup("agents")
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
QUESTION, MORE = "Count from one to five.", "Go on."
UNKNOWN = {"frobnicate": 1}


def events_of(reply: RawReply) -> list[dict[str, Any]]:
    """Return the data of a stream of events."""
    lines = bytes(reply.body).decode(errors="replace").splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def messages_body(target: Target, *turns: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(turns)]
    body = {"model": target.card.id, "max_tokens": 24, "temperature": 0, "messages": messages}
    return body | more


def responses_body(target: Target, *turns: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    items = [{"role": roles[at % 2], "content": text} for at, text in enumerate(turns)]
    body = {"model": target.card.id, "max_output_tokens": 24, "temperature": 0, "input": items}
    return body | more


def text_of_message(body: dict[str, Any]) -> str:
    return "".join(block["text"] for block in body["content"] if block["type"] == "text")


def text_of_response(body: dict[str, Any]) -> str:
    messages = [item for item in body["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in messages for part in item["content"])


@GROUP.row("messages", "a messages request has the prompt that the client renders", "L2")
async def messages(target: Target) -> str:
    reply = there(await target.post(MESSAGES, messages_body(target, QUESTION)), MESSAGES)
    require(reply.status == 200, reply.describe())
    body = messages_body(target, QUESTION)
    counted = await target.post(MESSAGES + "/count_tokens", body)
    ours = len(renderer_of(target).render([{"role": "user", "content": QUESTION}]))
    used = reply.fields["usage"]["input_tokens"]
    theirs = counted.fields.get("input_tokens")
    evidence = f"{ours} ids rendered here, {used} in usage, {theirs} counted"
    require(used == theirs == ours, evidence)
    return evidence


@GROUP.row("messages_stream", "a streamed message has all its events and the same content", "L1")
async def messages_stream(target: Target) -> str:
    whole = there(await target.post(MESSAGES, messages_body(target, QUESTION)), MESSAGES)
    streamed = await target.post(MESSAGES, messages_body(target, QUESTION, stream=True))
    events = events_of(streamed)
    kinds = [event["type"] for event in events]
    require(kinds[:1] == ["message_start"] and kinds[-1:] == ["message_stop"], f"events {kinds}")
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    text = "".join(delta.get("text", "") for delta in deltas)
    expected = text_of_message(whole.fields)
    require(text == expected, f"streamed {text!r}, whole {expected!r}")
    return f"{len(events)} events, {len(text)} characters, as in the whole message"


@GROUP.row("responses_stream", "a streamed response has all its events and the same content", "L1")
async def responses_stream(target: Target) -> str:
    whole = there(await target.post(RESPONSES, responses_body(target, QUESTION)), RESPONSES)
    streamed = await target.post(RESPONSES, responses_body(target, QUESTION, stream=True))
    events = events_of(streamed)
    kinds = [event["type"].removeprefix("response.") for event in events]
    ended = kinds[-1:] in (["completed"], ["incomplete"])
    require(kinds[:1] == ["created"] and ended, f"events {kinds}")
    usage = events[-1]["response"]["usage"]
    details = "input_tokens_details" in usage and "output_tokens_details" in usage
    require(details, f"usage {usage} has no details, which SDKs read")
    text, expected = text_of_response(events[-1]["response"]), text_of_response(whole.fields)
    require(text == expected, f"streamed {text!r}, whole {expected!r}")
    return f"{len(events)} events, {len(text)} characters, as in the whole response"


@GROUP.row("previous", "a response continues the previous one by its id alone", "L2")
async def previous(target: Target) -> str:
    first = there(await target.post(RESPONSES, responses_body(target, QUESTION)), RESPONSES)
    linked = responses_body(target, MORE, previous_response_id=first.fields.get("id"))
    second = await target.post(RESPONSES, linked)
    require(second.status == 200, second.describe())
    text = text_of_response(first.fields)
    resent = await target.post(RESPONSES, responses_body(target, QUESTION, text, MORE))
    counts = [reply.fields["usage"]["input_tokens"] for reply in (second, resent)]
    require(counts[0] == counts[1], f"{counts[0]} tokens of prompt by id, {counts[1]} resent")
    return f"{counts[0]} tokens of prompt, by id and resent"


@GROUP.row("one_session", "a turn of one dialect is continued through another", "L2")
async def one_session(target: Target) -> str:
    base = f"/sessions/check-{uuid4().hex}"
    first = await target.post(base + MESSAGES, messages_body(target, QUESTION))
    there(first, "/sessions/{id}" + MESSAGES)
    text = text_of_message(first.fields)
    reply = await target.post(base + RESPONSES, responses_body(target, QUESTION, text, MORE))
    require(reply.status == 200, reply.describe())
    before = first.fields["usage"]
    least = before["input_tokens"] + before["output_tokens"]
    count = reply.fields["usage"]["input_tokens"]
    evidence = f"{count} tokens of prompt after a turn of {least}"
    require(count > least, evidence)
    return evidence


@GROUP.row("unknown", "an unknown field is rejected in both dialects", "L0")
async def unknown(target: Target) -> str:
    statuses = []
    for route, body in (
        (MESSAGES, messages_body(target, QUESTION, **UNKNOWN)),
        (RESPONSES, responses_body(target, QUESTION, **UNKNOWN)),
    ):
        reply = there(await target.post(route, body), route)
        require(reply.refused, f"{route} with an unknown field: {reply.describe()}")
        statuses.append(f"{route}: {reply.status}")
    return ", ".join(statuses)
