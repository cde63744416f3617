"""The planning stage of a turn: the ids of its prompt, and the stored turn that they follow.

The ids come from the client, from the session's ledger, or from the chat template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.gateway.sessions.cache import Session
from lockstep.gateway.turn.context_limit import texts_of
from lockstep.gateway.turn.kept_ids import (
    LOGPROBS,
    PROMPT,
    SAMPLED,
    KeptIds,
    bare_messages,
    prompt_from_kept,
    read_kept_ids,
)
from lockstep.http.off_loop import LONG_COMPLETION_TOKENS, is_large_chat, off_loop
from lockstep.ledger import PromptPlan
from lockstep.protocol.openai.chat_request import ChatRequest
from lockstep.render import Renderer, plain_messages, plain_tools
from lockstep.tokens.errors import BadRequest


async def plan_prompt(chat: ChatRequest, renderer: Renderer, session: Session | None) -> PromptPlan:
    """Return the plan of a request's prompt; without a session it follows no stored turn.

    Raises BadRequest, and PrefixBreak where the session is strict.
    """
    sent = chat.prompt_ids()
    if sent is not None:
        # Messages beside ids are a placeholder that some clients must send.
        return _stored_nowhere(sent[1]) if session is None else await session.plan_ids(sent[1])
    # A cheap test, as it goes through the whole history in every turn.
    with_ids = _any_has_ids(chat.messages)
    kept_ids = read_kept_ids(chat.messages) if with_ids else None
    if kept_ids is not None or chat.required_prefix_token_ids is not None:
        field = (
            "required_prefix_token_ids"
            if kept_ids is None
            else f"{kept_ids.field}.prompt_token_ids"
        )
        _refuse_session(session, field)
        _refuse_open_message(chat, field)
        return _stored_nowhere(await _render(chat, renderer, kept_ids))
    if session is not None:
        # A ledger stores whole turns: a continued message would be sampled text without its turn.
        _refuse_open_message(chat, "a session")
        messages = bare_messages(chat.messages) if with_ids else chat.messages
        return await session.plan(messages, chat.tools)
    return _stored_nowhere(await _render(chat, renderer, None))


def _stored_nowhere(ids: Sequence[int]) -> PromptPlan:
    return PromptPlan(prompt_ids=ids, parent=None, new_messages=(), tools=b"")


def _any_has_ids(messages: Sequence[dict[str, Any]]) -> bool:
    return any(
        SAMPLED in message or PROMPT in message or LOGPROBS in message for message in messages
    )


async def _render(chat: ChatRequest, renderer: Renderer, kept_ids: KeptIds | None) -> list[int]:
    required = chat.required_prefix_token_ids or ()
    large = len(required) > LONG_COMPLETION_TOKENS or is_large_chat(
        chat.messages, chat.tools, texts_of(chat.messages)
    )
    return await off_loop(large, _render_now, chat, renderer, kept_ids)


def _render_now(chat: ChatRequest, renderer: Renderer, kept_ids: KeptIds | None) -> list[int]:
    if kept_ids is not None or chat.required_prefix_token_ids is not None:
        return prompt_from_kept(chat, kept_ids, renderer)
    if chat.continues:
        return render_open_message(chat, renderer)
    return renderer.render(
        chat.messages, chat.tools, add_generation_prompt=chat.add_generation_prompt is not False
    )


def render_open_message(chat: ChatRequest, renderer: Renderer) -> list[int]:
    """Render a conversation up to the last character of its last message, which is left open.

    Raises BadRequest unless that is an assistant message with text and without tool calls.
    """
    messages, tools = plain_messages(chat.messages), plain_tools(chat.tools)
    last = messages[-1]
    content = last.get("content") or ""
    if last["role"] != "assistant" or not content.strip() or last.get("tool_calls"):
        raise BadRequest(
            f"continue_final_message: messages[{len(messages) - 1}] must be an assistant message "
            "with text and without tool calls to be continued",
            param="continue_final_message",
        )
    if not renderer.template.source:
        raise BadRequest(
            "continue_final_message: this model has no chat template; send the text to "
            "/v1/completions",
            param="continue_final_message",
        )
    text = renderer.template.text(messages, tools, add_generation_prompt=False)
    (marked,) = renderer.template.mark([last])
    content = marked["content"]
    # Templates strip the space around a message, but the model continues what the client wrote:
    # its trailing space is put back.
    at = text.rfind(content.strip())
    if at < 0:
        raise BadRequest(
            "continue_final_message: the chat template does not write the last message as it is",
            param="continue_final_message",
        )
    open_text = text[: at + len(content.strip())] + content[len(content.rstrip()) :]
    return renderer.template.encode(open_text)


def _refuse_session(session: Session | None, field: str) -> None:
    if session is not None:
        raise BadRequest(
            f"{field} holds the prompt as ids, but the request joins session {session.id!r}, "
            "which makes the prompt itself: leave out one of them",
            param=field,
        )


def _refuse_open_message(chat: ChatRequest, what: str) -> None:
    for field, is_set in (
        ("continue_final_message", chat.continues),
        ("add_generation_prompt", chat.add_generation_prompt is False),
    ):
        if is_set:
            raise BadRequest(
                f"{field} cannot be used together with {what}, whose prompts always open an "
                "assistant turn: leave it out",
                param=field,
            )
