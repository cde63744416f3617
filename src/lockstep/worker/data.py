"""The worker's data port: vLLM's generate dialect, health, models and metrics."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lockstep import engine as embedded
from lockstep import tracing
from lockstep.engine import Engine
from lockstep.http import sse
from lockstep.http.auth import FixedKeys, RequestAuth
from lockstep.http.handlers import EXCEPTION_HANDLERS, EventStream, json_response
from lockstep.http.http_request import read_body, unless_gone
from lockstep.http.off_loop import is_large_response, off_loop
from lockstep.protocol.common.model_card import ModelCard, ModelList
from lockstep.protocol.common.request_id import TENANT_HEADER, check_request_id
from lockstep.protocol.json.strict import LIMITS, RequestLimits
from lockstep.protocol.vllm import generate_response as wire
from lockstep.protocol.vllm.abort import AbortRequest, decode_abort
from lockstep.protocol.vllm.generate_request import GenerateBody, decode_request
from lockstep.tokens import Completion
from lockstep.tokens.errors import BadRequest, Unavailable, UnknownModel
from lockstep.worker.metrics import WorkerMetrics

PREFIX = wire.REQUEST_ID_PREFIX


def engine_request_id(request_id: str) -> str:
    """Return the engine's id of a request: with vLLM's prefix, added if missing."""
    return PREFIX + request_id.removeprefix(PREFIX)


class DataPlane:
    """Routes of the data port, over one engine that serves `model` (and its adapters).

    Requests need one of `keys`, if there are any, and one of `hosts`, unless that is None. With
    `return_routed_experts` every response includes them. Raises BadRequest when the model has none.
    """

    def __init__(
        self,
        engine: Engine,
        model: str,
        root: Path,
        *,
        keys: Iterable[str] = (),
        hosts: Iterable[str] | None = None,
        return_routed_experts: bool = False,
        limits: RequestLimits = LIMITS,
    ) -> None:
        if return_routed_experts and not engine.core.config.moe_layers:
            raise BadRequest(
                f"--return-routed-experts is set, but {model} is not a mixture of experts: leave "
                "it out",
                param="return_routed_experts",
            )
        self.engine = engine
        self.model = model
        self.root = root
        self.created = int(time.time())
        self.instance = secrets.token_hex(8)
        self.draining = False
        self.limits = limits
        self._always_experts = return_routed_experts
        self.metrics = WorkerMetrics(engine, model)
        self.app = Starlette(
            routes=[
                Route("/inference/v1/generate", self.generate, methods=["POST"]),
                Route("/inference/v1/abort_requests", self.abort, methods=["POST"]),
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/metrics", self.scrape),
            ],
            middleware=[Middleware(RequestAuth, keys=FixedKeys(keys), hosts=hosts)],
            exception_handlers=EXCEPTION_HANDLERS,
        )

    async def generate(self, http: Request) -> Response:
        """Generate for a request, whole or streamed. X-Request-Id overrides the body's id."""
        header = http.headers.get("x-request-id")
        check_request_id(header or None, "x-request-id")
        http.state.request_id = engine_request_id(header or secrets.token_hex(8))
        body = await read_body(http, decode_request, self.limits)
        check_request_id(body.request_id or None)
        if body.request_id and not header:
            http.state.request_id = engine_request_id(body.request_id)
        if self.draining:
            raise Unavailable("this worker is shutting down: send the request to another one")
        tenant = http.headers.get(TENANT_HEADER, "")
        request = self._request(body, http.state.request_id, tenant)
        if tracing.active is not None:
            tracing.active.generation(body.model or self.model, request.sampling)
        if body.stream:
            # Raise errors of the request before the response starts with status 200.
            await self.engine.check(request)
            return EventStream(self._events(body, request), request.request_id)
        completions = await unless_gone(http, self.engine.generate(request))
        if tracing.active is not None:
            tracing.active.generated(completions)
        response = await off_loop(
            is_large_response(completions, request.sampling.logprobs),
            wire.generate_response,
            completions,
            request_id=request.request_id,
            model=body.model or self.model,
            created=int(time.time()),
            form=body.form,
        )
        return json_response(response)

    async def _events(
        self, body: GenerateBody, request: embedded.EngineRequest
    ) -> AsyncIterator[bytes]:
        mode = request.sampling.logprob_mode or self.engine.options.logprob_mode
        stream = wire.GenerateStreamEncoder(
            request.request_id,
            request.prompt_ids,
            body.form,
            logprob_mode=mode,
            worker=self.engine.options.worker,
        )
        completions: list[Completion] = []
        async for piece in self.engine.stream(request):
            sampled = piece.sampled
            if piece.completion is not None and tracing.active is not None:
                completions.append(piece.completion)
                tracing.active.generated(completions)
            tokens = [] if sampled is None else [sampled]
            yield sse.event(
                stream.chunk(
                    piece.index,
                    [t.token_id for t in tokens],
                    [t.logprob for t in tokens],
                    [t.rank for t in tokens],
                    [t.top for t in tokens],
                    piece.completion,
                    piece.version,
                )
            )
        if body.include_usage:
            yield sse.event(stream.usage())

    def _request(
        self, body: GenerateBody, request_id: str, tenant: str = ""
    ) -> embedded.EngineRequest:
        sampling = body.sampling()
        return embedded.EngineRequest(
            prompt_ids=body.token_ids,
            sampling=sampling,
            request_id=request_id,
            priority=body.priority,
            cache_salt=body.cache_salt,
            adapter=self._adapter(body.model),
            experts_start=self._experts_start(body),
            support=sampling.records_support(body.support),
            weight_version=body.weight_version,
            min_weight_version=body.min_weight_version,
            skip_prefix_cache=bool(body.sampling_params.skip_reading_prefix_cache),
            tenant=tenant,
        )

    def _experts_start(self, body: GenerateBody) -> int | None:
        """Return the first row of routed experts to return, or None if they were not requested."""
        if body.experts_start is None and self._always_experts:
            return body.experts_skipped or 0
        return body.experts_start

    def _adapter(self, name: str | None) -> str | None:
        """Return the adapter of that model name, or None for the base. Raises UnknownModel."""
        adapters = self.engine.adapters
        if name is None or name == self.model:
            return None
        if name in adapters:
            return name
        served = ", ".join([self.model, *adapters])
        raise UnknownModel(f"the model {name!r} does not exist; served are {served}", param="model")

    async def abort(self, http: Request) -> Response:
        """Stop requests by id, with or without the prefix; return how many were running."""
        body: AbortRequest = await read_body(http, decode_abort, self.limits)
        if not body.request_ids:
            raise BadRequest("request_ids is empty: name at least one", param="request_ids")
        stopped = await self.engine.abort(*map(engine_request_id, body.request_ids))
        return json_response({"status": "aborted", "aborted": stopped})

    async def health(self, _: Request) -> Response:
        if not self.engine.alive or self.draining:
            raise Unavailable("draining" if self.draining else "the engine has stopped")
        if self.engine.problem is not None:
            raise Unavailable(self.engine.problem)
        stats = self.engine.stats()
        keys = ("state", "running", "waiting", "version", "arithmetic")
        view = {key: stats[key] for key in keys}
        return json_response({"status": "ok", "instance": self.instance, **view})

    async def models(self, _: Request) -> Response:
        """Return the base model, then its adapters with their parent."""
        cards = [self._card(self.model, str(self.root), None, self.engine.version)]
        for adapter in self.engine.adapters.values():
            label = self.engine.version_of(adapter)
            cards.append(self._card(adapter.name, str(adapter.path), self.model, label))
        return json_response(ModelList(cards))

    def _card(self, name: str, root: str, parent: str | None, version: str) -> ModelCard:
        return ModelCard(
            id=name,
            max_model_len=self.engine.max_model_len,
            weight_version=version,
            parent=parent,
            owned_by="lockstep",
            numerics=self.engine.plan,
            logprob_mode=self.engine.options.logprob_mode,
            root=root,
            created=self.created,
        )

    async def scrape(self, _: Request) -> Response:
        body, media_type = self.metrics.exposition()
        return Response(body, media_type=media_type)
