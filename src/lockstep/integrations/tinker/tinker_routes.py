"""Routes that train and sample. Each call returns a request id, whose result is fetched later."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lockstep.http.handlers import json_response
from lockstep.http.http_request import JSON, read_pieces
from lockstep.integrations.tinker.calls.futures import PROTOBUF, Pending
from lockstep.integrations.tinker.protocol import json_bodies as bodies
from lockstep.integrations.tinker.protocol.protobuf_messages import ForwardBackwardRequest, identity
from lockstep.integrations.tinker.tinker_service import TinkerService
from lockstep.integrations.tinker.tinker_tenants import TinkerTenants
from lockstep.tokens.errors import BadRequest, Gone

PREFIX = "/api/v1"
POLL_SECONDS = 20.0
"""How long a poll is held. The client times out after 45 s, and polls again after a 408."""
BODY_BYTES = 256 << 20
CONFIG: dict[str, Any] = {"sample_use_retrieve_futures": True, "parallel_fwdbwd_chunks": True}
DYNAMIC_CONFIG: dict[str, Any] = {"sample_cancel_enabled": True}
B = TypeVar("B", bound=bodies.Body)


class TinkerRoutes:
    """Routes under /api/v1. Each request sees the runs of its tenant."""

    def __init__(self, tenants: TinkerTenants) -> None:
        self._tenants = tenants

    @property
    def routes(self) -> list[Route]:
        """All routes."""
        posts = {
            "client/config": self._config,
            "client/dynamic_config": self._dynamic_config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "telemetry": self._telemetry,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_external": self._save_weights_external,
            "load_weights": self._load_weights,
            "save_weights_for_sampler": self._save_weights_for_sampler,
            "create_sampling_session": self._create_sampling_session,
            "asample": self._sample,
            "retrieve_future": self._retrieve_future,
            "retrieve_futures": self._retrieve_futures,
            "cancel_future": self._cancel_future,
            "join_sampling_session": self._join,
        }
        return [
            Route(f"{PREFIX}/{path}", handle, methods=["POST"]) for path, handle in posts.items()
        ]

    # Clients

    async def _config(self, request: Request) -> Response:
        await body_of(request)
        return json_response(CONFIG)

    async def _dynamic_config(self, request: Request) -> Response:
        await body_of(request)
        return json_response(DYNAMIC_CONFIG)

    async def _create_session(self, request: Request) -> Response:
        record = self._tenants.of(request).create_session(
            bodies.read(bodies.CreateSession, await body_of(request))
        )
        return json_response({"session_id": record.session_id, "type": "create_session"})

    async def _heartbeat(self, request: Request) -> Response:
        self._tenants.of(request).store.live_session(
            bodies.read(bodies.SessionId, await body_of(request)).session_id
        )
        return json_response({"type": "session_heartbeat"})

    async def _telemetry(self, request: Request) -> Response:
        await body_of(request)
        return json_response({"status": "accepted"})

    # Training

    async def _create_model(self, request: Request) -> Response:
        body = bodies.read(bodies.CreateModel, await body_of(request))
        model_id, pending = self._tenants.of(request).create_model(body)
        return json_response({"request_id": pending.request_id, "model_id": model_id})

    async def _get_info(self, request: Request) -> Response:
        live = self._tenants.of(request).live(
            bodies.read(bodies.ModelId, await body_of(request)).model_id
        )
        run = live.run
        data = {
            "model_name": run.base_model,
            "tokenizer_id": str(self._tenants.of(request).base.directory),
        }
        return json_response(
            {
                "model_id": run.model_id,
                "model_data": data,
                "model_name": run.base_model,
                "is_lora": True,
                "lora_rank": run.rank,
                "type": "get_info",
            }
        )

    async def _forward_backward(self, request: Request) -> Response:
        raw = b"".join(await read_pieces(request, BODY_BYTES, (PROTOBUF,)))
        try:
            if encoding := request.headers.get("content-encoding"):
                raise BadRequest(
                    f"content-encoding is {encoding!r}: send the body without compression",
                    param="content-encoding",
                )
            pending = self._tenants.of(request).forward_backward(ForwardBackwardRequest.decode(raw))
        except BadRequest:
            model_id, seq_id = identity(raw) or (None, None)
            self._tenants.of(request).reject(model_id, seq_id, trains=True)
            raise
        return _accepted(pending)

    async def _optim_step(self, request: Request) -> Response:
        return await self._call(request, bodies.OptimStep, TinkerService.optim_step)

    async def _save_weights(self, request: Request) -> Response:
        return await self._call(request, bodies.SaveWeights, TinkerService.save_weights)

    async def _save_weights_external(self, request: Request) -> Response:
        call = TinkerService.save_weights_external
        return await self._call(request, bodies.SaveWeightsExternal, call)

    async def _load_weights(self, request: Request) -> Response:
        return await self._call(request, bodies.LoadWeights, TinkerService.load_weights)

    async def _save_weights_for_sampler(self, request: Request) -> Response:
        call = TinkerService.save_weights_for_sampler
        return await self._call(request, bodies.SaveWeightsForSampler, call)

    async def _call(
        self, request: Request, kind: type[B], call: Callable[[TinkerService, B], Pending]
    ) -> Response:
        """Submit one call of a model. A rejected call is counted, so that later calls go on."""
        service, raw = self._tenants.of(request), await body_of(request)
        try:
            return _accepted(call(service, bodies.read(kind, raw)))
        except BadRequest:
            call_id = bodies.identity_of(raw)
            service.reject(call_id.model_id, call_id.seq_id, trains=False)
            raise

    # Sampling

    async def _create_sampling_session(self, request: Request) -> Response:
        body = bodies.read(bodies.CreateSamplingSession, await body_of(request))
        sampler = self._tenants.of(request).sampling.create_sampling_session(body)
        return json_response({"sampling_session_id": sampler.sampler_id})

    async def _sample(self, request: Request) -> Response:
        body = bodies.read(bodies.SampleCall, await body_of(request))
        pending = self._tenants.of(request).sampling.sample(body)
        ids = [f"{pending.request_id}:{index}" for index in range(body.num_samples)]
        return json_response({"request_id": pending.request_id, "sample_sequence_ids": ids})

    async def _join(self, request: Request) -> Response:
        sampler_id = bodies.read(
            bodies.SamplingSessionId, await body_of(request)
        ).sampling_session_id
        self._tenants.of(request).sampling.find(sampler_id)
        # Random, not counted: after a restart a counter would give two clones one number.
        counter = 1 + secrets.randbelow(2**30)
        return json_response({"type": "join_sampling_session", "client_counter": counter})

    # Results

    async def _retrieve_future(self, request: Request) -> Response:
        request_id = bodies.read(bodies.RetrieveFuture, await body_of(request)).request_id
        result = await self._tenants.of(request).futures.wait(request_id, POLL_SECONDS)
        if result is None:
            waiting = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return json_response(waiting, 408)
        return Response(result.body, media_type=result.kind)

    async def _retrieve_futures(self, request: Request) -> Response:
        body = bodies.read(bodies.RetrieveFutures, await body_of(request))
        futures, target = self._tenants.of(request).futures, body.target
        futures.drop(body.retrieved_request_ids)
        label = f"{target.sampling_session_id}/{target.cloned_sampler_id}"
        seconds = POLL_SECONDS if body.timeout is None else min(body.timeout, POLL_SECONDS)
        ended, cursor = await futures.wait_any(label, body.prev_cursor, seconds)
        completions = [_completion(pending) for pending in ended]
        return json_response({"completions": completions, "cursor": cursor})

    async def _cancel_future(self, request: Request) -> Response:
        request_id = bodies.read(bodies.RetrieveFuture, await body_of(request)).request_id
        with suppress(Gone):  # the work is over, which is what the client wants
            self._tenants.of(request).futures.cancel(request_id)
        return Response(status_code=204)


async def body_of(request: Request) -> bytes:
    """Return the JSON body. Raises BadRequest or TooLarge."""
    return b"".join(await read_pieces(request, BODY_BYTES, (JSON,)))


def _accepted(pending: Pending) -> Response:
    return json_response({"request_id": pending.request_id})


def _completion(pending: Pending) -> dict[str, Any]:
    result = pending.result
    if result is None or result.failed:
        return {"state": "failed", "request_id": pending.request_id}
    return {
        "state": "finished",
        "request_id": pending.request_id,
        "response_payload_uncompressed_size": len(result.body),
    }
