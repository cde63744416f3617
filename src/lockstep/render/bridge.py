"""Finds the ids that lead from a sampled turn to the next one, without changing what is there.

A bridge returns what to append to the exact ids so far. It has no way to change them: that is
what keeps a conversation append only. What it appends was not sampled, the close tokens of a turn
that was cut included.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
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
    """The bridge that a family of `renderers` brings, held to its promise."""

    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer

    def extend(
        self,
        prompt_ids: list[int],
        completion_ids: list[int],
        messages: list[Plain],
        tools: list[Plain] | None,
    ) -> list[int] | None:
        """What follows prompt + completion, or None where the family has no exact way on."""
        try:
            rendered = self._renderer.bridge_to_next_turn(
                prompt_ids, completion_ids, messages, tools=tools
            )
        except Exception:
            # Third-party code over a caller's messages; the template bridge is tried next, and
            # if that fails too the caller sees a recorded break.
            log.debug("%s cannot bridge", type(self._renderer).__name__, exc_info=True)
            return None
        if rendered is None:
            return None
        ids = list(rendered.token_ids)
        before = len(prompt_ids) + len(completion_ids)
        # A family may cut what follows the last close token; then this is no bridge.
        if ids[: len(prompt_ids)] != prompt_ids or ids[len(prompt_ids) : before] != completion_ids:
            return None
        return ids[before:]

    def agrees_with(self, template: Template, close: int | None) -> bool:
        """Whether it writes what the template writes, wherever the template only appends.

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


class TemplateBridge:
    """A bridge for any chat template: a dummy turn before the new messages, and what follows it.

    It is only used for a pattern of roles that was checked on this template: what follows the
    close token must be the same after different histories, with and without tools.
    """

    def __init__(self, template: Template) -> None:
        self._template = template
        self._checked: dict[tuple[tuple[str, ...], bool], Plain | None] = {}
        self.close = self._find_close()
        self._close_text = self._text_of(self.close)
        self._think = tuple(self._single(marker) for marker in ("<think>", "</think>"))

    @property
    def works(self) -> bool:
        """Whether the plainest case, a new user message, passed its check."""
        return self._dummy(("user",), False) is not None

    def extend(
        self,
        completion_ids: Sequence[int],
        messages: list[Plain],
        *,
        stop_ids: Sequence[int],
        after_tool: bool,
    ) -> list[int] | None:
        """What follows the completion, or None where this template gives no exact way on.

        `after_tool` says whether there were tool results before: some templates write the first
        ones differently.
        """
        dummy = self._dummy(_pattern(messages), after_tool)
        if dummy is None or self.close is None:
            return None
        try:
            rest = self._rest(_history(after_tool), dummy, messages, None)
        except BadRequest:
            return None
        if rest is None:
            return None
        return self._closing(completion_ids, stop_ids) + self._template.encode(rest)

    def _closing(self, completion_ids: Sequence[int], stop_ids: Sequence[int]) -> list[int]:
        """The close of a turn that did not close itself: cut by length, or by a stop string."""
        if self.close is None or (completion_ids and completion_ids[-1] in (*stop_ids, self.close)):
            return []
        opened, closed = self._think
        for token in reversed(completion_ids):
            if token == closed:
                break
            if token == opened and closed is not None:
                return [closed, self.close]
        return [self.close]

    def _dummy(self, pattern: tuple[str, ...], after_tool: bool) -> Plain | None:
        """The dummy reply that bridges to this pattern of roles, found and checked once."""
        key = (pattern, after_tool)
        if key not in self._checked:
            replies = (_CALL, _PLAIN) if pattern[0] == "tool" else (_PLAIN,)
            passed = (each for each in replies if self._passes(each, pattern, after_tool))
            self._checked[key] = next(passed, None)
        return self._checked[key]

    def _passes(self, reply: Plain, pattern: tuple[str, ...], after_tool: bool) -> bool:
        messages = [
            {**_RESULT, "content": f"Result {at}."}
            if role == "tool"
            else {"role": role, "content": f"Text {at}."}
            for at, role in enumerate(pattern)
        ]
        rests = set()
        try:
            rest = self._rest(_history(after_tool), reply, messages, None)
            rests.add(rest)
            for history in _histories(after_tool):
                for tools in (None, [TOOL]):
                    if self._template.accepts(history, tools):
                        rests.add(self._rest(history, reply, messages, tools))
        except BadRequest:
            return False
        return None not in rests and len(rests) == 1

    def _rest(
        self,
        history: list[Plain],
        reply: Plain,
        messages: list[Plain],
        tools: list[Plain] | None,
    ) -> str | None:
        """The text after the close of the dummy reply, or None when it cannot be told apart."""
        text = self._template.text([*history, reply, *messages], tools, add_generation_prompt=True)
        start = text.find(DUMMY)
        closed = text.find(self._close_text, start) if start >= 0 and self._close_text else -1
        # A template that moves new messages to the front does not append.
        if closed < 0 or not text.startswith(
            self._template.text(history, tools, add_generation_prompt=False)
        ):
            return None
        return text[closed + len(self._close_text) :]

    def _find_close(self) -> int | None:
        """The special token that ends an assistant turn, or None when text alone ends it."""
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
    """The roles in order; more than two of a kind in a row are written like two."""
    roles: list[str] = []
    for message in messages:
        if roles[-2:] != [message["role"]] * 2:
            roles.append(message["role"])
    return tuple(roles)


def _history(after_tool: bool) -> list[Plain]:
    return [_QUESTION, _OTHER_CALL, _RESULT, _OTHER, _QUESTION] if after_tool else [_QUESTION]


def _histories(after_tool: bool) -> list[list[Plain]]:
    """Other histories of the same kind."""
    system: Plain = {"role": "system", "content": "Be brief."}
    more: Plain = {"role": "user", "content": "Another question."}
    base = _history(after_tool)
    return [[more, _OTHER, *base], [system, *base]]
