"""Seeded random conversations that exercise every branch of the chat format."""

from __future__ import annotations

import json
import random
from typing import Any

from tasks import CALC_TOOL

Message = dict[str, Any]

_TEXTS = (
    "",
    "Hello.",
    "What is 417 + 86?",
    "  spaces around  ",
    "\nnewline first",
    "newline last\n\n",
    "two\n\nparagraphs.\n- item",
    "naïve café, e\u0301 decomposed, \u0301 combining first",
    "数字 42 и текст 🙂",
    'quotes " and \\ and {"json": [1, 2]}',
    "<tool_response>\nnot a question\n</tool_response>",
    "  <tool_response>padded</tool_response>\n",
    "literal <|im_end|> inside",
    "tabs\tand\r\nCRLF",
)
_ASSISTANT_TEXTS = (
    *_TEXTS,
    "<think>\nsome reasoning\n</think>\n\nThe answer.",
    "no opening</think>answer",
    "<think></think>\n\n\nanswer",
    "<think>one<think>two</think>three</think>four",
)
_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {},
    {"expression": "1 + 2"},
    {"text": "é \n 数", "n": [1, 2.5, None, True]},
)
_TOOLS: tuple[dict[str, Any], ...] = (
    CALC_TOOL,
    {"type": "function", "function": {"name": "naïve", "description": "ünïcode"}},
)


def conversation(rng: random.Random) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """Return messages and tools, not necessarily in an order a sane client would send."""
    messages: list[Message] = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": _body(rng, _TEXTS)})
    for _ in range(rng.randint(1, 7)):
        role = rng.choice(("user", "user", "assistant", "assistant", "tool", "tools", "system"))
        if role == "assistant":
            messages.append(_assistant(rng))
        elif role == "tools":
            messages += [_plain(rng, "tool") for _ in range(rng.randint(2, 3))]
        else:
            messages.append(_plain(rng, role))
    tools = rng.choice((None, None, [], list(_TOOLS[:1]), list(_TOOLS)))
    return messages, tools


def _plain(rng: random.Random, role: str) -> Message:
    return {"role": role, "content": _body(rng, _TEXTS)}


def _body(rng: random.Random, texts: tuple[str, ...]) -> Any:
    """A text, mostly as a string, sometimes as a list of parts."""
    text = rng.choice(texts)
    if rng.random() < 0.1:
        return [{"type": "text", "text": text}, {"type": "text", "text": rng.choice(texts)}]
    return text


def _assistant(rng: random.Random) -> Message:
    message: Message = {"role": "assistant", "content": _body(rng, _ASSISTANT_TEXTS)}
    if rng.random() < 0.3:
        message["reasoning_content"] = rng.choice(("", "\n", "Let me think.", "\na\n\nb\n"))
    if rng.random() < 0.4:
        message["tool_calls"] = [_call(rng) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.3:
            message["content"] = None
    return message


def _call(rng: random.Random) -> dict[str, Any]:
    arguments: Any = rng.choice(_ARGUMENTS)
    if rng.random() < 0.4:
        arguments = json.dumps(arguments)
    call = {"name": rng.choice(("calc", "naïve")), "arguments": arguments}
    return call if rng.random() < 0.2 else {"id": "c1", "type": "function", "function": call}
