"""Search for the next prompt: the ids of the longest stored history, and a bridge to the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lockstep.http.off_loop import SHORT_EXTENSION_CHARACTERS
from lockstep.ledger.cut_turns import KeptPart, cut_turn, is_blank_after_cut
from lockstep.ledger.tree import Match, Node, longest, text_size
from lockstep.ledger.turn_cache import ReadMessages
from lockstep.render.messages import (
    Message,
    Plain,
    canonical,
    canonical_tools,
    has_assistant,
    leading_system,
    plain_messages,
    plain_tools,
    starts_with,
)
from lockstep.render.renderer import Renderer
from lockstep.tokens.errors import BadRequest

UNREAD = ReadMessages()
NO_MATCH = Match()
Cause = Literal[
    "edited_history",
    "reply_dropped",
    "tools_changed",
    "thinking_dropped",
    "truncated",
    "no_bridge",
]

EXPLAINED: dict[Cause, str] = {
    "edited_history": "the history holds an assistant turn that was not sampled in this session",
    "reply_dropped": "the history leaves out the reply to its first messages",
    "tools_changed": "the tools are not those of the turns before",
    "thinking_dropped": "the chat template drops thinking of earlier turns",
    "truncated": "the turn before was cut, and its format cannot close it",
    "no_bridge": "the chat template gives no exact way from the turn before to the new messages",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPlan:
    """A prompt to send, and where its turn will be stored.

    `matched` is the stored history that the request begins with. Its turn is the `parent`, unless
    a prefix break made a new branch: `cause` is that break, and `breaks` are all up to it.
    `partial` holds what an aborted turn had sampled already: the whole turn is
    `partial + completion.token_ids`. `by_ids` marks a prompt that came as ids. `kept_part` is
    the part of an aborted parent that the prompt continues from, None for all of it.
    """

    prompt_ids: Sequence[int]
    parent: Node | None
    new_messages: tuple[Message, ...]
    tools: bytes
    matched: Match = NO_MATCH
    cause: Cause | None = None
    breaks: tuple[str, ...] = ()
    continues: bool = False
    partial: tuple[int, ...] = ()
    by_ids: bool = False
    kept_part: KeptPart | None = None

    @property
    def bridged(self) -> bool:
        """Whether the prompt starts with every id of the turns before it."""
        return self.parent is not None


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A request in the forms to render and to compare, and the stored turns it begins with."""

    messages: list[Plain]
    tools: list[Plain] | None
    history: tuple[Message, ...]
    tools_key: bytes
    match: Match
    kept_part: KeptPart | None = None


def read_request(
    roots: Sequence[Node],
    messages: Iterable[Any],
    tools: Iterable[Any] | None,
    cached: ReadMessages = UNREAD,
) -> TurnRequest:
    """Return the request to match; the `cached` first messages are not read again.

    Raises BadRequest for messages that cannot be read, or add nothing.
    """
    plain, specs = plain_messages(messages, cached.plain), plain_tools(tools)
    history = (*cached.history, *map(canonical, plain[len(cached.history) :]))
    key = canonical_tools(specs)
    # Templates write the tools before the first message: with other tools no id would be the same.
    match = longest((root for root in roots if root.tools == key), history)
    if match.length == len(history) and (match.node is None or match.node.finish != "abort"):
        raise BadRequest(
            "messages end with a turn of this session and add nothing new; append a message",
            param="messages",
        )
    return TurnRequest(plain, specs, _with_stored_reply(history, match), key, match)


def _with_stored_reply(history: tuple[Message, ...], match: Match) -> tuple[Message, ...]:
    """Return the history with the stored reply in place of an equal one, so that it is in memory
    once and the next turn does not compare them again.
    """
    if match.node is None or match.node.reply != history[match.length - 1]:
        return history
    return (*history[: match.length - 1], match.node.reply, *history[match.length :])


def find_prompt(request: TurnRequest, roots: Sequence[Node], renderer: Renderer) -> PromptPlan:
    """Return the plan of a request; where it has a parent, with only the ids that follow it.

    The ledger puts the ids of the parent before them. Raises BadRequest when the template refuses
    the messages.
    """
    request = _after_cuts(request, roots, renderer)
    cause, matched = _claims(request, roots)
    node = matched.node if cause is None else None
    if node is not None:
        ids, cause = _extended(request, node, renderer)
        if ids is not None:
            return _plan(request, ids, matched)
    whole = renderer.render_plain(request.messages, request.tools)
    if node is not None:
        # A format without a bridge may still append: its whole render is then exact by itself.
        stored = _ids_before(request, node)
        if len(whole) > len(stored) and whole[: len(stored)] == stored:
            return _plan(request, whole[len(stored) :], matched)
    return _plan(request, whole, matched, cause)


def _plan(
    request: TurnRequest, ids: list[int], matched: Match, cause: Cause | None = None
) -> PromptPlan:
    before = matched.node.breaks if matched.node is not None else ()
    return PromptPlan(
        prompt_ids=ids,
        parent=matched.node if cause is None else None,
        new_messages=request.history[matched.length :] if cause is None else request.history,
        tools=request.tools_key,
        matched=matched,
        cause=cause,
        breaks=before if cause is None else (*before, cause),
        kept_part=request.kept_part if cause is None and matched.node is not None else None,
    )


