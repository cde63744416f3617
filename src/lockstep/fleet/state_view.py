"""The state of a fleet as the state route, the CLI and the dashboard show it."""

from __future__ import annotations

from time import time
from typing import Any

import msgspec

from lockstep.fleet.fleet import Fleet

STATE_OPERATIONS = 20


async def fleet_state(fleet: Fleet) -> dict[str, Any]:
    """Return desired and applied versions, the pause, the workers and the last operations."""
    workers = worker_views(fleet)
    serving = [worker for worker in workers if worker["state"] == "serving"]
    desired = fleet.desired
    return {
        "ready": bool(serving) and desired.paused is None,
        **msgspec.to_builtins(fleet.replica.view()),
        "superseded": fleet.operations.superseded,
        "version": desired.version,
        "applied": sorted({str(worker["version"]) for worker in serving}),
        "checkpoint": desired.checkpoint,
        "paused": desired.paused,
        "lease_seconds": None if desired.lease_until is None else desired.lease_until - time(),
        "adapters": {name: spec.label for name, spec in desired.adapters.items()},
        "in_flight": fleet.pool.in_flight,
        "waiting": fleet.pool.waiting,
        "serving": len(serving),
        "workers": workers,
        "refused": [
            {"id": name, "reason": why} for name, why in sorted(fleet.state.refused.items())
        ],
        "running": [operation.kind for operation in fleet.operations.running],
        "operations": [
            {
                "id": operation.id,
                "kind": operation.kind,
                "status": operation.status,
                "version": operation.version,
                "error": operation.error,
                "warnings": operation.warnings,
                "pause_seconds": operation.pause_seconds,
                "seconds": None if operation.ended is None else operation.ended - operation.started,
                "workers": msgspec.to_builtins(operation.workers),
            }
            for operation in await fleet.operations.latest(STATE_OPERATIONS)
        ],
    }


def worker_views(fleet: Fleet) -> list[dict[str, Any]]:
    """Return one row per worker: its URLs, state, version, the reason it is out, and the next
    probe."""
    return [
        {
            "id": worker.id,
            "url": worker.url,
            "admin_url": worker.control.url,
            "backend": worker.control.name,
            "state": worker.state,
            "version": worker.version,
            "reason": worker.reason,
            "since": worker.since,
            "in_flight": worker.in_flight,
            "gpus": list(worker.gpus),
            "next_try_seconds": fleet.pool.next_try(worker),
        }
        for worker in fleet.workers
    ]
