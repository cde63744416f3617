"""Bridges: the ids that lead from a sampled turn to the next one without changing earlier ids.

A bridge returns the ids to append to the exact ids so far. It cannot change them, which keeps a
conversation append-only. The appended ids were not sampled, including the closing tokens of a turn
that was cut.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.render.family import TOOL, probe_tails
from lockstep.render.messages import Plain
from lockstep.render.template import Template
from lockstep.tokens.errors import BadRequest

log = logging.getLogger(__name__)

DUMMY = "BRIDGEANSWER"
_QUESTION: Plain = {"role": "user", "content": "Question."}
_PLAIN: Plain = {"role": "assistant", "content": DUMMY}
_CALL: Plain = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "q1w2e3r4t",
            "type": "function",
            "function": {"name": "look_up", "arguments": {"word": DUMMY}},
        }
    ],
}
_OTHER: Plain = {"role": "assistant", "content": "Earlier answer."}
_OTHER_CALL: Plain = {
    **_CALL,
    "tool_calls": [
        {**_CALL["tool_calls"][0], "function": {"name": "look_up", "arguments": {"word": "x"}}}
    ],
}
_RESULT: Plain = {"role": "tool", "tool_call_id": "q1w2e3r4t", "content": "Result."}


class FamilyBridge:
    """Bridge of a `renderers` family, with its result verified."""

    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer

    def extend(
        self,
        prompt_ids: list[int],
        completion_ids: list[int],
        messages: list[Plain],
        tools: list[Plain] | None,
    ) -> list[int] | None:
        """Return the ids after prompt + completion, or None if the family has no exact
        continuation.
        """
        try:
            rendered = self._renderer.bridge_to_next_turn(
                prompt_ids, completion_ids, messages, tools=tools
            )
        except Exception:
            # Third-party code on a caller's messages may raise anything. The template bridge is
            # tried next, and if that fails too, the caller sees a recorded break.
            log.debug("%s cannot bridge", type(self._renderer).__name__, exc_info=True)
            return None
        if rendered is None:
            return None
        ids = list(rendered.token_ids)
        before = len(prompt_ids) + len(completion_ids)
        # A family may drop the ids after the last closing token; then this is not a bridge.
        if ids[: len(prompt_ids)] != prompt_ids or ids[len(prompt_ids) : before] != completion_ids:
            return None
        return ids[before:]

    def agrees_with(self, template: Template, close: int | None) -> bool:
        """Return whether it writes the same as the template wherever the template only appends.

        `close` is the token that ends an assistant turn.
        """
        if not template.source:
            return True
        for history, reply, new, tools in probe_tails():
            if not template.accepts([*history, reply, *new], tools):
                continue
            prompt = template.ids(history, tools, add_generation_prompt=True)
            whole = template.ids([*history, reply, *new], tools, add_generation_prompt=True)
            closes = (at + 1 for at in range(len(prompt), len(whole)) if whole[at] == close)
            end = next(closes, None)
            if whole[: len(prompt)] != prompt or end is None:
                continue
            extension = self.extend(prompt, whole[len(prompt) : end], new, tools)
            # A family that declines here is tried again on the real turn; a wrong one never is.
            if extension is not None and extension != whole[end:]:
                return False
        return True


@dataclass(frozen=True, slots=True)
class _Way:
    """How a template continues to new messages: after which dummy reply, and depending on what.

    `contextual` means that the template repeats the system message or the tools beside the newest
    messages, as Mistral's templates do.
    """

    dummy: Plain
    contextual: bool


class TemplateBridge:
    """Bridge for any chat template: render a dummy turn and the new messages, keep what follows it.

    It is used only for patterns of roles that were verified on this template: the text after the
    closing token must be the same after different histories, with and without tools; or at least
    after different histories with the same system message and tools.
    """

    def __init__(self, template: Template) -> None:
        self._template = template
        self._checked: dict[tuple[tuple[str, ...], bool], _Way | None] = {}
        self.close = self._find_close()
        self._close_text = self._text_of(self.close)
        self._think = tuple(self._single(marker) for marker in ("<think>", "</think>"))

    @property
    def works(self) -> bool:
        """Whether the simplest case, a new user message, was verified."""
        return self._way(("user",), False) is not None

    def extend(
        self,
        completion_ids: Sequence[int],
        messages: list[Plain],
        tools: list[Plain] | None,
        *,
        system: Sequence[Plain],
        stop_ids: Sequence[int],
        after_tool: bool,
    ) -> list[int] | None:
        """Return the ids after the completion, or None if this template has no exact continuation.

        `system` is the message that opened the conversation, if any. `after_tool` says whether
        there were tool results before: some templates write the first ones differently.
        """
        way = self._way(_pattern(messages), after_tool)
        if way is None or self.close is None:
            return None
        history = _history(after_tool)
        if way.contextual:
            if DUMMY in json.dumps([*system, *(tools or ())], ensure_ascii=False):
                return None
            history = [*system, *history]
        try:
            text = self._text(history, way.dummy, messages, tools if way.contextual else None)
        except BadRequest:
            return None
        rest = self._after_close(text)
        if rest is None or not (way.contextual or self._appends(text, history, None)):
            return None
        return self._closing(completion_ids, stop_ids) + self._template.encode(rest)

    def _closing(self, completion_ids: Sequence[int], stop_ids: Sequence[int]) -> list[int]:
        """Return the closing tokens of a turn that was cut by length or by a stop string."""
        if self.close is None or (completion_ids and completion_ids[-1] in (*stop_ids, self.close)):
            return []
        opened, closed = self._think
        for token in reversed(completion_ids):
            if token == closed:
                break
            if token == opened and closed is not None:
                return [closed, self.close]
        return [self.close]

    def _way(self, pattern: tuple[str, ...], after_tool: bool) -> _Way | None:
        """Return the verified continuation for this pattern of roles; computed once."""
        key = (pattern, after_tool)
        if key not in self._checked:
            replies = (_CALL, _PLAIN) if pattern[:1] == ("tool",) else (_PLAIN,)
            self._checked[key] = next(
                (
                    _Way(reply, contextual)
                    for contextual in (False, True)
                    for reply in replies
                    if self._passes(reply, pattern, after_tool, contextual)
                ),
                None,
            )
        return self._checked[key]

    def _passes(
        self, reply: Plain, pattern: tuple[str, ...], after_tool: bool, contextual: bool
    ) -> bool:
        messages = [
            {**_RESULT, "content": f"Result {at}."}
            if role == "tool"
            else {"role": role, "content": f"Text {at}."}
            for at, role in enumerate(pattern)
        ]
        rests: dict[object, set[str | None]] = {}
        try:
            for context, history, tools in self._contexts(after_tool):
                text = self._text(history, reply, messages, tools)
                if contextual:
                    appends = _holds_in_order(self._after_close(text), messages)
                else:
                    appends = self._appends(text, history, tools)
                rest = self._after_close(text) if appends else None
                rests.setdefault(context if contextual else None, set()).add(rest)
        except BadRequest:
            return False
        return all(None not in texts and len(texts) == 1 for texts in rests.values())

    def _contexts(
        self, after_tool: bool
    ) -> Iterator[tuple[object, list[Plain], list[Plain] | None]]:
        """Yield histories of one kind, with the system message and tools a continuation may depend
        on.
        """
        base = _history(after_tool)
        more: Plain = {"role": "user", "content": "Another question."}
        yield (False, False), base, None
        for has_system in (False, True):
            system: list[Plain] = [{"role": "system", "content": "Be brief."}] * has_system
            for tools in (None, [TOOL]):
                for history in ([*system, *base], [*system, more, _OTHER, *base]):
                    if self._template.accepts(history, tools):
                        yield (has_system, bool(tools)), history, tools

    def _text(
        self,
        history: list[Plain],
        reply: Plain,
        messages: list[Plain],
        tools: list[Plain] | None,
    ) -> str:
        return self._template.text([*history, reply, *messages], tools, add_generation_prompt=True)

    def _appends(self, text: str, history: list[Plain], tools: list[Plain] | None) -> bool:
        """Return whether the template appends: one that moves new messages to the front does
        not.
        """
        return text.startswith(self._template.text(history, tools, add_generation_prompt=False))

    def _after_close(self, text: str) -> str | None:
        """Return the text after the dummy reply's closing token, or None if it cannot be
        located.
        """
        start = text.find(DUMMY)
        closed = text.find(self._close_text, start) if start >= 0 and self._close_text else -1
        return text[closed + len(self._close_text) :] if closed >= 0 else None

    def _find_close(self) -> int | None:
        """Return the special token that ends an assistant turn, or None if only text ends it."""
        try:
            text = self._template.text([_QUESTION, _PLAIN], None, add_generation_prompt=False)
        except BadRequest:
            return None
        after = (
            self._template.encode(text[text.find(DUMMY) + len(DUMMY) :]) if DUMMY in text else []
        )
        added = getattr(self._template.tokenizer, "added_tokens_decoder", {})
        return after[0] if after and after[0] in added else None

    def _text_of(self, token: int | None) -> str:
        return "" if token is None else str(self._template.tokenizer.convert_ids_to_tokens(token))

    def _single(self, marker: str) -> int | None:
        ids = self._template.encode(marker)
        return ids[0] if len(ids) == 1 else None


def _pattern(messages: list[Plain]) -> tuple[str, ...]:
    """Return the roles in order; more than two of a kind in a row count as two."""
    roles: list[str] = []
    for message in messages:
        if roles[-2:] != [message["role"]] * 2:
            roles.append(message["role"])
    return tuple(roles)


def _history(after_tool: bool) -> list[Plain]:
    return [_QUESTION, _OTHER_CALL, _RESULT, _OTHER, _QUESTION] if after_tool else [_QUESTION]


def _holds_in_order(rest: str | None, messages: list[Plain]) -> bool:
    """Return whether every new message occurs in the rest, in order."""
    at = 0
    for message in messages:
        at = rest.find(message["content"], at) if rest is not None else -1
        if at < 0:
            return False
    return True
