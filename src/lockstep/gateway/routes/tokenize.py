"""POST /tokenize and /detokenize: text to token ids and back, in vLLM's dialect."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lockstep.gateway.callers import caller_of, request_id
from lockstep.gateway.context import GatewayContext
from lockstep.gateway.openapi.route_doc import RouteDoc
from lockstep.gateway.turn.context_limit import check_characters
from lockstep.gateway.turn.prompt import plan_prompt
from lockstep.gateway.turn.template_variables import RendererVariants
from lockstep.http.handlers import json_response
from lockstep.http.http_request import read_body
from lockstep.http.off_loop import off_loop
from lockstep.protocol.json.lazy_ids import as_list
from lockstep.protocol.openai.chat_request import ChatRequest
from lockstep.protocol.vllm.tokenize import (
    DetokenizedText,
    DetokenizeRequest,
    TokenizedPrompt,
    TokenizeRequest,
    decode_detokenize,
    decode_tokenize,
)
from lockstep.render import Renderer
from lockstep.tokens.errors import BadTokenId

ROUTE_DOCS = tuple(
    doc
    for base in ("", "/v1")
    for doc in (
        RouteDoc(
            "POST",
            f"{base}/tokenize",
            TokenizeRequest,
            TokenizedPrompt,
            "Token ids of a text or a chat.",
        ),
        RouteDoc(
            "POST", f"{base}/detokenize", DetokenizeRequest, DetokenizedText, "Text of token ids."
        ),
    )
)


class TokenizeRoutes:
    """Both routes, at the root and under /v1.

    A chat is rendered by the same code as for /v1/chat/completions: the ids are those of the prompt
    that a chat request would have.
    """

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._variants = RendererVariants()
        self.routes = [
            Route(f"{base}/{name}", handler, methods=["POST"])
            for base in ("", "/v1")
            for name, handler in (("tokenize", self.tokenize), ("detokenize", self.detokenize))
        ]

    async def tokenize(self, http: Request) -> Response:
        request_id(http)
        body = await read_body(http, decode_tokenize, self._context.limits)
        model = await self._context.models.resolve(body.model, caller_of(http).tenant)
        renderer = await self._context.models.renderer()
        if body.messages is None:
            text = body.prompt or ""
            check_characters([{"content": text}], self._context.limits)
            ids = await off_loop(True, renderer.encode, text, special=body.special)
        else:
            check_characters(body.messages, self._context.limits)
            ids = await self._chat_ids(body, renderer)
        response = await off_loop(True, encode_tokenized, ids, body, renderer, model.max_model_len)
        return json_response(response)

    async def detokenize(self, http: Request) -> Response:
        request_id(http)
        body = await read_body(http, decode_detokenize, self._context.limits)
        await self._context.models.resolve(body.model, caller_of(http).tenant)
        renderer = await self._context.models.renderer()
        return json_response(await off_loop(True, encode_detokenized, body, renderer))

    async def _chat_ids(self, body: TokenizeRequest, renderer: Renderer) -> list[int]:
        chat = ChatRequest(
            messages=body.messages or [],
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template_kwargs=body.chat_template_kwargs,
            required_prefix_token_ids=body.required_prefix_token_ids,
        )
        prefix = body.required_prefix_token_ids or []
        await off_loop(True, pieces_of, prefix, renderer, "required_prefix_token_ids")
        variant = renderer
        if chat.sets_template_variables:
            variant = await self._variants.get(chat, renderer)
        ids = as_list((await plan_prompt(chat, variant, None)).prompt_ids)
        if not body.special:
            return ids
        return await off_loop(True, lambda: renderer.encode(renderer.decode(ids), special=True))


def encode_tokenized(
    ids: list[int], body: TokenizeRequest, renderer: Renderer, max_model_len: int | None
) -> bytes:
    """Return the response to a text or a chat with these ids."""
    response = TokenizedPrompt(count=len(ids), max_model_len=max_model_len, tokens=ids)
    if body.return_token_strs:
        response.token_strs = renderer.tokenizer.convert_ids_to_tokens(ids)
    if body.return_token_bytes:
        response.token_bytes = [list(renderer.pieces.data(token)) for token in ids]
    return msgspec.json.encode(response)


def encode_detokenized(body: DetokenizeRequest, renderer: Renderer) -> bytes:
    """Return the response with the text of the ids. Raises BadTokenId."""
    pieces = pieces_of(body.tokens, renderer, "tokens")
    response = DetokenizedText(prompt=b"".join(pieces).decode(errors="replace"))
    if body.return_token_bytes:
        response.token_bytes = [list(piece) for piece in pieces]
    return msgspec.json.encode(response)


def pieces_of(ids: list[int], renderer: Renderer, field: str) -> list[bytes]:
    """Return the bytes of each id. Raises BadTokenId that names the first unknown one."""
    pieces: list[bytes] = []
    for at, token in enumerate(ids):
        piece = renderer.pieces.data(token)
        if not piece and token not in renderer.pieces:
            raise BadTokenId(
                f"{field}[{at}] is {token}: the tokenizer has no token with that id",
                param=f"{field}[{at}]",
            )
        pieces.append(piece)
    return pieces
