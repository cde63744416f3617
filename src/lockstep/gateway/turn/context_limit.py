"""Rejects text that cannot fit the model's context, before all of it is tokenized.

Tokenizing megabytes takes seconds, and hundreds of times their size in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request

from lockstep.gateway.turn.harness import origin_of
from lockstep.http.off_loop import off_loop
from lockstep.protocol.json.strict import RequestLimits
from lockstep.protocol.openai.chat_request import ChatRequest
from lockstep.render import Renderer
from lockstep.tokens.errors import PromptTooLong, TooLarge

CHARACTERS_PER_TOKEN = 4
"""Text with at most this many characters for each token of the context is not counted first."""
SLICE_CHARACTERS = 1 << 15
"""Characters that are tokenized at once while counting."""
SLICE_MARGIN = 64
"""Tokens that cutting the text may add to a slice, which do not count."""


def texts_of(messages: Iterable[dict[str, Any]]) -> list[str]:
    """Return the texts of messages, as far as every chat template writes them."""
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
    """Raise TooLarge for more text than is tokenized at once, where no context limits it."""
    characters = sum(map(len, (*texts_of(messages), *_arguments_of(messages))))
    if characters > limits.characters:
        raise TooLarge(
            f"the text has {characters} characters: at most {limits.characters} are tokenized at "
            "once (--limit characters=NUMBER); send it in parts"
        )


def name_harness(error: PromptTooLong, http: Request, messages: Any) -> PromptTooLong:
    """Return the error with the harness whose first prompt is too long: it can shorten nothing."""
    harness = origin_of(http, messages).harness
    if not harness or any(message.get("role") == "assistant" for message in messages):
        return error
    advice = f" It is the first prompt of {harness}: serve a model with a longer context."
    return error.with_message(error.message + advice)


def _arguments_of(messages: Iterable[dict[str, Any]]) -> list[str]:
    """Return the arguments of the tool calls in messages, as far as they are text."""
    arguments: list[str] = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call.get("function") if isinstance(call, dict) else None
            text = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(text, str):
                arguments.append(text)
    return arguments


async def check_chat_fits(chat: ChatRequest, renderer: Renderer, limit: int) -> None:
    """Raise PromptTooLong for a conversation or tools that cannot fit `limit` tokens."""
    await check_text_fits(texts_of(chat.messages), renderer, limit, "messages")
    # Twice the limit for JSON: templates write it in their own ways, and some not all of a schema.
    if arguments := _arguments_of(chat.messages):
        await check_text_fits(arguments, renderer, 2 * limit, "messages")
    if chat.tools:
        text = msgspec.json.encode(chat.tools).decode(errors="replace")
        await check_text_fits([text], renderer, 2 * limit, "tools")


async def check_text_fits(
    texts: Sequence[str], renderer: Renderer, limit: int | None, param: str
) -> None:
    """Raise PromptTooLong for text that cannot fit `limit` tokens, before all is tokenized."""
    if limit is not None and sum(map(len, texts)) > CHARACTERS_PER_TOKEN * limit:
        await off_loop(True, _count_tokens, texts, renderer, limit, param)


def _count_tokens(texts: Sequence[str], renderer: Renderer, limit: int, param: str) -> None:
    tokens = 0
    for text in texts:
        for start in range(0, len(text), SLICE_CHARACTERS):
            try:
                piece = renderer.tokenizer.encode(
                    text[start : start + SLICE_CHARACTERS], add_special_tokens=False
                )
            except (TypeError, UnicodeEncodeError):
                return  # half a surrogate pair, which rendering rejects by name
            tokens += max(len(piece) - SLICE_MARGIN, 0)
            if tokens > limit:
                raise PromptTooLong.of(tokens, limit, param=param)
