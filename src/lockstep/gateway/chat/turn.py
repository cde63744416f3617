"""One turn of a chat: its request, the worker it prefers, and how its reply is stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any
from urllib.parse import quote

from lockstep.fleet.routing.affinity import Affinity
from lockstep.gateway.sessions.session import Session
from lockstep.ledger import PromptPlan, Reply
from lockstep.ledger.origin import Origin
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.dynamo.nvext import Timing
from lockstep.protocol.openai.chat_request import ChatRequest
from lockstep.protocol.openai.chat_response import ChatReply, ChatResponseShape
from lockstep.render import ParsedMessage, Renderer
from lockstep.render.streaming_parser import StreamingParser
from lockstep.tokens import Completion
from lockstep.tokens.errors import Misaligned


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTurn:
    """A chat request ready to be sent to a worker. `headers` are those of its response.

    `chat` is what the client sent, `request` what the worker gets. `max_model_len` is how many
    tokens prompt and completion may have, None where nobody knows.
    """

    chat: ChatRequest
    request: GenerateRequest
    affinity: Affinity
    renderer: Renderer
    session: Session | None
    plan: PromptPlan | None
    shape: ChatResponseShape
    received: float
    max_model_len: int | None
    headers: dict[str, str] = field(default_factory=dict)
    found_tools: tuple[dict[str, Any], ...] = ()
    origin: Origin | None = None

    def __post_init__(self) -> None:
        if self.plan is not None:
            self.headers["x-lockstep-bridged"] = "true" if self.plan.bridged else "false"
            if self.plan.cause is not None:
                self.headers["x-lockstep-break"] = self.plan.cause

    @property
    def id(self) -> str:
        """The id by which the client knows this turn; workers may know it by another."""
        return self.shape.id.removeprefix("chatcmpl-")

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """The tools whose calls are parsed out of the reply."""
        if self.chat.tool_choice == "none":
            return None
        return [*(self.chat.tools or ()), *self.found_tools] or None

    def new_parser(self) -> StreamingParser:
        return StreamingParser(
            self.renderer,
            self.tools,
            self.request.prompt_ids,
            verbatim=self.chat.continues,
            stops=self.request.sampling.stop,
            include_stop=bool(self.chat.include_stop_str_in_output),
        )

    async def read(self, completion: Completion) -> ChatReply:
        """The completion as a message. Raises Misaligned when it is of another prompt."""
        sent = self.request.prompt_ids
        if completion.prompt_ids is not sent and completion.prompt_ids != sent:
            raise Misaligned("the completion is of another prompt than the one that was sent")
        parsed = await self.renderer.parse_async(
            completion.token_ids,
            self.tools,
            prompt_ids=self.request.prompt_ids,
            verbatim=self.chat.continues,
            stop=completion.stop_reason,
            include_stop=bool(self.chat.include_stop_str_in_output),
        )
        return reply(completion, parsed)

    async def commit(self, choices: Sequence[ChatReply]) -> list[ChatReply]:
        """Stores the turn in its session, before the client sees it; the choices by index."""
        ordered = sorted(choices, key=lambda each: each.completion.index)
        if self.session is not None and self.plan is not None:
            turns = [
                (
                    each.completion,
                    Reply(each.message, each.tool_parse_error, self.chat.notes, self.origin),
                )
                for each in ordered
            ]
            await self.session.commit(self.plan, turns)
        versions = [span.version for each in ordered for span in each.completion.versions]
        if versions:
            self.headers["x-lockstep-versions"] = ",".join(
                quote(version, safe="-._~:/@+=") for version in dict.fromkeys(versions)
            )
        return ordered

    def timing(self, first: float | None) -> Timing:
        """How long it took, in milliseconds; `first` is when the first token came."""
        return Timing(
            request_received_ms=int(self.received * 1000),
            ttft_ms=None if first is None else (first - self.received) * 1000,
            total_time_ms=(time() - self.received) * 1000,
        )


def reply(completion: Completion, parsed: ParsedMessage) -> ChatReply:
    return ChatReply(
        completion=completion,
        message=parsed.message(),
        finish=parsed.finish(completion.finish),
        tool_parse_error=parsed.tool_parse_error,
    )
