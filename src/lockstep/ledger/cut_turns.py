"""Turns that were cut while they streamed, and how much of one an agent continues from.

An agent whose stream was cut keeps what it had received: all of it, or only the complete blocks and
calls. It executes those calls and sends the next request as if the turn had ended there. The turn
is then the stored one up to that token, and not an edit. A blank assistant message that an agent
inserts after a cut says nothing and is not an edit either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from lockstep.ledger.tree import Node, ReplyPlace, places, replied
from lockstep.render.messages import Message, Plain, canonical, joined, plain_messages, same
from lockstep.render.parsed_message import Call
from lockstep.render.renderer import Renderer
from lockstep.render.streaming_parser import StreamingParser
from lockstep.tokens import RoutedExperts, VersionSpan


@dataclass(frozen=True, slots=True)
class KeptPart:
    """The first `tokens` sampled ids of an aborted turn, and the message that they stream."""

    tokens: int
    reply: Message


def cut_turn(
    roots: Iterable[Node], history: Sequence[Message], at: int, renderer: Renderer
) -> tuple[Node, KeptPart | None] | None:
    """Return the aborted turn that the assistant message at `at` is, and the part of it that was
    kept; None for the part if all of it was. Return None where no cut turn explains the message.
    """
    cut = sorted(_cut_at(roots, history, at), key=lambda place: place.node.index, reverse=True)
    for place in cut:
        if replied(place, history):
            return place.node, None
        if (part := _kept_part(place, history[at], renderer)) is not None:
            return place.node, part if part.tokens < len(place.node.sampled) else None
    return None


def is_blank_after_cut(roots: Iterable[Node], history: Sequence[Message], at: int) -> bool:
    """Return whether the message at `at` is a blank one in the place of a turn that was cut, or
    after one."""
    if not _is_blank(history[at]):
        return False
    return any(True for _ in _cut_at(roots, history, at)) or (
        at > 0 and any(True for _ in _cut_at(roots, history, at - 1))
    )


def kept_node(node: Node, part: KeptPart, index: int) -> Node:
    """Return the turn that holds the kept part of an aborted one, with its provenance."""
    tokens = part.tokens
    cut = len(node.sampled) - tokens
    return replace(
        node,
        index=index,
        reply=part.reply,
        sampled=node.sampled[:tokens],
        logprobs=node.logprobs[:tokens],
        versions=tuple(
            VersionSpan(span.version, span.start, min(span.end, tokens))
            for span in node.versions
            if span.start < tokens
        ),
        experts=_first_rows(node.experts, cut),
        support=None if node.support is None else node.support.slice(0, tokens),
        stop_reason=None,
        stop_tokens=0,
        tool_parse_error=None,
        kept_of=node.index,
        children=[],
    )


def sampled_once(nodes: Sequence[Node]) -> dict[int, int]:
    """Return the number of sampled tokens of each turn by its index, each token counted once: those
    that a kept part repeats count there.
    """
    counts = {node.index: len(node.sampled) for node in nodes}
    parts: dict[int, list[Node]] = {}
    for node in nodes:
        if node.kept_of is not None:
            parts.setdefault(node.kept_of, []).append(node)
    for cut, copies in parts.items():
        shorter = 0
        for part in sorted(copies, key=lambda part: len(part.sampled)):
            counts[part.index] -= shorter
            shorter = len(part.sampled)
        counts[cut] -= shorter
    return counts


def _first_rows(experts: RoutedExperts | None, cut: int) -> RoutedExperts | None:
    if experts is None:
        return None
    rows = experts.up_to(experts.rows - cut)
    return RoutedExperts(bytes(rows.data), rows.shape, rows.dtype, rows.start)


def _cut_at(roots: Iterable[Node], history: Sequence[Message], at: int) -> Iterator[ReplyPlace]:
    """Yield the aborted turns whose reply is expected at this position of the history."""
    for place in places(roots, history):
        if place.at == at and place.node.finish == "abort":
            yield place


def _is_blank(message: Message) -> bool:
    return (
        message.role == "assistant"
        and not message.content.strip()
        and not (message.reasoning or "").strip()
        and not message.tool_calls
    )


def _kept_part(place: ReplyPlace, message: Message, renderer: Renderer) -> KeptPart | None:
    """Return the part of a turn whose stream says exactly this message.

    The tokens are parsed as they were when they streamed, so that the part ends where the client
    had received the message. None if no part says it.
    """
    if message.role != "assistant" or _is_blank(message):
        return None
    node = opened = place.node
    while opened.continues and opened.parent is not None:
        opened = opened.parent
    ids = node.ids()
    reply_ids = ids[opened.sampled_start :].tolist()
    before = len(reply_ids) - len(node.sampled)
    parser = StreamingParser(renderer, _tools(node), ids[: opened.sampled_start].tolist())
    content = reasoning = ""
    calls: tuple[Call, ...] = ()
    for at, token in enumerate(reply_ids):
        part = parser.feed([token])
        if not part:
            continue
        content, reasoning = content + part.content, reasoning + part.reasoning
        calls += part.calls
        reply = _message(content, reasoning, calls)
        whole = reply if place.before is None else joined(place.before, reply)
        if at >= before and same(whole, message):
            end = at + 1
            if not content and not calls:
                end = _after_thought(renderer, reply_ids, end)
            return KeptPart(end - before, reply)
    return None


def _after_thought(renderer: Renderer, ids: Sequence[int], end: int) -> int:
    """Return the end of the thinking with its closing marker, if it was sampled."""
    at = end
    while at < len(ids) and not renderer.decode(ids[at : at + 1]).strip():
        at += 1
    return at + 1 if at < len(ids) and renderer.thinks(ids[at : at + 1]) else end


def _message(content: str, reasoning: str, calls: Sequence[Call]) -> Message:
    message: Plain = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments or "{}"}}
            for call in calls
        ]
    (plain,) = plain_messages([message])
    return canonical(plain)


def _tools(node: Node) -> list[Any] | None:
    """Return the tools that the turn was parsed with, as far as they matter: a tool search may have
    added those that it calls."""
    tools: list[Any] = msgspec.json.decode(node.tools) if node.tools else []
    tools += [
        {"type": "function", "function": {"name": call.name}} for call in node.reply.tool_calls
    ]
    return tools or None
