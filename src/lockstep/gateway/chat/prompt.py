"""The prompt ids of a chat request: sent by the client, planned by a session, or rendered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.gateway.chat.prefix import KeptIds, any_ids, bare_messages, kept_by_messages, prefixed
from lockstep.gateway.chat.room import texts_of
from lockstep.gateway.sessions.session import Session
from lockstep.http.off_loop import is_large_chat, off_loop
from lockstep.ledger import PromptPlan
from lockstep.protocol.openai.chat_request import ChatRequest
from lockstep.render import Renderer, plain_messages, plain_tools
from lockstep.tokens.errors import BadRequest


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The ids to send, and the session's plan they come from, if any."""

    ids: Sequence[int]
    plan: PromptPlan | None = None


async def prompt_of(chat: ChatRequest, renderer: Renderer, session: Session | None) -> ChatPrompt:
    """The prompt of a request. Raises BadRequest, and PrefixBreak where a session is strict."""
    sent = chat.prompt_ids()
    if sent is not None:
        # Messages beside ids are a placeholder that some clients must send.
        plan = None if session is None else await session.plan_ids(sent[1])
        return ChatPrompt(sent[1], plan)
    with_ids = any_ids(chat.messages)
    kept = kept_by_messages(chat.messages) if with_ids else None
    if kept is not None or chat.required_prefix_token_ids is not None:
        field = "required_prefix_token_ids" if kept is None else f"{kept.field}.prompt_token_ids"
        _refuse_with_session(session, field)
        _refuse_unopened(chat, field)
        return ChatPrompt(await _off_loop(chat, renderer, kept))
    if session is not None:
        _refuse_unopened(chat, "a session")
        messages = bare_messages(chat.messages) if with_ids else chat.messages
        plan = await session.plan(messages, chat.tools)
        return ChatPrompt(plan.prompt_ids, plan)
    return ChatPrompt(await _off_loop(chat, renderer, None))


async def _off_loop(chat: ChatRequest, renderer: Renderer, kept: KeptIds | None) -> list[int]:
    large = is_large_chat(chat.messages, chat.tools, texts_of(chat.messages))
    return await off_loop(large, _rendered, chat, renderer, kept)


def _rendered(chat: ChatRequest, renderer: Renderer, kept: KeptIds | None) -> list[int]:
    if kept is not None or chat.required_prefix_token_ids is not None:
        return prefixed(chat, kept, renderer)
    if chat.continues:
        return continued(chat, renderer)
    return renderer.render(
        chat.messages, chat.tools, add_generation_prompt=chat.add_generation_prompt is not False
    )


def continued(chat: ChatRequest, renderer: Renderer) -> list[int]:
    """The conversation up to the last character of its last message, which is left open.

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
    # Templates strip the space around a message; the model goes on after what the caller wrote.
    at = text.rfind(content.strip())
    if at < 0:
        raise BadRequest(
            "continue_final_message: the chat template does not write the last message as it is",
            param="continue_final_message",
        )
    open_text = text[: at + len(content.strip())] + content[len(content.rstrip()) :]
    return renderer.template.encode(open_text)


def _refuse_with_session(session: Session | None, field: str) -> None:
    if session is not None:
        raise BadRequest(
            f"{field} holds the prompt as ids, but the request joins session {session.id!r}, "
            "which makes the prompt itself: leave out one of them",
            param=field,
        )


def _refuse_unopened(chat: ChatRequest, what: str) -> None:
    for field, wrong in (
        ("continue_final_message", chat.continues),
        ("add_generation_prompt", chat.add_generation_prompt is False),
    ):
        if wrong:
            raise BadRequest(
                f"{field} cannot be used together with {what}, whose prompts always open an "
                "assistant turn: leave it out",
                param=field,
            )
