"""How much a request asks to be read, and whether that can fit the context at all.

Told before it is tokenized: tokenizing megabytes takes seconds, and hundreds of times their memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from lockstep.http.off_loop import off_loop
from lockstep.protocol.json.limits import RequestLimits
from lockstep.protocol.openai.chat_request import ChatRequest
from lockstep.render import Renderer
from lockstep.tokens.errors import PromptTooLong, TooLarge

SURE = 4
"""Text with fewer characters than this for each token of the context is tokenized as it is."""
SLICE = 1 << 15
MARGIN = 64
"""Characters tokenized at once, and how many tokens a cut may add, to be on the safe side."""


def texts_of(messages: Iterable[dict[str, Any]]) -> list[str]:
    """The text of the messages, as far as every chat template writes it."""
    texts: list[str] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            texts.append(content)
        elif isinstance(content, list):
            parts = (part.get("text") for part in content if isinstance(part, dict))
            texts += [text for text in parts if isinstance(text, str)]
    return texts


def check_characters(messages: Iterable[dict[str, Any]], limits: RequestLimits) -> None:
    """Raises TooLarge for more text than is tokenized where no context limits it."""
    characters = sum(map(len, (*texts_of(messages), *arguments_of(messages))))
    if characters > limits.characters:
        raise TooLarge(
            f"the text has {characters} characters: at most {limits.characters} are tokenized at "
            "once (--limit characters=NUMBER); send it in parts"
        )


def arguments_of(messages: Iterable[dict[str, Any]]) -> list[str]:
    """The arguments of the tool calls in the messages, as far as they are text."""
    arguments: list[str] = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call.get("function") if isinstance(call, dict) else None
            text = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(text, str):
                arguments.append(text)
    return arguments


async def check_chat_room(
    chat: ChatRequest, size: int, renderer: Renderer, limit: int | None
) -> None:
    """Raises PromptTooLong for a conversation, or tools, that cannot fit `limit` tokens.

    `size` is that of the body: its text has no more characters than it had bytes.
    """
    if limit is None or size <= SURE * limit:
        return
    await check_room(texts_of(chat.messages), renderer, limit, "messages")
    # Templates write JSON in their own ways, and not every one writes all of a schema.
    if arguments := arguments_of(chat.messages):
        await check_room(arguments, renderer, 2 * limit, "messages")
    if chat.tools:
        text = msgspec.json.encode(chat.tools).decode(errors="replace")
        await check_room([text], renderer, 2 * limit, "tools")


async def check_room(
    texts: Sequence[str], renderer: Renderer, limit: int | None, param: str
) -> None:
    """Raises PromptTooLong for text that cannot fit `limit` tokens, before all is tokenized."""
    if limit is not None and sum(map(len, texts)) > SURE * limit:
        await off_loop(True, _count, texts, renderer, limit, param)


def _count(texts: Sequence[str], renderer: Renderer, limit: int, param: str) -> None:
    tokens = 0
    for text in texts:
        for start in range(0, len(text), SLICE):
            try:
                piece = renderer.tokenizer.encode(
                    text[start : start + SLICE], add_special_tokens=False
                )
            except (TypeError, UnicodeEncodeError):
                return  # half a surrogate pair, which rendering refuses by name
            tokens += max(len(piece) - MARGIN, 0)
            if tokens > limit:
                raise PromptTooLong.of(tokens, limit, param=param)
