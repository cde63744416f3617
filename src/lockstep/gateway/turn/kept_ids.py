"""Prompts that start with ids which the client kept: NeMo-RL's prefix, NeMo-Gym's messages.

In both, the ids are the conversation up to the last assistant turn, or up to the last message if
there is no such turn. The bridge appends the rest. Ids that cannot be those of the messages are
rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from lockstep.protocol.openai.chat_request import ChatRequest
from lockstep.render import Renderer, plain_messages, plain_tools
from lockstep.render.messages import Plain, leading_system
from lockstep.tokens.errors import BadRequest, BadTokenId, PrefixBreak
from lockstep.tokens.ids import check_ids

PROMPT, SAMPLED, LOGPROBS = "prompt_token_ids", "generation_token_ids", "generation_log_probs"
KEPT_FIELDS = frozenset({PROMPT, SAMPLED, LOGPROBS})
"""Fields of a message that carry token ids and their logprobs."""
PLACES = 2**31
"""Upper bound of ids here; the engine knows which of them exist."""


@dataclass(frozen=True, slots=True)
class KeptIds:
    """The ids of a turn that the client kept; `field` is where it sent them."""

    field: str
    prompt_ids: list[int]
    completion_ids: list[int]


def bare_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages without the token ids that some carry, which templates must not see."""
    return [
        {key: value for key, value in message.items() if key not in KEPT_FIELDS}
        if SAMPLED in message or PROMPT in message
        else message
        for message in messages
    ]


def read_kept_ids(messages: Sequence[dict[str, Any]]) -> KeptIds | None:
    """Return the ids that the last assistant message carries, None if it carries none.

    Raises BadRequest when a field is missing, when lengths differ, or when the prompt of a turn
    does not start with the ids of the turn before.
    """
    last: KeptIds | None = None
    for at, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        here = _read_message(message, f"messages[{at}]")
        if here is None:
            if last is not None:
                raise BadRequest(
                    f"messages[{at}] carries no token ids, but an assistant message before it "
                    f"does: send {PROMPT}, {SAMPLED} and {LOGPROBS} with the last one",
                    param=f"messages[{at}]",
                )
            continue
        if last is not None:
            before = last.prompt_ids + last.completion_ids
            if here.prompt_ids[: len(before)] != before:
                raise BadRequest(
                    f"{here.field}.{PROMPT} does not start with the {len(before)} ids of the turn "
                    "before it: these are not turns of one conversation",
                    param=f"{here.field}.{PROMPT}",
                )
        last = here
    return last


def _read_message(message: dict[str, Any], where: str) -> KeptIds | None:
    fields = {key: message.get(key) for key in (PROMPT, SAMPLED, LOGPROBS)}
    missing = [key for key, value in fields.items() if value is None]
    if len(missing) == len(fields):
        return None
    if missing:
        raise BadRequest(
            f"{where}.{missing[0]} is missing: {PROMPT}, {SAMPLED} and {LOGPROBS} come together",
            param=f"{where}.{missing[0]}",
        )
    prompt, sampled = _ids(fields[PROMPT], where, PROMPT), _ids(fields[SAMPLED], where, SAMPLED)
    scores = fields[LOGPROBS]
    if not isinstance(scores, list) or len(scores) != len(sampled):
        raise BadRequest(
            f"{where}.{LOGPROBS} does not have one entry for each of {len(sampled)} ids in "
            f"{SAMPLED}",
            param=f"{where}.{LOGPROBS}",
        )
    check_ids(prompt, PLACES, f"{where}.{PROMPT}")
    if sampled:
        check_ids(sampled, PLACES, f"{where}.{SAMPLED}")
    return KeptIds(where, prompt, sampled)


def _ids(value: Any, where: str, key: str) -> list[int]:
    try:
        return msgspec.convert(value, list[int])
    except msgspec.ValidationError as error:
        raise BadTokenId(f"{where}.{key}: {error}", param=f"{where}.{key}") from None


