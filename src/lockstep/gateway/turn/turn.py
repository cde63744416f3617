"""One turn: the request for its worker, the plan of its prompt, and how its replies are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.requests import Request

from lockstep.fleet.routing.affinity import Affinity
from lockstep.gateway.sessions.cache import Session
from lockstep.gateway.turn.harness import OPEN_END
from lockstep.ledger import PromptPlan, Reply
from lockstep.ledger.origin import Origin
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.json.lazy_ids import as_list
from lockstep.protocol.openai.chat_request import ChatRequest
from lockstep.protocol.openai.chat_response import ChatReply
from lockstep.render import ParsedMessage, Renderer
from lockstep.render.streaming_parser import StreamingParser
from lockstep.tokens import Completion
from lockstep.tokens.errors import BadRequest, Misaligned
from lockstep.tokens.support import PackedSupport

TOKENS_HEADER, TOKENS_FIELD = "x-lockstep-tokens", "lockstep"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayTurn:
    """A chat request that is ready for a worker.

    `chat` is what the client sent, in the shape of the chat dialect; `request` is what the worker
    gets. `id` is the client's id of the request; workers may know it by another one. `plan` says
    where the turn belongs in its `session`; without one it is not stored. `received` is a Unix
    time. `max_model_len` limits the tokens of prompt and completion, None where no worker reports
    it. `found_tools` are tools that a tool search has added to those of the request. `headers` are
    those of the response, and are complete after `commit`.
    """

    id: str
    chat: ChatRequest
    request: GenerateRequest
    affinity: Affinity
    renderer: Renderer
    session: Session | None
    plan: PromptPlan
    model: str
    received: float
    max_model_len: int | None
    headers: dict[str, str] = field(default_factory=dict)
    found_tools: tuple[dict[str, Any], ...] = ()
    origin: Origin | None = None

    def __post_init__(self) -> None:
        if self.session is not None:
            self.headers["x-lockstep-bridged"] = "true" if self.plan.bridged else "false"
            if self.plan.cause is not None:
                self.headers["x-lockstep-break"] = self.plan.cause

    @property
    def open_end(self) -> bool:
        """Whether its agent continues from a stream without an end, and gives up on an error."""
        return self.origin is not None and self.origin.harness in OPEN_END

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """The tools whose calls are parsed out of the reply."""
        if self.chat.tool_choice == "none":
            return None
        return [*(self.chat.tools or ()), *self.found_tools] or None

    def new_parser(self) -> StreamingParser:
        """Return a parser for the tokens of one choice as they arrive."""
        return StreamingParser(
            self.renderer,
            self.tools,
            self.request.prompt_ids,
            verbatim=self.chat.continues,
            stops=self.request.sampling.stop,
            include_stop=bool(self.chat.include_stop_str_in_output),
        )

    async def read(self, completion: Completion) -> ChatReply:
        """Parse a completion into a message. Raises Misaligned when its prompt is another one."""
        # Identity first: comparing ids that are still JSON would decode them.
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
        return reply_of(completion, parsed)

    async def commit(self, replies: Sequence[ChatReply]) -> list[ChatReply]:
        """Store the turn in its session and return the replies in order of their index.

        The client gets no byte of them before this returns: a reply that it saw is always there for
        the trainer to read. Raises as `Session.commit`.
        """
        ordered = sorted(replies, key=lambda reply: reply.completion.index)
        if self.session is not None:
            await self.session.commit(self.plan, self.stored(ordered))
        # A stream has sent its headers by now: only whole responses carry the versions.
        versions = [span.version for reply in ordered for span in reply.completion.versions]
        if versions:
            self.headers["x-lockstep-versions"] = ",".join(
                quote(version, safe="-._~:/@+=") for version in dict.fromkeys(versions)
            )
        return ordered

    def stored(self, replies: Sequence[ChatReply]) -> list[tuple[Completion, Reply]]:
        """Return the replies as the session stores them."""
        notes = self.chat.notes
        return [
            (reply.completion, Reply(reply.message, reply.tool_parse_error, notes, self.origin))
            for reply in replies
        ]


def reply_of(completion: Completion, parsed: ParsedMessage) -> ChatReply:
    """Return a finished choice with the message it was parsed into."""
    return ChatReply(
        completion=completion,
        message=parsed.message(),
        finish=parsed.finish(completion.finish),
        tool_parse_error=parsed.tool_parse_error,
    )


def check_tokens_header(http: Request, *, stream: bool | None) -> None:
    """Raise BadRequest for a stream with X-Lockstep-Tokens: only whole responses carry tokens."""
    if stream and TOKENS_HEADER in http.headers:
        raise BadRequest(
            f"{TOKENS_HEADER} was sent with stream: true, but only whole responses carry tokens: "
            "send stream: false",
            param="stream",
        )


def with_tokens(http: Request, turn: GatewayTurn, reply: ChatReply, body: Any) -> Any:
    """Return a response with the field "lockstep" added if the request has X-Lockstep-Tokens.

    `body` is a response as a struct or as encoded JSON, in any dialect. The field holds the ids of
    the prompt and of the completion, their logprobs and how those were computed, the sets that they
    were drawn from, the version spans, and whether the prompt starts with the tokens of the turn
    before.
    """
    if TOKENS_HEADER not in http.headers:
        return body
    completion = reply.completion
    support = completion.support
    tokens = {
        "prompt_ids": as_list(turn.request.prompt_ids),
        "token_ids": list(completion.token_ids),
        "logprobs": list(completion.logprobs),
        "logprob_mode": completion.logprob_mode,
        "temperature": turn.request.sampling.temperature,
        "versions": [[span.version, span.start, span.end] for span in completion.versions],
        "bridged": turn.plan.bridged,
        "cause": turn.plan.cause,
        "shaping": completion.shaping,
        "support": None if support is None else PackedSupport.of(support),
    }
    encoded = body if isinstance(body, bytes | bytearray) else msgspec.json.encode(body)
    return msgspec.json.encode({**msgspec.json.decode(encoded), TOKENS_FIELD: tokens})
