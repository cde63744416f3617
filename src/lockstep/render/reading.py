"""What the sampled ids of an answer say: the one reading that client and gateway share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lockstep.render.parsed_message import ParsedMessage
from lockstep.render.renderer import Renderer

LONG = 2000
"""Tokens from which on an answer is read off the event loop."""


def read_completion(
    renderer: Renderer,
    token_ids: Sequence[int],
    tools: Sequence[Any] | None,
    prompt_ids: Sequence[int],
    *,
    verbatim: bool = False,
) -> ParsedMessage:
    """What an answer says, with the space around its parts taken off.

    Without `tools` nothing is a call: what looks like one is content. `verbatim` takes the whole
    as content, space and all: the rest of a message that somebody else began.
    """
    if verbatim:
        return ParsedMessage(renderer.decode(_before_stop(renderer, token_ids)))
    answer = renderer.parse(token_ids, tools, prompt_ids=prompt_ids)
    content = answer.content
    if answer.calls and not tools:
        spans = [call.span[0] for call in answer.calls if call.span is not None]
        written = _before_stop(renderer, token_ids)[min(spans) :] if spans else []
        content = f"{content}\n{renderer.decode(written)}"
        answer = replace(answer, calls=())
    reasoning = (answer.reasoning or "").strip() or None
    return replace(answer, content=content.strip(), reasoning=reasoning)


async def read_completion_async(
    renderer: Renderer,
    token_ids: Sequence[int],
    tools: Sequence[Any] | None,
    prompt_ids: Sequence[int],
    *,
    verbatim: bool = False,
) -> ParsedMessage:
    """`read_completion`; a long answer is read off the event loop."""
    args = (renderer, token_ids, tools, prompt_ids)
    if len(token_ids) < LONG:
        return read_completion(*args, verbatim=verbatim)
    return await renderer.offload(read_completion, *args, verbatim=verbatim)


def _before_stop(renderer: Renderer, token_ids: Sequence[int]) -> list[int]:
    stops = frozenset(renderer.stop_token_ids)
    end = next((at for at, token in enumerate(token_ids) if token in stops), len(token_ids))
    return list(token_ids[:end])
