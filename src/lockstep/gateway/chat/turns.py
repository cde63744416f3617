"""Makes a turn of a request, and runs it: what every agent dialect stands on.

A dialect reads its own body into a ChatRequest, and writes what comes back in its own shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import time

from starlette.requests import Request

from lockstep import tracing
from lockstep.fleet.routing.affinity import Affinity
from lockstep.fleet.worker import Worker
from lockstep.gateway.chat.origin import origin_of
from lockstep.gateway.chat.parts import PartStream
from lockstep.gateway.chat.prompt import ChatPrompt, prompt_of
from lockstep.gateway.chat.room import check_chat_room
from lockstep.gateway.chat.template import RendererVariants
from lockstep.gateway.chat.turn import ChatTurn
from lockstep.gateway.context import GatewayContext, join_session, request_id, session_id
from lockstep.gateway.tenants import Caller, caller_of
from lockstep.http.body import body_bytes
from lockstep.http.handlers import unless_gone
from lockstep.ledger.branch_sample import check_comparable
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.dynamo.nvext import instance_id
from lockstep.protocol.openai import chat_response as wire
from lockstep.protocol.openai.chat_request import ChatRequest
from lockstep.render import Renderer
from lockstep.render.messages import Plain
from lockstep.render.thought import with_thought
from lockstep.render.tool_grammar import tool_grammar
from lockstep.tokens import Completion
from lockstep.tokens.errors import BadRequest, UnsupportedField


class ChatTurns:
    """Turns of one gateway."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._variants = RendererVariants(context.models)

    async def open(
        self,
        http: Request,
        chat: ChatRequest,
        *,
        clamp: bool = False,
        found_tools: Sequence[Plain] = (),
    ) -> ChatTurn:
        """The turn of a request, ready to be sent to a worker.

        With `clamp`, a token limit beyond the room that the prompt leaves is lowered to it, which
        the header x-lockstep-max-tokens says. `found_tools` may be called too, and are described
        in the messages. Raises BadRequest, UnknownModel, PrefixBreak.
        """
        received, chosen_id = time(), request_id(http, chat.request_id)
        model = await self._context.models.resolve(chat.model)
        if tracing.active is not None:
            tracing.active.start_turn("chat", model.name, session_id(http))
        renderer = await self._variants.of(chat)
        await check_chat_room(chat, body_bytes(http), renderer, model.max_model_len)
        session = await join_session(http, self._context, renderer)
        prompt = await prompt_of(chat, renderer, session)
        request = _generate_request(chat, prompt, model.name, renderer, chosen_id, caller_of(http))
        if session is not None and session.strict and prompt.plan is not None:
            check_comparable(
                prompt.plan.parent,
                temperature=request.sampling.temperature,
                logprob_mode=request.sampling.logprob_mode,
                adapter=model.adapter,
            )
        headers: dict[str, str] = {}
        if clamp:
            request, headers = _clamped(request, model.max_model_len)
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
            max_model_len=model.max_model_len,
            headers=headers,
            found_tools=tuple(found_tools),
            origin=None if session is None else origin_of(http, chat.messages),
        )

    async def run(self, http: Request, turn: ChatTurn) -> tuple[str, list[wire.ChatReply]]:
        """The worker that took the turn, and its choices, stored in the session already."""

        async def call(worker: Worker) -> tuple[str, list[Completion]]:
            return worker.id, await worker.generate(turn.request)

        async def work() -> tuple[str, list[wire.ChatReply]]:
            worker, completions = await self._context.pool.run(turn.affinity, call)
            return worker, await turn.commit([await turn.read(each) for each in completions])

        return await unless_gone(http, work())

    async def stream(self, http: Request, turn: ChatTurn) -> PartStream:
        """The parts of the turn, once its first tokens are there: until then an error can be a
        status."""
        stream = PartStream(turn, self._context.pool)
        await unless_gone(http, stream.start())
        return stream

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


def _clamped(
    request: GenerateRequest, max_model_len: int | None
) -> tuple[GenerateRequest, dict[str, str]]:
    limit = request.sampling.max_tokens
    room = None if max_model_len is None else max_model_len - len(request.prompt_ids)
    if limit is None or room is None or not 0 < room < limit:
        return request, {}
    sampling = replace(request.sampling, max_tokens=room)
    return replace(request, sampling=sampling), {"x-lockstep-max-tokens": str(room)}


def _generate_request(
    chat: ChatRequest,
    prompt: ChatPrompt,
    model: str,
    renderer: Renderer,
    chosen_id: str,
    caller: Caller,
) -> GenerateRequest:
    name = caller.request_id(chosen_id)
    sampling = chat.sampling(renderer.stop_token_ids)
    grammar = tool_grammar(
        renderer,
        chat.tools,
        chat.tool_choice,
        parallel=chat.parallel_tool_calls is not False,
        content=sampling.grammar,
    )
    if grammar is not None and chat.continues:
        # The engine would begin the grammar anew, in the middle of what it holds to.
        raise UnsupportedField(
            "continue_final_message does not go with a schema or a demanded call, which hold from "
            "the first token of a message on: leave one of them out",
            param="continue_final_message",
        )
    if grammar is not None:
        grammar = with_thought(renderer, prompt.ids, grammar)
    if grammar is not sampling.grammar:
        sampling = replace(sampling, grammar=grammar)
    return GenerateRequest(
        prompt_ids=prompt.ids,
        sampling=sampling,
        model=model,
        request_id=name,
        cache_salt=caller.cache_salt(chat.salt),
        priority=chat.rank,
        experts_start=chat.experts_start,
        experts_skipped=chat.routed_experts_prompt_start,
        weight_version=chat.weight_version,
        min_weight_version=chat.min_weight_version,
        headers={"X-Request-Id": name},
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
        # NeMo-RL sends the prefix and reads the ids of the next one from the message.
        ids_on_message=bool(chat.return_token_id_information)
        or chat.required_prefix_token_ids is not None,
        reasoning=chat.include_reasoning is not False,
        experts=bool(chat.return_routed_experts),
        prompt_logprobs=chat.prompt_logprobs is not None,
        functions=bool(chat.functions),
        stop_token_ids=frozenset(chat.stop_token_ids or ()),
        extra_fields=chat.extension.requested_fields,
    )
