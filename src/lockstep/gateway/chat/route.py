"""POST /v1/chat/completions: OpenAI's chat in front of a fleet, token-exact within sessions."""

from __future__ import annotations

from time import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as HttpRoute

from lockstep.fleet.routing.affinity import Affinity
from lockstep.fleet.worker import Worker
from lockstep.gateway.chat.prompt import ChatPrompt, prompt_of
from lockstep.gateway.chat.stream import ChatStream
from lockstep.gateway.chat.template import RendererVariants
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

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._variants = RendererVariants(context.models)
        self.routes = [
            HttpRoute("/v1/chat/completions", self.chat, methods=["POST"]),
            HttpRoute("/v1/chat/completions/tokens", self.tokens, methods=["POST"]),
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

    async def _read(self, http: Request) -> ChatRequest:
        request_id(http)
        return decode_chat(await read_json(http, self._context.body_limit))

    async def _respond(self, http: Request, chat: ChatRequest) -> Response:
        turn = await self._turn(http, chat)
        response = await (self._stream(http, turn) if chat.stream else self._whole(http, turn))
        response.headers["x-request-id"] = http.state.request_id
        response.headers.update(turn.headers)
        return response

    async def _turn(self, http: Request, chat: ChatRequest) -> ChatTurn:
        received, chosen_id = time(), request_id(http, chat.request_id)
        model = await self._context.models.resolve(chat.model)
        renderer = await self._variants.of(chat)
        session = await self._session(http, renderer)
        prompt = await prompt_of(chat, renderer, session)
        request = _generate_request(chat, prompt, model.name, renderer, chosen_id)
        return ChatTurn(
            chat=chat,
            request=request,
            affinity=Affinity.of(
                request.prompt_ids,
                session=session_id(http) or chat.session_id,
                salt=request.cache_salt,
                adapter=model.adapter,
                worker=self._pinned(chat),
            ),
            renderer=renderer,
            session=session,
            plan=prompt.plan,
            shape=_shape(chat, model.name, renderer, chosen_id, int(received)),
            received=received,
        )

    async def _session(self, http: Request, renderer: Renderer) -> Session | None:
        breaks = http.headers.get("x-session-breaks", GATEWAY_BREAKS)
        checked = check_breaks(breaks, "X-Session-Breaks")
        name = session_id(http)
        if name is None:
            return None
        return await self._context.sessions.open(name, renderer, breaks=checked)

    async def _whole(self, http: Request, turn: ChatTurn) -> Response:
        async def call(worker: Worker) -> tuple[str, list[Completion]]:
            return worker.id, await worker.generate(turn.request)

        async def work() -> bytes:
            worker, completions = await self._context.pool.run(turn.affinity, call)
            choices = await turn.commit([await turn.read(each) for each in completions])
            return wire.chat_response(turn.shape, choices, worker=worker, timing=turn.timing(None))

        return json_response(await unless_gone(http, work()))

    async def _stream(self, http: Request, turn: ChatTurn) -> Response:
        stream = ChatStream(turn, self._context.pool)
        # Waits for the first tokens before the first byte: until then an error can be a status.
        await unless_gone(http, stream.start())
        return EventStream(stream.events(), http.state.request_id)

    def _pinned(self, chat: ChatRequest) -> str | None:
        """The worker that nvext.backend_instance_id names, by its id or by the integer for it."""
        pinned = chat.extension.pinned
        if pinned is None:
            return None
        known = [worker.id for worker in self._context.pool.workers]
        for name in known:
            if pinned in (name, str(instance_id(name))):
                return name
        listed = ", ".join(f"{instance_id(name)} ({name})" for name in known[:20])
        raise BadRequest(
            f"nvext.backend_instance_id is {pinned}: no such worker; there are {listed or 'none'}",
            param="nvext.backend_instance_id",
        )


def _generate_request(
    chat: ChatRequest, prompt: ChatPrompt, model: str, renderer: Renderer, chosen_id: str
) -> GenerateRequest:
    return GenerateRequest(
        prompt_ids=prompt.ids,
        sampling=chat.sampling(renderer.stop_token_ids),
        model=model,
        request_id=chosen_id,
        cache_salt=chat.salt,
        priority=chat.rank,
        experts_start=chat.experts_start,
        experts_skipped=chat.routed_experts_prompt_start,
        weight_version=chat.weight_version,
        min_weight_version=chat.min_weight_version,
        headers={"X-Request-Id": chosen_id},
    )


def _shape(
    chat: ChatRequest, model: str, renderer: Renderer, chosen_id: str, created: int
) -> wire.ChatResponseShape:
    return wire.ChatResponseShape(
        id=chosen_id if chosen_id.startswith("chatcmpl-") else f"chatcmpl-{chosen_id}",
        model=model,
        created=created,
        spelling=renderer.pieces,
        logprobs=bool(chat.logprobs),
        top=chat.top_logprobs or 0,
        tokens_as_ids=bool(chat.return_tokens_as_token_ids),
        token_ids=bool(chat.return_token_ids),
        ids_on_message=bool(chat.return_token_id_information),
        reasoning=chat.include_reasoning is not False,
        experts=bool(chat.return_routed_experts),
        prompt_logprobs=chat.prompt_logprobs is not None,
        stop_token_ids=frozenset(chat.stop_token_ids or ()),
        extra_fields=chat.extension.requested_fields,
    )
