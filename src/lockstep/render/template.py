"""The tokenizer's own chat template, which defines the text of a whole conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from lockstep.render.control_text import MARK, ControlText
from lockstep.render.messages import Plain
from lockstep.tokens.errors import BadRequest

PINNED = {"date_string": "26 Jul 2024"}
"""Template variables that would otherwise depend on the date: one history, one prompt, any day."""

SHORT_ID = 9
"""Length of call ids for templates that require it (Mistral's)."""
_NAME, _VALUE = "probe_function", "probe_value"
_STYLES = ((False, False), (False, True), (True, False), (True, True))
"""Spellings of tool calls: (arguments as text, missing content as None), most common first."""


class Template:
    """Renders messages with the tokenizer's chat template, in the spelling the template needs."""

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.control: ControlText | None = None
        """Keeps control tokens in messages text; without it, they are control tokens."""
        self.source: str = str(getattr(tokenizer, "chat_template", "") or "")
        pinned = {name: value for name, value in PINNED.items() if name in self.source}
        self.kwargs = {**pinned, **(kwargs or {})}
        self._text_arguments, self._none_content = _STYLES[0]
        self._short_ids = False
        self._text_arguments, self._none_content = self._find_style()
        self._short_ids = self._wants_short_ids()

    def text(
        self, messages: Sequence[Plain], tools: list[Plain] | None, *, add_generation_prompt: bool
    ) -> str:
        """Return the conversation as text.

        `add_generation_prompt` ends it with the opening of an assistant turn. Control tokens in
        messages are marked, for `encode`. Raises BadRequest if the template rejects these messages.
        """
        spelled = [self._spell(message) for message in self.mark(messages)]
        try:
            rendered = self.tokenizer.apply_chat_template(
                spelled,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self.kwargs,
            )
        except Exception as error:
            # A template is a program of its own: any exception means that it rejected the messages.
            why = str(error).replace(MARK, "")
            raise BadRequest(
                f"the chat template refuses these messages: {why}", param="messages"
            ) from error
        return str(rendered)

    def mark(self, messages: Sequence[Plain]) -> Sequence[Plain]:
        """Return the messages with their control tokens marked as text."""
        return messages if self.control is None else self.control.mark(messages)

    def ids(
        self, messages: Sequence[Plain], tools: list[Plain] | None, *, add_generation_prompt: bool
    ) -> list[int]:
        """Return the conversation as token ids. Raises BadRequest like `text`."""
        return self.encode(self.text(messages, tools, add_generation_prompt=add_generation_prompt))

    def encode(self, text: str) -> list[int]:
        """Return the ids of template text, with nothing added before or after.

        Raises BadRequest for text that is not Unicode.
        """
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []
        except (TypeError, UnicodeEncodeError) as error:
            raise BadRequest(
                "the messages hold half a surrogate pair, which is no text; send valid Unicode",
                param="messages",
            ) from error

    def accepts(self, messages: Sequence[Plain], tools: list[Plain] | None) -> bool:
        try:
            self.text(messages, tools, add_generation_prompt=True)
        except BadRequest:
            return False
        return True

    def _spell(self, message: Plain) -> Plain:
        if self._short_ids:
            message = _with_short_ids(message)
        calls = message.get("tool_calls")
        if not calls:
            return message
        from json import dumps

        spelled = dict(message)
        if not spelled.get("content"):
            spelled["content"] = None if self._none_content else ""
        if self._text_arguments:
            spelled["tool_calls"] = [
                {
                    **call,
                    "function": {
                        **call["function"],
                        "arguments": arguments
                        if isinstance(arguments := call["function"]["arguments"], str)
                        else dumps(arguments, ensure_ascii=False),
                    },
                }
                for call in calls
            ]
        return spelled

    def _find_style(self) -> tuple[bool, bool]:
        """Return the first spelling of a tool call that this template writes completely."""
        probe = _probe("c" * SHORT_ID)
        for style in _STYLES:
            self._text_arguments, self._none_content = style
            try:
                text = self.text(probe, None, add_generation_prompt=False)
            except BadRequest:
                continue
            if _NAME in text and _VALUE in text:
                return style
        # No spelling works: a template without tools, which rejects or ignores them in any
        # spelling.
        return _STYLES[0]

    def _wants_short_ids(self) -> bool:
        """Return whether it accepts tool calls but rejects ids in the usual form of servers."""
        return self.accepts(_probe("c" * SHORT_ID), None) and not self.accepts(
            _probe("call_0123456789abcdef"), None
        )


def _probe(call_id: str) -> list[Plain]:
    call = {"name": _NAME, "arguments": {"key": _VALUE}}
    return [
        {"role": "user", "content": "Question."},
        {
            "role": "assistant",
            "tool_calls": [{"id": call_id, "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": call_id, "content": "Result."},
    ]


def _with_short_ids(message: Plain) -> Plain:
    if calls := message.get("tool_calls"):
        return {
            **message,
            "tool_calls": [{**call, "id": _short_id(call.get("id", ""))} for call in calls],
        }
    if "tool_call_id" in message:
        return {**message, "tool_call_id": _short_id(message["tool_call_id"])}
    return message


def _short_id(call_id: str) -> str:
    """Return the id if it fits, else one derived from it, so that call and result still match."""
    if len(call_id) == SHORT_ID and call_id.isascii() and call_id.isalnum():
        return call_id
    return blake2b(call_id.encode(), digest_size=8).hexdigest()[:SHORT_ID]