def _after_cuts(request: TurnRequest, roots: Sequence[Node], renderer: Renderer) -> TurnRequest:
    """Return the request with its match extended over turns that were cut, and without the blank
    messages that the agent inserted after them.
    """
    own = [root for root in roots if root.tools == request.tools_key]
    while (at := _next_assistant(request)) is not None:
        if is_blank_after_cut(own, request.history, at):
            history = (*request.history[:at], *request.history[at + 1 :])
            request = replace(
                request,
                messages=[*request.messages[:at], *request.messages[at + 1 :]],
                history=history,
                match=request.match if request.kept_part else longest(own, history),
            )
            continue
        cut = None if request.kept_part else cut_turn(own, request.history, at, renderer)
        if cut is None:
            break
        node, part = cut
        request = replace(request, match=Match(node, at + 1), kept_part=part)
    return request


def _next_assistant(request: TurnRequest) -> int | None:
    """Return the position of the first assistant message after the stored history."""
    start = request.match.length
    new = enumerate(request.history[start:], start)
    return next((at for at, message in new if message.role == "assistant"), None)


def _ids_before(request: TurnRequest, node: Node) -> list[int]:
    """Return the stored ids that the prompt begins with."""
    ids = node.ids().tolist()
    return (
        ids if request.kept_part is None else ids[: node.sampled_start + request.kept_part.tokens]
    )


def light_prompt(request: TurnRequest, renderer: Renderer) -> PromptPlan | None:
    """Return the plan of a turn that only appends a little; None where it takes longer to find.

    It is what `find_prompt` finds, without waiting for a thread, which takes longer than this.
    """
    match = request.match
    new = request.history[match.length :]
    if match.node is None or renderer.thinking == "template" or has_assistant(new):
        return None
    if sum(map(text_size, new)) > SHORT_EXTENSION_CHARACTERS:
        return None
    ids, _ = _extended(request, match.node, renderer)
    return None if ids is None else _plan(request, ids, match)


def _claims(request: TurnRequest, roots: Sequence[Node]) -> tuple[Cause | None, Match]:
    """Return whether the request contains turns that this session did not sample in that way."""
    match = request.match
    # Only assistant messages claim something about what was sampled; others are simply new.
    if not has_assistant(request.history[match.length :]):
        # A turn that was left out later is a branch: its prompt is still the exact beginning.
        dropped = match.node is None and _drops_first_reply(request, roots)
        return "reply_dropped" if dropped else None, match
    if _imported(request.history, roots):
        return None, Match()
    other = longest((root for root in roots if root.tools != request.tools_key), request.history)
    # The longer match is the better explanation: an agent that switches tools in the middle keeps
    # its whole history, while an edit cuts the match short.
    if other.length > match.length:
        return "tools_changed", other
    return "edited_history", match


def _drops_first_reply(request: TurnRequest, roots: Sequence[Node]) -> bool:
    """Return whether the history continues a first prompt as if it had no reply.

    A harness that names its context windows leaves replies out where it compacts them.
    """
    return any(
        root.tools == request.tools_key
        and not root.children
        and root.finish != "abort"
        and not root.by_ids
        and not (root.origin and root.origin.window)
        and len(root.new_messages) < len(request.history)
        and starts_with(request.history, root.new_messages)
        for root in roots
    )


def _imported(history: Sequence[Message], roots: Sequence[Node]) -> bool:
    """Return whether its assistant turns came from outside: examples that open a conversation.

    They did if nothing is stored yet, or if an earlier conversation opened with the same ones.
    """
    last = max(at for at, message in enumerate(history) if message.role == "assistant")
    opening = history[: last + 1]
    return not roots or any(
        not root.breaks
        and len(root.new_messages) > last
        and starts_with(root.new_messages, opening)
        for root in roots
    )


def _extended(
    request: TurnRequest, node: Node, renderer: Renderer
) -> tuple[list[int] | None, Cause | None]:
    """Return the ids after the stored ones, or the cause why there is no exact continuation."""
    dropped = False
    if renderer.thinking == "template":
        ids = _ids_before(request, node)
        # The template decides what it keeps of earlier thinking, so it has to render everything.
        whole = renderer.render_plain(_restored(request, node), request.tools)
        if whole[: len(ids)] == ids:
            return whole[len(ids) :], None
        dropped = any(turn.thought for turn in node.path())
    # A turn that continues an aborted one has part of the reply in its prompt. The bridge needs the
    # prompt that opened the reply, and all of the reply.
    opened = node
    while opened.continues and opened.parent is not None:
        opened = opened.parent
    extension = renderer.extend(
        opened.prompt.tolist(),
        _ids_before(request, node)[opened.sampled_start :],
        request.messages[request.match.length :],
        request.tools,
        system=leading_system(request.messages),
        after_tool=node.after_tool,
        # Only a family knows whether its template still keeps this thinking.
        family_only=dropped,
    )
    if extension is not None:
        return extension, None
    if dropped:
        return None, "thinking_dropped"
    return None, "truncated" if node.finish in ("length", "abort") else "no_bridge"


def _restored(request: TurnRequest, node: Node) -> list[Plain]:
    """Return the messages with the reasoning that the client did not send back."""
    restored, stored_messages = list(request.messages), node.messages()
    if len(stored_messages) != request.match.length:
        return restored  # the agent sends the replies around a cut as one message
    for at, stored in enumerate(stored_messages):
        if stored.reasoning and "reasoning_content" not in restored[at]:
            restored[at] = {**restored[at], "reasoning_content": stored.reasoning}
    return restored
