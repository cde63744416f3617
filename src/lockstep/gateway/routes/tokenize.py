"""Text to tokens and back over HTTP: POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lockstep.gateway.chat.prompt import prompt_of
from lockstep.gateway.chat.template import Variants
from lockstep.gateway.context import GatewayContext, request_id
from lockstep.gateway.openapi.route_doc import RouteDoc
from lockstep.http.handlers import json_response, read_json
from lockstep.protocol.common.lazy_ids import as_list
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

OPERATIONS = tuple(
    operation
    for base in ("", "/v1")
    for operation in (
        RouteDoc(
            "POST", f"{base}/tokenize", TokenizeRequest, TokenizedPrompt, "Text or a chat as ids."
        ),
        RouteDoc("POST", f"{base}/detokenize", DetokenizeRequest, DetokenizedText, "Ids as text."),
    )
)


class TokenizeRoutes:
    """Both routes at the root, and the same under /v1.

    A chat is rendered by what renders it for /v1/chat/completions, so that the ids are those that
    a chat request would send.
    """

    def __init__(self, gateway: GatewayContext) -> None:
        self._gateway = gateway
        self._variants = Variants(gateway.book)
        self.routes = [
            Route(f"{base}/{name}", work, methods=["POST"])
            for base in ("", "/v1")
            for name, work in (("tokenize", self.tokenize), ("detokenize", self.detokenize))
        ]

    async def tokenize(self, http: Request) -> Response:
        request_id(http)
        asked = decode_tokenize(await read_json(http, self._gateway.body_limit))
        served = await self._gateway.book.resolve(asked.model)
        renderer = await self._gateway.book.renderer()
        if asked.messages is None:
            text = asked.prompt or ""
            ids = await renderer.offload(renderer.encode, text, special=asked.special)
        else:
            ids = await self._chat_ids(asked, renderer)
        answer = TokenizedPrompt(count=len(ids), max_model_len=served.max_model_len, tokens=ids)
        if asked.return_token_strs:
            answer.token_strs = renderer.tokenizer.convert_ids_to_tokens(ids)
        if asked.return_token_bytes:
            answer.token_bytes = [list(renderer.pieces.data(token)) for token in ids]
        return json_response(msgspec.json.encode(answer))

    async def detokenize(self, http: Request) -> Response:
        request_id(http)
        asked = decode_detokenize(await read_json(http, self._gateway.body_limit))
        await self._gateway.book.resolve(asked.model)
        renderer = await self._gateway.book.renderer()
        pieces = await renderer.offload(pieces_of, asked.tokens, renderer, "tokens")
        answer = DetokenizedText(prompt=b"".join(pieces).decode(errors="replace"))
        if asked.return_token_bytes:
            answer.token_bytes = [list(piece) for piece in pieces]
        return json_response(msgspec.json.encode(answer))

    async def _chat_ids(self, asked: TokenizeRequest, renderer: Renderer) -> list[int]:
        chat = ChatRequest(
            messages=asked.messages or [],
            tools=asked.tools,
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
            chat_template_kwargs=asked.chat_template_kwargs,
            required_prefix_token_ids=asked.required_prefix_token_ids,
        )
        prefix = asked.required_prefix_token_ids or []
        await renderer.offload(pieces_of, prefix, renderer, "required_prefix_token_ids")
        prompt = await prompt_of(chat, await self._variants.of(chat), None)
        if not asked.special:
            return as_list(prompt.ids)
        return await renderer.offload(
            lambda: renderer.encode(renderer.decode(prompt.ids), special=True)
        )


def pieces_of(ids: list[int], renderer: Renderer, field: str) -> list[bytes]:
    """The bytes of each id. Raises BadTokenId that names the first one that does not exist."""
    found: list[bytes] = []
    for at, token in enumerate(ids):
        try:
            found.append(renderer.pieces.data(token))
        except BadTokenId:
            raise BadTokenId(
                f"{field}[{at}] is {token}: no token of this model has that id",
                param=f"{field}[{at}]",
            ) from None
    return found
