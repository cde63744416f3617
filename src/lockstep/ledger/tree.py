"""Tree of the turns of a session: each node holds only what its turn added."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lockstep.ledger.origin import Origin
from lockstep.render.messages import Message, joined, same, starts_with
from lockstep.tokens import Finish, LogprobMode, RoutedExperts, Shaping, Support, VersionSpan
from lockstep.tokens.errors import BadExperts

IDS = "i"
"""Type code of token ids: 32-bit integers."""
LOGPROBS = "d"
"""Type code of logprobs: doubles, as received, so that a trainer gets the engine's bits."""
PER_NODE = 1200
"""Estimated bytes of a node besides its arrays and texts; for the accounting only."""
PER_ORIGIN = 600
"""Estimated bytes of the ids and names of an origin; for the accounting only."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Node:
    """One turn: the ids of its prompt, the sampled ids, and their provenance.

    `tool_parse_error` is the error of a tool call of the reply, `stop_tokens` how many of the last
    ids contain the stop string `stop_reason`. A turn `by_ids` had a prompt of ids, whose messages
    are unknown: it is matched by its ids, never by messages. `notes` is the client's annotation as
    JSON: a user, metadata. `origin` is what its harness sent about itself.

    `new_messages` and `prompt` are shared between turns of the same request. `continues` marks a
    turn that continues its aborted parent: its `reply` replaces the parent's. `kept_of` is the
    index of an aborted turn of which this one holds the first tokens: those that the agent
    continued from.
    """

    index: int
    parent: Node | None
    start: int
    new_messages: tuple[Message, ...]
    reply: Message
    tools: bytes
    prompt: array[int]
    sampled: array[int]
    logprobs: array[float]
    versions: tuple[VersionSpan, ...]
    finish: Finish
    logprob_mode: LogprobMode
    temperature: float
    worker: str | None = None
    adapter: str | None = None
    request_id: str = ""
    experts: RoutedExperts | None = None
    support: Support | None = None
    continues: bool = False
    after_tool: bool = False
    thought: bool = False
    breaks: tuple[str, ...] = ()
    shaping: Shaping | None = None
    stop_reason: str | None = None
    stop_tokens: int = 0
    tool_parse_error: str | None = None
    by_ids: bool = False
    notes: bytes = b""
    origin: Origin | None = None
    kept_of: int | None = None
    children: list[Node] = field(default_factory=list, repr=False)

    @property
    def sampled_start(self) -> int:
        """Position of the first sampled id."""
        return self.start + len(self.prompt)

    @property
    def end(self) -> int:
        return self.sampled_start + len(self.sampled)

    def path(self) -> list[Node]:
        """Return the turns from the root to this one."""
        nodes: list[Node] = [self]
        while (above := nodes[-1].parent) is not None:
            nodes.append(above)
        return nodes[::-1]

    def ids(self) -> array[int]:
        """Return every id from the first prompt to the last sampled token."""
        joined = array(IDS)
        for node in self.path():
            joined += node.prompt
            joined += node.sampled
        return joined

    def messages(self) -> tuple[Message, ...]:
        """Return the conversation up to and including this reply."""
        messages: list[Message] = []
        for node in self.path():
            if node.continues:
                messages.pop()
            messages += (*node.new_messages, node.reply)
        return tuple(messages)


@dataclass(frozen=True, slots=True)
class Reply:
    """Assistant message of a turn, and the error of a tool call that stayed text.

    `notes` is the client's annotation of the turn, `origin` what its harness sent about itself.
    """

    message: Any
    tool_parse_error: str | None = None
    notes: Mapping[str, Any] | None = None
    origin: Origin | None = None


@dataclass(frozen=True, slots=True)
class Match:
    """The stored turn whose conversation is the longest prefix of another."""

    node: Node | None = None
    length: int = 0


class ReplyPlace(NamedTuple):
    """A turn whose prompt a history begins with, and the position of its reply.

    `before` is the reply of the cut turns that it follows without a message between them: some
    agents send both replies as one message.
    """

    node: Node
    at: int
    before: Message | None = None

    @property
    def reply(self) -> Message:
        return self.node.reply if self.before is None else joined(self.before, self.node.reply)


def places(roots: Iterable[Node], messages: Sequence[Message]) -> Iterator[ReplyPlace]:
    """Yield the turns whose prompt the messages begin with, however their reply continues."""
    waiting: list[tuple[Node, int, Message | None]] = [(root, 0, None) for root in roots]
    while waiting:
        node, at, before = waiting.pop()
        if node.by_ids or not starts_with(messages, node.new_messages, at):
            continue
        place = ReplyPlace(node, at + len(node.new_messages), before)
        yield place
        fits = replied(place, messages)
        for child in node.children:
            if child.continues:
                waiting.append((child, place.at, before))
                continue
            if fits:
                waiting.append((child, place.at + 1, None))
            if node.finish == "abort" and not child.new_messages:
                waiting.append((child, place.at, place.reply))


def replied(place: ReplyPlace, messages: Sequence[Message]) -> bool:
    """Return whether the messages have the reply of a turn. One that was stored here is the same
    object."""
    if place.at >= len(messages):
        return False
    message = messages[place.at]
    return place.node.reply is message or same(place.reply, message)


def longest(roots: Iterable[Node], messages: Sequence[Message]) -> Match:
    """Return the longest stored history; among equals, the latest turn."""
    best, best_length = None, 0
    for place in places(roots, messages):
        node, length = place.node, place.at + 1
        if (best is None or (length, node.index) > (best_length, best.index)) and replied(
            place, messages
        ):
            best, best_length = node, length
    return Match(best, best_length)


def longest_by_ids(roots: Sequence[Node], ids: array[int]) -> tuple[Node | None, bool]:
    """Return the latest of the deepest turns whose ids `ids` begins with, and whether `ids` differs
    from what was sampled.

    It does if it continues a stored prompt with other tokens than those sampled there.
    """
    best: Node | None = None
    below = list(roots)
    while fitting := [node for node in below if _continued_by(node, ids)]:
        best = fitting[-1]
        below = [child for node in fitting for child in node.children]
    claims = any(
        len(ids) > node.sampled_start and _holds(ids, node.start, node.prompt)
        for node in below
        if len(node.prompt)
    )
    return best, claims


def _continued_by(node: Node, ids: array[int]) -> bool:
    return _holds(ids, node.start, node.prompt) and _holds(ids, node.sampled_start, node.sampled)


def _holds(ids: array[int], at: int, part: array[int]) -> bool:
    """Return whether `part` is at that position; the ends are compared first: most differ there."""
    end = at + len(part)
    if not part or len(ids) < end:
        return not part
    return ids[at] == part[0] and ids[end - 1] == part[-1] and ids[at:end] == part


def cost(node: Node, twin: Node | None) -> int:
    """Return the bytes that this node adds; what it shares with a twin is counted there."""
    own = 12 * len(node.sampled) + text_size(node.reply) + len(node.notes) + PER_NODE
    if node.origin is not None:
        own += PER_ORIGIN
    if node.experts is not None:
        own += memoryview(node.experts.data).nbytes
    if node.support is not None:
        own += node.support.nbytes
    if twin is None:
        own += 4 * len(node.prompt) + sum(map(text_size, node.new_messages)) + len(node.tools)
    return own


def text_size(message: Message) -> int:
    """Estimate the size of a message in characters, including the overhead of a message."""
    text = len(message.content) + len(message.reasoning or "") + len(message.extra)
    return 200 + text + sum(100 + len(call.arguments) for call in message.tool_calls)


def own_experts(
    parent: Node | None, experts: RoutedExperts | None, start: int
) -> RoutedExperts | None:
    """Return the expert rows that this turn adds, copied out of the response's buffer.

    The last token before the turn had no row yet, because it was not forwarded then. Raises
    BadExperts if rows are missing, or if the turn does not fit the earlier turns.
    """
    before = parent.experts if parent is not None else None
    if parent is not None and (before is None) != (experts is None):
        raise BadExperts(
            f"this turn came {'without' if experts is None else 'with'} routed experts, the turn "
            f"before {'with' if experts is None else 'without'}; request them on every turn or none"
        )
    if experts is None:
        return None
    if before is not None and (before.shape[1:], before.dtype) != (
        experts.shape[1:],
        experts.dtype,
    ):
        raise BadExperts(
            f"routed experts are {experts.dtype} of {experts.shape[1:]} per token, in the turn "
            f"before {before.dtype} of {before.shape[1:]}"
        )
    own = experts.from_row(max(start - 1, 0))
    return RoutedExperts(bytes(own.data), own.shape, own.dtype, own.start)
