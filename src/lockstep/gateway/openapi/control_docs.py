"""The routes of the control plane, for its OpenAPI document."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from lockstep.gateway.openapi.route_doc import QueryDoc, RouteDoc
from lockstep.gateway.routes.control_sessions import (
    MAX_PAGE,
    MAX_WAIT,
    DeletedSession,
    SessionPage,
    SessionView,
)
from lockstep.gateway.sessions.info import SessionInfo
from lockstep.protocol.control import fleet as wire
from lockstep.protocol.control.sessions import FinishSession, MintedSession, MintSession
from lockstep.tokens.lineage import WEIGHTS
from lockstep.tokens.operation import Operation

MODES = {"type": "string", "enum": ["keep", "wait", "abort"]}
SECONDS = {"type": "number", "minimum": 0}
FLAG = {"type": "boolean"}


class OperationResponse(msgspec.Struct):
    """The result of a change on each worker. Some changes add fields."""

    status: str
    version: str | None
    operation: Operation


class FleetStateResponse(msgspec.Struct):
    """The state of the fleet: versions, pause, workers, and the last operations."""

    ready: bool
    version: str
    applied: list[str]
    checkpoint: str | None
    paused: str | None
    lease_seconds: float | None
    adapters: dict[str, str]
    in_flight: int
    waiting: int
    serving: int
    workers: list[dict[str, Any]]
    running: list[str]
    operations: list[dict[str, Any]]


class WorkerList(msgspec.Struct):
    workers: list[dict[str, Any]]


class WorkerChanged(msgspec.Struct):
    status: str
    id: str
    state: str | None = None


class ControlHealth(msgspec.Struct):
    status: str


class Readiness(msgspec.Struct):
    ready: bool
    version: str


class WeightVersion(msgspec.Struct):
    weight_version: str


class ServedModels(msgspec.Struct):
    object: str
    data: list[dict[str, Any]]


_view = partial(RouteDoc, "GET", sessions=False, headers=())
_change = partial(
    RouteDoc, "POST", sessions=False, body_required=False, headers=("Idempotency-Key",)
)
_SAMPLES = (
    QueryDoc("format", {"type": "string", "enum": ["json", "msgpack"]}),
    QueryDoc("train_aborted", FLAG),
    QueryDoc("dedupe", FLAG),
    QueryDoc("kinds", {"type": "string"}),
    QueryDoc("weights", {"type": "string", "enum": list(WEIGHTS)}),
)

CONTROL_ROUTE_DOCS: tuple[RouteDoc, ...] = (
    _view("/v1/rl/state", None, FleetStateResponse, "Versions, pause, workers, last operations."),
    _view("/v1/rl/health", None, ControlHealth, "200 while the control plane runs."),
    _view("/v1/rl/ready", None, Readiness, "200 when the fleet serves, else 503."),
    _view("/v1/rl/weight_version", None, WeightVersion, "The version that the fleet has accepted."),
    _view("/v1/rl/workers", None, WorkerList,
          "State and version of each worker, and why it does not serve."),
    _view("/v1/rl/workers/{worker}/ready", None, Readiness,
          "200 while a worker is proved and gets traffic, else 503."),
    _view("/v1/rl/operations/{operation}", None, Operation, "One operation, by its id."),
    _view("/v1/rl/metrics", None, None, "The load of each engine, under vLLM's metric names."),
    _view("/v1/rl/v1/models", None, ServedModels, "The models that workers serve now."),
    _change("/v1/rl/workers", wire.AddWorker, WorkerChanged, "Adds a worker.",
            status=201, body_required=True, headers=()),
    RouteDoc("DELETE", "/v1/rl/workers/{worker}", None, WorkerChanged,
             "Drains and removes a worker.", sessions=False,
             query=(QueryDoc("drain_seconds", SECONDS),), headers=()),
    _change("/v1/rl/pause", wire.PauseFleet, OperationResponse, "Pauses the workers.",
            query=(QueryDoc("mode", MODES), QueryDoc("clear_cache", FLAG),
                   QueryDoc("lease_seconds", SECONDS))),
    _change("/v1/rl/resume", wire.EmptyFleetBody, OperationResponse, "Ends a pause."),
    _change("/v1/rl/flush_cache", wire.EmptyFleetBody, OperationResponse,
            "Drops cached prompts."),
    _change("/v1/rl/update_weights", wire.UpdateWeights, OperationResponse,
            "Loads and proves new weights on every worker.", body_required=True),
    _change("/v1/rl/init_broadcaster", wire.InitBroadcaster, OperationResponse,
            "Makes the workers join a process group that broadcasts weights.", body_required=True),
    *(
        _change(f"/v1/rl{prefix}/{name}_lora_adapter", body, OperationResponse, summary,
                body_required=True)
        for prefix in ("", "/v1")
        for name, body, summary in (
            ("load", wire.LoadAdapter, "Loads a LoRA adapter on every worker."),
            ("unload", wire.UnloadAdapter, "Unloads a LoRA adapter."),
        )
    ),
    _view("/v1/rl/sessions", None, SessionPage, "Sessions in pages.",
          query=(QueryDoc("after", {"type": "string"}),
                 QueryDoc("limit", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}))),
    _change("/v1/rl/sessions", MintSession, MintedSession,
            "Creates a session and a key that can use only this session.", status=201,
            headers=("X-Request-Id",)),
    _view("/v1/rl/sessions/{id}", None, SessionView, "A session and its samples.", query=_SAMPLES),
    RouteDoc("DELETE", "/v1/rl/sessions/{id}", None, DeletedSession, "Deletes a session.",
             sessions=False, headers=("X-Request-Id",)),
    _change("/v1/rl/sessions/{id}/finish", FinishSession, SessionInfo,
            "Ends a session with its reward.", headers=("X-Request-Id",)),
    _view("/v1/rl/sessions/{id}/wait", None, SessionInfo,
          "The session when it has ended, or after so many seconds.",
          query=(QueryDoc("seconds", {"type": "number", "minimum": 0, "maximum": MAX_WAIT}),)),
)  # fmt: skip
