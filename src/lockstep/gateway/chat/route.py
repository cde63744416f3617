"""The chat face: OpenAI's contract in front of a fleet, with every token accounted for."""

from __future__ import annotations

from time import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as HttpRoute

from lockstep.fleet.routing.affinity import Affinity
from lockstep.fleet.routing.pool import Worker
from lockstep.gateway.chat.prompt import ChatPrompt, prompt_of
from lockstep.gateway.chat.stream import ChatStream
from lockstep.gateway.chat.template import Variants
from lockstep.gateway.chat.turn import ChatTurn
from lockstep.gateway.context import GatewayContext, request_id, session_id
from lockstep.gateway.sessions.sessions import Session
from lockstep.http.handlers import EventStream, json_response, read_json, unless_gone
from lockstep.ledger.breaks import GATEWAY_BREAKS, check_breaks
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.dynamo.nvext import instance_id
from lockstep.protocol.openai import chat_response as wire
from lockstep.protocol.openai.chat_decode import decode_chat
from lockstep.protocol.openai.chat_request import ChatRequest
from lockstep.render import Renderer
from lockstep.tokens import Completion
from lockstep.tokens.errors import BadRequest


class ChatRoutes:
    """POST /v1/chat/completions, and /v1/chat/completions/tokens for prompts that are ids."""

    def __init__(self, gateway: GatewayContext) -> None:
        self._gateway = gateway
        self._variants = Variants(gateway.book)
        self.routes = [
            HttpRoute("/v1/chat/completions", self.chat, methods=["POST"]),
            HttpRoute("/v1/chat/completions/tokens", self.tokens, methods=["POST"]),
        ]

    async def chat(self, http: Request) -> Response:
        """One request, whole or streamed."""
        return await self._answer(http, await self._read(http))

    async def tokens(self, http: Request) -> Response:
        """The same for a prompt in `tokens`; messages beside it are not read."""
        asked = await self._read(http)
        if asked.tokens is None:
            raise BadRequest(
                "required field 'tokens' is missing: it holds the ids of the prompt", param="tokens"
            )
        return await self._answer(http, asked)

    async def _read(self, http: Request) -> ChatRequest:
        request_id(http)
        return decode_chat(await read_json(http, self._gateway.body_limit))

    async def _answer(self, http: Request, asked: ChatRequest) -> Response:
        turn = await self._turn(http, asked)
        response = await (self._stream(http, turn) if asked.stream else self._whole(http, turn))
        response.headers["x-request-id"] = http.state.request_id
        response.headers.update(turn.headers)
        return response

    async def _turn(self, http: Request, asked: ChatRequest) -> ChatTurn:
        received, chosen = time(), request_id(http, asked.request_id)
        served = await self._gateway.book.resolve(asked.model)
        renderer = await self._variants.of(asked)
        session = await self._session(http, renderer)
        prompt = await prompt_of(asked, renderer, session)
        ask = _ask(asked, prompt, served.name, renderer, chosen)
        return ChatTurn(
            asked=asked,
            ask=ask,
            route=Affinity.of(
                ask.prompt_ids,
                session=session_id(http) or asked.session_id,
                salt=ask.cache_salt,
                adapter=served.adapter,
                worker=self._pinned(asked),
            ),
            renderer=renderer,
            session=session,
            plan=prompt.plan,
            shape=_shape(asked, served.name, renderer, chosen, int(received)),
            received=received,
        )

    async def _session(self, http: Request, renderer: Renderer) -> Session | None:
        breaks = http.headers.get("x-session-breaks", GATEWAY_BREAKS)
        checked = check_breaks(breaks, "X-Session-Breaks")
        name = session_id(http)
        if name is None:
            return None
        return await self._gateway.sessions.open(name, renderer, breaks=checked)

    async def _whole(self, http: Request, turn: ChatTurn) -> Response:
        async def call(worker: Worker) -> tuple[str, list[Completion]]:
            return worker.id, await worker.generate(turn.ask)

        async def work() -> bytes:
            worker, done = await self._gateway.pool.run(turn.route, call)
            choices = await turn.commit([await turn.read(each) for each in done])
            return wire.chat_response(turn.shape, choices, worker=worker, timing=turn.timing(None))

        return json_response(await unless_gone(http, work()))

    async def _stream(self, http: Request, turn: ChatTurn) -> Response:
        stream = ChatStream(turn, self._gateway.pool)
        # The first tokens come before the first byte of the answer: a failure still has a status.
        await unless_gone(http, stream.start())
        return EventStream(stream.events(), http.state.request_id)

    def _pinned(self, asked: ChatRequest) -> str | None:
        """The worker that was asked for, by its id or by the integer that stands for it."""
        pinned = asked.extension.pinned
        if pinned is None:
            return None
        known = [worker.id for worker in self._gateway.pool.workers]
        for name in known:
            if pinned in (name, str(instance_id(name))):
                return name
        listed = ", ".join(f"{instance_id(name)} ({name})" for name in known[:20])
        raise BadRequest(
            f"nvext.backend_instance_id is {pinned}: no such worker; there are {listed or 'none'}",
            param="nvext.backend_instance_id",
        )


def _ask(
    asked: ChatRequest, prompt: ChatPrompt, model: str, renderer: Renderer, chosen: str
) -> GenerateRequest:
    return GenerateRequest(
        prompt_ids=prompt.ids,
        sampling=asked.sampling(renderer.stop_token_ids),
        model=model,
        request_id=chosen,
        cache_salt=asked.salt,
        priority=asked.rank,
        experts_start=asked.experts_start,
        weight_version=asked.weight_version,
        min_weight_version=asked.min_weight_version,
        headers={"X-Request-Id": chosen},
    )


def _shape(
    asked: ChatRequest, model: str, renderer: Renderer, chosen: str, created: int
) -> wire.ChatResponseShape:
    return wire.ChatResponseShape(
        id=chosen if chosen.startswith("chatcmpl-") else f"chatcmpl-{chosen}",
        model=model,
        created=created,
        spelling=renderer.pieces,
        logprobs=bool(asked.logprobs),
        top=asked.top_logprobs or 0,
        tokens_as_ids=bool(asked.return_tokens_as_token_ids),
        token_ids=bool(asked.return_token_ids),
        ids_on_message=bool(asked.return_token_id_information),
        reasoning=asked.include_reasoning is not False,
        experts=bool(asked.return_routed_experts),
        prompt_logprobs=asked.prompt_logprobs is not None,
        stop_token_ids=frozenset(asked.stop_token_ids or ()),
        wanted=asked.extension.wanted,
    )
