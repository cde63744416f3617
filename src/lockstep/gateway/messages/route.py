"""POST /v1/messages: Anthropic's dialect in front of a fleet, in the same sessions as chat."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as HttpRoute

from lockstep.gateway.callers import caller_of, owner_of, request_id, session_id
from lockstep.gateway.context import GatewayContext
from lockstep.gateway.messages.threads import MessageThreads
from lockstep.gateway.messages.translate import TranslatedMessages, translate
from lockstep.gateway.messages.write import MessageStream, whole_message
from lockstep.gateway.openapi.route_doc import RouteDoc
from lockstep.gateway.turn.context_limit import check_characters
from lockstep.gateway.turn.open import TurnOpener
from lockstep.gateway.turn.prompt import plan_prompt
from lockstep.gateway.turn.sample import TurnStream, sample_turn
from lockstep.gateway.turn.template_variables import takes_inner_system
from lockstep.gateway.turn.turn import check_tokens_header, with_tokens
from lockstep.http.handlers import EventStream, json_response, request_id_of
from lockstep.http.http_request import body_bytes, read_body
from lockstep.http.off_loop import is_large_json, off_loop
from lockstep.protocol.anthropic.messages_request import (
    MessagesRequest,
    decode_count,
    decode_messages,
)
from lockstep.protocol.anthropic.messages_response import AnthropicMessage, TokenCount, error_of
from lockstep.protocol.openai.chat_decode import check_chat
from lockstep.tokens.errors import BadRequest, LockstepError, NotFound, PromptTooLong

OTHERS = ["GET", "POST", "DELETE"]
ROUTE_DOCS = (
    RouteDoc(
        "POST", "/v1/messages", MessagesRequest, AnthropicMessage,
        "Anthropic's messages, in the same sessions as chat.", streams=True,
    ),
    RouteDoc(
        "POST", "/v1/messages/count_tokens", MessagesRequest, TokenCount,
        "Number of tokens in the prompt of such a request.",
    ),
    RouteDoc("GET", "/api/hello", None, None, "Reachability check of Claude Code: always 200."),
)  # fmt: skip
SWITCH = "enable_thinking"
"""The template variable that turns thinking off, in models that have one."""


class MessagesRoutes:
    """POST /v1/messages, its token counter, and the path that Claude Code checks first."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._opener = TurnOpener(context)
        self._threads = MessageThreads()
        self.routes = [
            HttpRoute("/v1/messages", self.messages, methods=["POST"]),
            HttpRoute("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
            HttpRoute("/api/hello", self.hello, methods=["GET"]),
        ]
        self.other = HttpRoute("/v1/messages/{rest:path}", self.not_served, methods=OTHERS)

    async def messages(self, http: Request) -> Response:
        """Return the response to a request, whole or streamed; errors have Anthropic's shape."""
        return await _with_anthropic_errors(http, self._messages)

    async def count_tokens(self, http: Request) -> Response:
        """Return the number of prompt tokens of a request; nothing is generated or stored."""
        return await _with_anthropic_errors(http, self._count_tokens)

    async def not_served(self, http: Request) -> Response:
        """Return Anthropic's 404 for its routes that this server does not have."""
        return await _with_anthropic_errors(http, _no_such_route)

    async def hello(self, _: Request) -> Response:
        return Response()

    async def _messages(self, http: Request) -> Response:
        request_id(http)
        body = await read_body(http, decode_messages, self._context.limits)
        check_tokens_header(http, stream=body.stream)
        owner = owner_of(http)
        body = self._threads.resolve(owner, body)
        store = partial(self._threads.add, owner, body)
        translated = await self._translate(http, body)
        chat = translated.chat
        if session_id(http) is None and _is_prefill(chat.messages[-1]):
            # In a session, a trailing assistant message is history: a stream that was cut off.
            chat.add_generation_prompt, chat.continue_final_message = False, True
        turn = await self._opener.open(http, chat, clamp=True, found_tools=translated.found_tools)
        # The worker would reject it too, but not in the words that agents compact their history on.
        limit, count = turn.max_model_len, len(turn.request.prompt_ids)
        if limit is not None and count >= limit:
            raise PromptTooLong(f"prompt is too long: {count} tokens > {limit} maximum")
        if translated.accepted:
            turn.headers["x-lockstep-accepted"] = ",".join(translated.accepted)
        response: Response
        if body.stream:
            stream = await TurnStream.started(http, turn, self._context.pool)
            events = MessageStream(turn, stream, store).events()
            response = EventStream(events, http.state.request_id, done=b"", open_end=turn.open_end)
        else:
            _, (reply,) = await sample_turn(http, turn, self._context.pool)
            message = whole_message(turn, reply)
            store(message)
            response = json_response(with_tokens(http, turn, reply, message))
        response.headers["request-id"] = http.state.request_id
        response.headers.update(turn.headers)
        return response

    async def _count_tokens(self, http: Request) -> Response:
        request_id(http)
        body = await read_body(http, decode_count, self._context.limits)
        body = self._threads.resolve(owner_of(http), body)
        await self._context.models.resolve(body.model, caller_of(http).tenant)
        translated = await self._translate(http, body)
        renderer = await self._context.models.renderer()
        check_characters(translated.chat.messages, self._context.limits)
        plan = await plan_prompt(translated.chat, renderer, None)
        return json_response(TokenCount(input_tokens=len(plan.prompt_ids)))

    async def _translate(self, http: Request, body: MessagesRequest) -> TranslatedMessages:
        renderer = await self._context.models.renderer()
        translated = await off_loop(is_large_json(body_bytes(http)), translate, body)
        if translated.inner_system is not None and not takes_inner_system(renderer):
            where = f"messages.{translated.inner_system}.role"
            # In Anthropic's words: Claude Code recognises them, and moves the text elsewhere.
            raise BadRequest(f"{where}: Input should be 'user' or 'assistant'", param=where)
        off = body.thinking is not None and body.thinking.type == "disabled"
        if off and SWITCH in renderer.template.source:
            translated.chat.chat_template_kwargs = {SWITCH: False}
        check_chat(translated.chat)
        return translated


async def _no_such_route(http: Request) -> Response:
    raise NotFound(
        f"{http.method} {http.url.path} is not served here: Anthropic's routes are "
        "POST /v1/messages and POST /v1/messages/count_tokens",
        param="path",
    )


def _is_prefill(message: dict[str, object]) -> bool:
    return message["role"] == "assistant" and message.keys() == {"role", "content"}


def _too_long(error: PromptTooLong) -> str:
    """Return the message in Anthropic's words; agents parse both of its numbers."""
    if error.counts is None:
        return f"prompt is too long: {error.message}"
    length, limit = error.counts
    return f"prompt is too long: {length} tokens > {limit} maximum"


async def _with_anthropic_errors(
    http: Request, handle: Callable[[Request], Awaitable[Response]]
) -> Response:
    try:
        return await handle(http)
    except LockstepError as error:
        if isinstance(error, PromptTooLong) and "prompt is too long" not in error.message:
            error = error.with_message(_too_long(error))
        response = json_response(error_of(error, request_id_of(http)), error.status)
        if error.retry_after is not None:
            response.headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
        return response
