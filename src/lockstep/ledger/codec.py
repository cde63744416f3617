"""Encoding of a session's turns for database rows, and decoding."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence

import msgspec

from lockstep.ledger.origin import Origin
from lockstep.ledger.tree import IDS, LOGPROBS, Node
from lockstep.render.messages import Message
from lockstep.tokens import Finish, LogprobMode, RoutedExperts, Shaping, Support, VersionSpan
from lockstep.tokens.errors import BadRequest


class _Experts(msgspec.Struct, array_like=True):
    data: bytes
    shape: tuple[int, int, int]
    dtype: str
    start: int


class _Support(msgspec.Struct, array_like=True):
    counts: bytes
    data: bytes
    vocab: int


class _Turn(msgspec.Struct, array_like=True):
    """A node; `twin` is an earlier one of the same request, whose prompt is not repeated."""

    parent: int | None
    twin: int | None
    new_messages: tuple[Message, ...]
    reply: Message
    tools: bytes
    prompt: bytes
    sampled: bytes
    logprobs: bytes
    versions: list[tuple[str, int, int]]
    finish: Finish
    logprob_mode: LogprobMode
    temperature: float
    worker: str | None
    adapter: str | None
    request_id: str
    experts: _Experts | None
    continues: bool
    after_tool: bool
    thought: bool
    breaks: tuple[str, ...]
    shaping: Shaping | None = None
    stop_reason: str | None = None
    stop_tokens: int = 0
    tool_parse_error: str | None = None
    by_ids: bool = False
    notes: bytes = b""
    origin: Origin | None = None
    support: _Support | None = None
    kept_of: int | None = None


_TURN = msgspec.msgpack.Decoder(_Turn)


def dump_turn(node: Node, twin: Node | None) -> bytes:
    """Encode one turn for its own row; `twin` is the turn it shares its prompt with."""
    return msgspec.msgpack.encode(_turn(node, None if twin is None else twin.index))


def load_turns(
    rows: Iterable[bytes], before: Sequence[Node] = ()
) -> list[tuple[Node, Node | None]]:
    """Return the nodes of turns stored one by one, in order, each with its twin, if any.

    `before` are the nodes of the earlier turns. Raises BadRequest if they are not the turns of a
    session.
    """
    try:
        return _linked((_TURN.decode(row) for row in rows), before)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise BadRequest(f"a row is not a stored turn: {error}") from error


def _linked(turns: Iterable[_Turn], before: Sequence[Node]) -> list[tuple[Node, Node | None]]:
    nodes, new = list(before), []
    for turn in turns:
        for name, index in (
            ("parent", turn.parent),
            ("twin", turn.twin),
            ("kept_of", turn.kept_of),
        ):
            if index is not None and not 0 <= index < len(nodes):
                raise BadRequest(
                    f"turn {len(nodes)} of the stored session has {name} {index}, "
                    "expected an earlier turn"
                )
        parent = nodes[turn.parent] if turn.parent is not None else None
        twin = nodes[turn.twin] if turn.twin is not None else None
        nodes.append(_node(len(nodes), turn, parent, twin))
        new.append((nodes[-1], twin))
    return new


def _turn(node: Node, twin: int | None) -> _Turn:
    experts = node.experts
    return _Turn(
        parent=node.parent.index if node.parent is not None else None,
        twin=twin,
        new_messages=() if twin is not None else node.new_messages,
        reply=node.reply,
        tools=b"" if twin is not None else node.tools,
        prompt=b"" if twin is not None else _pack(node.prompt),
        sampled=_pack(node.sampled),
        logprobs=_pack(node.logprobs),
        versions=[(span.version, span.start, span.end) for span in node.versions],
        finish=node.finish,
        logprob_mode=node.logprob_mode,
        temperature=node.temperature,
        worker=node.worker,
        adapter=node.adapter,
        request_id=node.request_id,
        experts=None
        if experts is None
        else _Experts(bytes(experts.data), experts.shape, experts.dtype, experts.start),
        continues=node.continues,
        after_tool=node.after_tool,
        thought=node.thought,
        breaks=node.breaks,
        shaping=node.shaping,
        stop_reason=node.stop_reason,
        stop_tokens=node.stop_tokens,
        tool_parse_error=node.tool_parse_error,
        by_ids=node.by_ids,
        notes=node.notes,
        origin=node.origin,
        support=None
        if node.support is None
        else _Support(bytes(node.support.counts), bytes(node.support.data), node.support.vocab),
        kept_of=node.kept_of,
    )


def _node(index: int, turn: _Turn, parent: Node | None, twin: Node | None) -> Node:
    experts = turn.experts
    sampled: array[int] = array(IDS)
    logprobs: array[float] = array(LOGPROBS)
    _unpack(sampled, turn.sampled)
    _unpack(logprobs, turn.logprobs)
    prompt = twin.prompt if twin is not None else array(IDS)
    if twin is None:
        _unpack(prompt, turn.prompt)
    if len(sampled) != len(logprobs):
        raise BadRequest(
            f"turn {index} of the stored session has {len(sampled)} ids "
            f"and {len(logprobs)} logprobs"
        )
    return Node(
        index=index,
        parent=parent,
        start=parent.end if parent is not None else 0,
        new_messages=twin.new_messages if twin is not None else turn.new_messages,
        reply=turn.reply,
        tools=twin.tools if twin is not None else turn.tools,
        prompt=prompt,
        sampled=sampled,
        logprobs=logprobs,
        versions=tuple(VersionSpan(*span) for span in turn.versions),
        finish=turn.finish,
        logprob_mode=turn.logprob_mode,
        temperature=turn.temperature,
        worker=turn.worker,
        adapter=turn.adapter,
        request_id=turn.request_id,
        experts=None
        if experts is None
        else RoutedExperts(experts.data, experts.shape, experts.dtype, experts.start),
        continues=turn.continues,
        after_tool=turn.after_tool,
        thought=turn.thought,
        breaks=turn.breaks,
        shaping=turn.shaping,
        stop_reason=turn.stop_reason,
        stop_tokens=turn.stop_tokens,
        tool_parse_error=turn.tool_parse_error,
        by_ids=turn.by_ids,
        notes=turn.notes,
        origin=turn.origin,
        support=None
        if turn.support is None
        else Support(turn.support.counts, turn.support.data, turn.support.vocab),
        kept_of=turn.kept_of,
    )


def _pack(values: array[int] | array[float]) -> bytes:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def _unpack(into: array[int] | array[float], data: bytes) -> None:
    if len(data) % into.itemsize:
        raise BadRequest(f"a stored array has {len(data)} bytes, expected whole {into.itemsize}s")
    into.frombytes(data)
    if sys.byteorder == "big":
        into.byteswap()
