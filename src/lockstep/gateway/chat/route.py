"""POST /v1/chat/completions: OpenAI's chat dialect in front of a fleet, token-exact in sessions."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as HttpRoute

from lockstep.gateway.callers import request_id
from lockstep.gateway.chat.stream import ChatStream, timing_of
from lockstep.gateway.context import GatewayContext
from lockstep.gateway.turn.open import TurnOpener
from lockstep.gateway.turn.sample import TurnStream, sample_turn
from lockstep.gateway.turn.turn import GatewayTurn, check_tokens_header, with_tokens
from lockstep.http.handlers import EventStream, json_response
from lockstep.http.http_request import read_body
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
        self._opener = TurnOpener(context)
        self.routes = [
            HttpRoute("/v1/chat/completions", self.chat, methods=["POST"]),
            HttpRoute("/v1/chat/completions/tokens", self.tokens, methods=["POST"]),
            HttpRoute("/v1/chat/completions/render", self.render, methods=["POST"]),
        ]

    async def chat(self, http: Request) -> Response:
        """Return the response to a chat request, whole or streamed."""
        return await self._respond(http, await self._read(http))

    async def tokens(self, http: Request) -> Response:
        """Return the response to a prompt in `tokens`; messages beside it are ignored."""
        chat = await self._read(http)
        if chat.tokens is None:
            raise BadRequest(
                "required field 'tokens' is missing: it holds the ids of the prompt", param="tokens"
            )
        return await self._respond(http, chat)

    async def render(self, http: Request) -> Response:
        """Return the chat as a body for /inference/v1/generate; nothing is sampled."""
        chat = await self._read(http)
        turn = await self._opener.open(http, chat)
        body = rendered_chat(
            turn.request,
            wire.ID_PREFIX + turn.id,
            cache_salt=chat.salt,
            logprobs=bool(chat.logprobs),
        )
        return json_response(msgspec.json.encode(body))

    async def _read(self, http: Request) -> ChatRequest:
        request_id(http)
        return await read_body(http, decode_chat, self._context.limits)

    async def _respond(self, http: Request, chat: ChatRequest) -> Response:
        check_tokens_header(http, stream=chat.stream)
        turn = await self._opener.open(http, chat)
        response: Response
        if chat.stream:
            stream = await TurnStream.started(http, turn, self._context.pool)
            events = ChatStream(turn, _response_shape(turn), stream).events()
            response = EventStream(events, http.state.request_id, open_end=turn.open_end)
        else:
            response = json_response(await self._whole(http, turn))
        response.headers["x-request-id"] = http.state.request_id
        response.headers.update(turn.headers)
        return response

    async def _whole(self, http: Request, turn: GatewayTurn) -> bytes:
        worker, replies = await sample_turn(http, turn, self._context.pool)
        shape = _response_shape(turn)
        timing = timing_of(turn, None) if shape.extra_fields else None
        large = is_large_response((reply.completion for reply in replies), shape.top)
        body = await off_loop(
            large, wire.chat_response, shape, replies, worker=worker, timing=timing
        )
        encoded: bytes = with_tokens(http, turn, replies[0], body)
        return encoded


def _response_shape(turn: GatewayTurn) -> wire.ChatResponseShape:
    """Return which fields the response has, as the request demands."""
    chat = turn.chat
    return wire.ChatResponseShape(
        id=wire.ID_PREFIX + turn.id,
        model=turn.model,
        created=int(turn.received),
        spelling=turn.renderer.pieces,
        logprobs=bool(chat.logprobs),
        top=chat.top_logprobs or 0,
        tokens_as_ids=bool(chat.return_tokens_as_token_ids),
        token_ids=bool(chat.return_token_ids),
        # NeMo-RL sends the prefix, and reads the ids of the next one from the message.
        ids_on_message=bool(chat.return_token_id_information)
        or chat.required_prefix_token_ids is not None,
        reasoning=chat.include_reasoning is not False,
        experts=bool(chat.return_routed_experts),
        support=bool(chat.return_sampling_mask),
        prompt_logprobs=chat.prompt_logprobs is not None,
        functions=bool(chat.functions),
        stop_token_ids=frozenset(chat.stop_token_ids or ()),
        extra_fields=chat.extra_fields,
    )