def prompt_from_kept(chat: ChatRequest, kept_ids: KeptIds | None, renderer: Renderer) -> list[int]:
    """Return the kept ids followed by those of the new messages.

    Raises BadRequest when they cannot be the ids of these messages, and PrefixBreak when the chat
    format has no exact bridge from them to the new messages.
    """
    messages, tools = plain_messages(bare_messages(chat.messages)), plain_tools(chat.tools)
    turn = max(
        (at for at, message in enumerate(messages) if message["role"] == "assistant"), default=-1
    )
    required = chat.required_prefix_token_ids
    if turn < 0 and kept_ids is None and required is not None:
        return _open_assistant_turn(required, messages, tools, renderer)
    if turn < 0 or turn + 1 == len(messages):
        field = "required_prefix_token_ids" if kept_ids is None else kept_ids.field
        raise BadRequest(
            f"{field}: the ids end with an assistant turn, so the messages must hold one, and new "
            "messages after it",
            param=field,
        )
    if kept_ids is None:
        kept_ids = _split(required or [], messages, turn, tools, renderer)
    elif required is not None and required != kept_ids.prompt_ids + kept_ids.completion_ids:
        raise BadRequest(
            f"required_prefix_token_ids are not the ids that {kept_ids.field} carries: send one of "
            "them",
            param="required_prefix_token_ids",
        )
    _check_fits(kept_ids, messages, turn, tools, renderer)
    # Some templates write the first tool results of a conversation differently.
    after_tool = any(message["role"] == "tool" for message in messages[:turn])
    extension = renderer.extend(
        kept_ids.prompt_ids,
        kept_ids.completion_ids,
        messages[turn + 1 :],
        tools,
        system=leading_system(messages),
        after_tool=after_tool,
    )
    if extension is None:
        raise PrefixBreak(
            "the chat format has no exact bridge from these ids to the new messages",
            cause="no_bridge",
            param=kept_ids.field,
        )
    return [*kept_ids.prompt_ids, *kept_ids.completion_ids, *extension]


def _open_assistant_turn(
    ids: list[int], messages: list[Plain], tools: list[Plain] | None, renderer: Renderer
) -> list[int]:
    """Return the client's ids of messages without an assistant turn, opened for one.

    Raises BadRequest when they spell something else than the messages.
    """
    closed = renderer.render_plain(messages, tools, add_generation_prompt=False)
    ends = [at for at, token in enumerate(closed) if token in renderer.stop_token_ids]
    prefix = ids[:-1] if ids[-1] in renderer.stop_token_ids else ids
    if not ends or renderer.decode(prefix) != renderer.decode(closed[: ends[-1]]):
        raise BadRequest(
            "required_prefix_token_ids do not spell the messages, which hold no assistant turn: "
            "send the ids up to the end of the last message",
            param="required_prefix_token_ids",
        )
    opened = renderer.render_plain(messages, tools, add_generation_prompt=True)
    return [*prefix, *opened[ends[-1] :]]


def _split(
    ids: list[int], messages: list[Plain], turn: int, tools: list[Plain] | None, renderer: Renderer
) -> KeptIds:
    """Split ids at the last assistant turn, which begins after the last place that opens one."""
    before = messages[:turn] or [{"role": "user", "content": ""}]
    closed = renderer.render_plain(before, tools, add_generation_prompt=False)
    opening = renderer.render_plain(before, tools, add_generation_prompt=True)[len(closed) :]
    for at in range(len(ids) - len(opening), -1, -1):
        if opening and ids[at : at + len(opening)] == opening:
            cut = at + len(opening)
            return KeptIds("required_prefix_token_ids", ids[:cut], ids[cut:])
    raise BadRequest(
        f"required_prefix_token_ids hold no assistant turn: {renderer.decode(opening)!r} opens one",
        param="required_prefix_token_ids",
    )


def _check_fits(
    kept_ids: KeptIds,
    messages: list[Plain],
    turn: int,
    tools: list[Plain] | None,
    renderer: Renderer,
) -> None:
    """Raise BadRequest when the ids cannot be those of the messages.

    The template wrote the ids up to the first assistant turn, so they are compared one by one. No
    template wrote the sampled text, so only the content of the messages is searched in it.
    """
    first = next(at for at, message in enumerate(messages) if message["role"] == "assistant")
    if first:
        opening = renderer.render_plain(messages[:first], tools, add_generation_prompt=True)
        if kept_ids.prompt_ids[: len(opening)] != opening:
            raise BadRequest(
                f"{kept_ids.field}: the ids do not start with the {len(opening)} ids of the "
                "messages before the first assistant turn (or the tools are others)",
                param=kept_ids.field,
            )
    prompt_text = renderer.decode(kept_ids.prompt_ids)
    for at, message in enumerate(messages[:turn]):
        content = (message.get("content") or "").strip()
        if message["role"] == "user" and content not in prompt_text:
            raise _misfit(kept_ids, at, "content")
    sampled, reply = renderer.decode(kept_ids.completion_ids), messages[turn]
    # Clients send thinking back in the content, in a field of its own, or not at all.
    content = (reply.get("content") or "").rpartition("</think>")[2].strip()
    if content not in sampled:
        raise _misfit(kept_ids, turn, "content")
    for call in reply.get("tool_calls", ()):
        if call["function"]["name"] not in sampled:
            raise _misfit(kept_ids, turn, "tool_calls")


def _misfit(kept_ids: KeptIds, at: int, what: str) -> BadRequest:
    return BadRequest(
        f"{kept_ids.field}: the ids do not hold the {what} of messages[{at}], so they are not of "
        "these messages",
        param=kept_ids.field,
    )
