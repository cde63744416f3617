"""The state of a fleet as people and programs read it."""

from __future__ import annotations

from time import time
from typing import Any

import msgspec

from lockstep.fleet.fleet import Fleet

SHOWN_OPERATIONS = 20


def fleet_state(fleet: Fleet) -> dict[str, Any]:
    """Everything at one place: desired and applied version, pause, workers, last operations."""
    workers = worker_views(fleet)
    serving = [worker for worker in workers if worker["state"] == "serving"]
    desired = fleet.desired
    return {
        "ready": bool(serving) and desired.paused is None,
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
        "running": [operation.kind for operation in fleet.operations.running],
        "operations": [
            {
                "id": each.id,
                "kind": each.kind,
                "status": each.status,
                "version": each.version,
                "error": each.error,
                "pause_seconds": each.pause_seconds,
                "seconds": None if each.ended is None else each.ended - each.started,
                "workers": msgspec.to_builtins(each.workers),
            }
            for each in fleet.operations.latest(SHOWN_OPERATIONS)
        ],
    }


def worker_views(fleet: Fleet) -> list[dict[str, Any]]:
    """One row per worker: where it is, what it holds, why it is kept out and when it is tried."""
    traffic = {worker.id: worker for worker in fleet.pool.workers}
    rows = []
    for member in fleet.members.values():
        worker = traffic.get(member.id)
        state = member.state
        if state == "serving" and (worker is None or worker.state != "serving"):
            state = "joining"  # it was lost a moment ago and has to pass the gate again
        rows.append(
            {
                "id": member.id,
                "url": member.url,
                "admin_url": member.admin.url,
                "backend": member.admin.name,
                "state": state,
                "version": member.version,
                "reason": member.reason or (worker.error if worker is not None else None),
                "since": member.since,
                "in_flight": worker.in_flight if worker is not None else 0,
                "next_try_seconds": fleet.pool.next_try(member.id),
            }
        )
    return rows
