"""Routes that list and manage models, runs, checkpoints, sessions and samplers."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lockstep.http.handlers import json_response
from lockstep.integrations.tinker.downloads import Downloads
from lockstep.integrations.tinker.protocol import json_bodies as bodies
from lockstep.integrations.tinker.tinker_routes import PREFIX, body_of
from lockstep.integrations.tinker.tinker_store import (
    KINDS,
    SCHEME,
    CheckpointRecord,
    RunRecord,
    TinkerStore,
)
from lockstep.integrations.tinker.tinker_tenants import TinkerTenants
from lockstep.tokens.errors import BadRequest

CHECKPOINT = "training_runs/{run}/checkpoints/{kind}/{name}"
MAX_PAGE = 1000


class RestRoutes:
    """Routes that do not train. Each request sees the runs of its tenant."""

    def __init__(self, tenants: TinkerTenants) -> None:
        self._tenants = tenants
        self._downloads = Downloads()

    def _store(self, request: Request) -> TinkerStore:
        return self._tenants.of(request).store

    @property
    def routes(self) -> list[Route]:
        """All routes."""
        gets = {
            "healthz": self._health,
            "get_server_capabilities": self._capabilities,
            "training_runs": self._runs,
            "training_runs/{run}": self._run,
            "training_runs/{run}/checkpoints": self._run_checkpoints,
            "checkpoints": self._checkpoints,
            f"{CHECKPOINT}/external_weights_urls": self._download_urls,
            "sessions": self._sessions,
            "sessions/{session}": self._session,
            "samplers/{sampler}": self._sampler,
        }
        changes = [
            ("POST", "weights_info", self._weights_info),
            ("POST", "sessions/{session}/finish", self._finish),
            ("DELETE", CHECKPOINT, self._delete),
            ("PUT", f"{CHECKPOINT}/ttl", self._ttl),
            ("POST", f"{CHECKPOINT}/publish", self._publish),
            ("DELETE", f"{CHECKPOINT}/publish", self._unpublish),
        ]
        return [
            *(Route(f"{PREFIX}/{path}", handle, methods=["GET"]) for path, handle in gets.items()),
            *(
                Route(f"{PREFIX}/{path}", handle, methods=[method])
                for method, path, handle in changes
            ),
            *self._downloads.routes,
        ]

    async def _health(self, _: Request) -> Response:
        return json_response({"status": "ok"})

    async def _capabilities(self, request: Request) -> Response:
        base = self._tenants.of(request).base
        models = [
            {
                "model_name": name,
                "max_context_length": base.max_tokens,
                "trainable": True,
                "sampleable": True,
            }
            for name in base.all_names
        ]
        return json_response({"supported_models": models})

    # Runs and checkpoints

    async def _runs(self, request: Request) -> Response:
        page, cursor = _page(request, self._store(request).runs())
        runs = [_run_json(run, self._store(request)) for run in page]
        return json_response({"training_runs": runs, "cursor": cursor})

    async def _run(self, request: Request) -> Response:
        store = self._store(request)
        return json_response(_run_json(store.run(request.path_params["run"]), store))

    async def _run_checkpoints(self, request: Request) -> Response:
        run = self._store(request).run(request.path_params["run"])
        page, cursor = _page(request, self._store(request).checkpoints(run.model_id))
        return json_response(
            {"checkpoints": [_checkpoint_json(own) for own in page], "cursor": cursor}
        )

    async def _checkpoints(self, request: Request) -> Response:
        page, cursor = _page(request, self._store(request).checkpoints())
        return json_response(
            {"checkpoints": [_checkpoint_json(own) for own in page], "cursor": cursor}
        )

    async def _weights_info(self, request: Request) -> Response:
        path = bodies.read(bodies.TinkerPath, await body_of(request)).tinker_path
        record, _ = self._store(request).checkpoint(path)
        run = self._store(request).run(record.model_id)
        return json_response(
            {
                "base_model": run.base_model,
                "is_lora": True,
                "lora_rank": run.rank,
                "train_unembed": run.train_unembed,
                "train_mlp": run.train_mlp,
                "train_attn": run.train_attn,
                "optimizer_config": {"type": "adamw"},
            }
        )

    async def _download_urls(self, request: Request) -> Response:
        urls, expires = self._downloads.sign(request, self._store(request), _path(request))
        return json_response({"urls": urls, "expires": expires})

    async def _delete(self, request: Request) -> Response:
        await self._tenants.of(request).delete(_path(request))
        return Response(status_code=204)

    async def _ttl(self, request: Request) -> Response:
        seconds = bodies.read(bodies.Ttl, await body_of(request)).ttl_seconds
        self._store(request).set_ttl(_path(request), seconds)
        return Response(status_code=204)

    async def _publish(self, request: Request) -> Response:
        self._store(request).set_public(_path(request), True)
        return Response(status_code=204)

    async def _unpublish(self, request: Request) -> Response:
        self._store(request).set_public(_path(request), False)
        return Response(status_code=204)

    # Sessions and samplers

    async def _sessions(self, request: Request) -> Response:
        page, _ = _page(request, self._store(request).sessions())
        return json_response({"sessions": [session.session_id for session in page]})

    async def _session(self, request: Request) -> Response:
        session = self._store(request).session(request.path_params["session"])
        prefix = f"{session.session_id}:"
        runs = [
            run.model_id for run in self._store(request).runs() if run.model_id.startswith(prefix)
        ]
        samplers = [sampler.sampler_id for sampler in self._store(request).samplers()]
        return json_response(
            {
                "training_run_ids": runs,
                "sampler_ids": [sampler for sampler in samplers if sampler.startswith(prefix)],
                "user_metadata": _as_texts(session.user_metadata),
                "display_name": session.display_name,
            }
        )

    async def _finish(self, request: Request) -> Response:
        session = self._tenants.of(request).store.live_session(request.path_params["session"])
        try:
            body = msgspec.json.decode(await body_of(request))
            reason = str(body["reason"]["type"])
        except (msgspec.DecodeError, KeyError, TypeError):
            raise BadRequest("reason.type is missing", param="reason") from None
        self._store(request).put_session(msgspec.structs.replace(session, finished=reason))
        return Response(status_code=204)

    async def _sampler(self, request: Request) -> Response:
        sampler = self._tenants.of(request).sampling.find(request.path_params["sampler"])
        # The client loads its tokenizer by this name; a bundled model is on no hub.
        base = str(self._tenants.of(request).base.directory)
        return json_response(
            {
                "sampler_id": sampler.sampler_id,
                "base_model": base,
                "model_path": sampler.model_path,
            }
        )


def _page(request: Request, rows: list[Any]) -> tuple[list[Any], dict[str, int]]:
    """Return the requested part of a list, and its cursor."""
    try:
        limit, offset = (
            int(request.query_params.get(name, default))
            for name, default in (("limit", "100"), ("offset", "0"))
        )
    except ValueError:
        raise BadRequest("limit and offset must be whole numbers", param="limit") from None
    if not 0 <= limit <= MAX_PAGE or offset < 0:
        raise BadRequest(f"limit is {limit}: expected 0 to {MAX_PAGE}, offset >= 0", param="limit")
    cursor = {"offset": offset, "limit": limit, "total_count": len(rows)}
    return rows[offset : offset + limit], cursor


def _path(request: Request) -> str:
    parts = request.path_params
    return f"{SCHEME}{parts['run']}/{parts['kind']}/{parts['name']}"


def _run_json(run: RunRecord, store: TinkerStore) -> dict[str, Any]:
    checkpoints = store.checkpoints(run.model_id)
    last = {kind: next((own for own in checkpoints if own.kind == kind), None) for kind in KINDS}
    training, sampler = last["weights"], last["sampler_weights"]
    times = [run.created, *(checkpoint.created for checkpoint in checkpoints)]
    return {
        "training_run_id": run.model_id,
        "base_model": run.base_model,
        "model_owner": "local",
        "is_lora": True,
        "lora_rank": run.rank,
        "corrupted": False,
        "last_request_time": max(times),
        "last_checkpoint": None if training is None else _checkpoint_json(training),
        "last_sampler_checkpoint": None if sampler is None else _checkpoint_json(sampler),
        "user_metadata": _as_texts(run.user_metadata),
    }


def _checkpoint_json(record: CheckpointRecord) -> dict[str, Any]:
    return {
        "checkpoint_id": record.checkpoint_id,
        "checkpoint_type": KINDS[record.kind],
        "time": record.created,
        "tinker_path": record.path,
        "size_bytes": record.size,
        "public": record.public,
        "expires_at": record.expires,
        "user_metadata": record.user_metadata,
    }


def _as_texts(metadata: dict[str, Any] | None) -> dict[str, str] | None:
    """Return metadata as responses carry it: with text values."""
    return None if metadata is None else {key: str(value) for key, value in metadata.items()}
