"""POST /v1/chat/completions: OpenAI's chat in front of a fleet, token-exact within sessions."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as HttpRoute

from lockstep.gateway.chat.stream import ChatStream
from lockstep.gateway.chat.turn import ChatTurn
from lockstep.gateway.chat.turn_tokens import check_tokens, with_tokens
from lockstep.gateway.chat.turns import ChatTurns
from lockstep.gateway.context import GatewayContext, request_id
from lockstep.http.body import read_body
from lockstep.http.handlers import EventStream, json_response
from lockstep.http.off_loop import is_large_response, off_loop
from lockstep.protocol.openai import chat_response as wire
from lockstep.protocol.openai.chat_decode import decode_chat
from lockstep.protocol.openai.chat_request import ChatRequest
from lockstep.protocol.vllm.rendered import rendered_chat
from lockstep.tokens.errors import BadRequest


class ChatRoutes:
    """POST /v1/chat/completions; /tokens below it takes prompts of ids, /render samples nothing."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._turns = ChatTurns(context)
        self.routes = [
            HttpRoute("/v1/chat/completions", self.chat, methods=["POST"]),
            HttpRoute("/v1/chat/completions/tokens", self.tokens, methods=["POST"]),
            HttpRoute("/v1/chat/completions/render", self.render, methods=["POST"]),
        ]

    async def chat(self, http: Request) -> Response:
        """Answers a chat request, whole or streamed."""
        return await self._respond(http, await self._read(http))

    async def tokens(self, http: Request) -> Response:
        """The same for a prompt in `tokens`; messages beside it are not read."""
        chat = await self._read(http)
        if chat.tokens is None:
            raise BadRequest(
                "required field 'tokens' is missing: it holds the ids of the prompt", param="tokens"
            )
        return await self._respond(http, chat)

    async def render(self, http: Request) -> Response:
        """The chat as a body for /inference/v1/generate; nothing is sampled."""
        chat = await self._read(http)
        turn = await self._turns.open(http, chat)
        body = rendered_chat(
            turn.request, turn.shape.id, cache_salt=chat.salt, logprobs=bool(chat.logprobs)
        )
        return json_response(msgspec.json.encode(body))

    async def _read(self, http: Request) -> ChatRequest:
        request_id(http)
        return await read_body(http, decode_chat, self._context.limits)

    async def _respond(self, http: Request, chat: ChatRequest) -> Response:
        check_tokens(http, stream=chat.stream)
        turn = await self._turns.open(http, chat)
        response = await (self._stream(http, turn) if chat.stream else self._whole(http, turn))
        response.headers["x-request-id"] = http.state.request_id
        response.headers.update(turn.headers)
        return response

    async def _whole(self, http: Request, turn: ChatTurn) -> Response:
        worker, choices = await self._turns.run(http, turn)
        timing = turn.timing(None)
        large = is_large_response((each.completion for each in choices), turn.shape.top)
        body = await off_loop(
            large, wire.chat_response, turn.shape, choices, worker=worker, timing=timing
        )
        return json_response(with_tokens(http, turn, choices[0], body))

    async def _stream(self, http: Request, turn: ChatTurn) -> Response:
        parts = await self._turns.stream(http, turn)
        return EventStream(ChatStream(turn, parts).events(), http.state.request_id)
