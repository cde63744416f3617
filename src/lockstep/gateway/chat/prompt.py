"""From a chat request to the ids of its prompt: given, bridged, continued, planned or rendered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.gateway.chat.prefix import KeptIds, bare_messages, kept_by_messages, prefixed
from lockstep.gateway.sessions.sessions import Session
from lockstep.ledger import PromptPlan
from lockstep.protocol.openai.chat_request import ChatRequest
from lockstep.render import Renderer, plain_messages, plain_tools
from lockstep.tokens.errors import BadRequest

LONG = 4000
"""Characters from which on rendering is done off the event loop."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The ids to send, and the plan they come from when a session made it."""

    ids: Sequence[int]
    plan: PromptPlan | None = None


async def prompt_of(asked: ChatRequest, renderer: Renderer, session: Session | None) -> ChatPrompt:
    """The prompt of a request. Raises BadRequest, and PrefixBreak where a session is strict."""
    given = asked.given_prompt()
    if given is not None:
        # Messages beside ids are a placeholder that some clients must send.
        field, ids = given
        _refuse_with_session(session, field)
        return ChatPrompt(ids)
    kept = kept_by_messages(asked.messages)
    if kept is not None or asked.required_prefix_token_ids is not None:
        field = "required_prefix_token_ids" if kept is None else f"{kept.field}.prompt_token_ids"
        _refuse_with_session(session, field)
        _refuse_unopened(asked, field)
        return ChatPrompt(await _off_loop(asked, renderer, kept))
    if session is not None:
        _refuse_unopened(asked, "a session")
        plan = await session.plan(bare_messages(asked.messages), asked.tools)
        return ChatPrompt(plan.prompt_ids, plan)
    return ChatPrompt(await _off_loop(asked, renderer, None))


async def _off_loop(asked: ChatRequest, renderer: Renderer, kept: KeptIds | None) -> list[int]:
    if sum(len(str(message.get("content", ""))) for message in asked.messages) < LONG:
        return _rendered(asked, renderer, kept)
    return await renderer.offload(_rendered, asked, renderer, kept)


def _rendered(asked: ChatRequest, renderer: Renderer, kept: KeptIds | None) -> list[int]:
    if kept is not None or asked.required_prefix_token_ids is not None:
        return prefixed(asked, kept, renderer)
    if asked.continues:
        return continued(asked, renderer)
    ask = asked.add_generation_prompt is not False
    return renderer.render(asked.messages, asked.tools, ask=ask)


def continued(asked: ChatRequest, renderer: Renderer) -> list[int]:
    """The conversation up to the last character of its last message, which is left open.

    Raises BadRequest unless that is an assistant message with text and without tool calls.
    """
    messages, tools = plain_messages(asked.messages), plain_tools(asked.tools)
    last = messages[-1]
    said = last.get("content") or ""
    if last["role"] != "assistant" or not said.strip() or last.get("tool_calls"):
        raise BadRequest(
            f"continue_final_message: messages[{len(messages) - 1}] must be an assistant message "
            "with text and without tool calls to be continued",
            param="continue_final_message",
        )
    if not renderer.template.source:
        raise BadRequest(
            "continue_final_message: this model has no chat template to continue in",
            param="continue_final_message",
        )
    text = renderer.template.text(messages, tools, ask=False)
    # Templates take off space around a message; what the caller wrote last is where it goes on.
    at = text.rfind(said.strip())
    if at < 0:
        raise BadRequest(
            "continue_final_message: the chat template does not write the last message as it is",
            param="continue_final_message",
        )
    open_text = text[: at + len(said.strip())] + said[len(said.rstrip()) :]
    return renderer.template.encode(open_text)


def _refuse_with_session(session: Session | None, field: str) -> None:
    if session is not None:
        raise BadRequest(
            f"{field} brings the prompt as ids, but the request joins session {session.id!r}, "
            "which makes the prompt itself: leave out one of them",
            param=field,
        )


def _refuse_unopened(asked: ChatRequest, what: str) -> None:
    for field, wrong in (
        ("continue_final_message", asked.continues),
        ("add_generation_prompt", asked.add_generation_prompt is False),
    ):
        if wrong:
            raise BadRequest(
                f"{field} cannot be used together with {what}: its turns are always opened for an "
                "answer",
                param=field,
            )
