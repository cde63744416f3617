"""Identity check of a Dynamo worker, so that another one at its address is not taken for it."""

from __future__ import annotations

import re
from typing import Protocol

from lockstep.http.client.client import HttpClient
from lockstep.tokens.errors import LockstepError

SECONDS = 2.0
WORKER_ID = re.compile(rb'\bworker_id="([0-9a-f]{1,16})"')
"""A label of Dynamo's own metrics, in hexadecimal."""


class Identify(Protocol):
    """Return why the worker at a system URL is not the one of an instance id; None if it is."""

    async def __call__(self, instance_id: str, system_url: str) -> str | None: ...


class Identities:
    """Identity checks by the workers' own metrics. A worker that passed is not checked again."""

    def __init__(self) -> None:
        self._checked: set[tuple[str, str]] = set()

    async def __call__(self, instance_id: str, system_url: str) -> str | None:
        if (instance_id, system_url) in self._checked:
            return None
        client = HttpClient(system_url, retries=0)
        try:
            metrics = await client.get("/metrics", timeout=SECONDS)
        except LockstepError as error:
            return f"its system_url {system_url} cannot be reached from here: {error.message}"
        finally:
            await client.close()
        worker_ids = {str(int(label, 16)) for label in WORKER_ID.findall(metrics)}
        if worker_ids == {instance_id}:
            self._checked.add((instance_id, system_url))
            return None
        if not worker_ids:
            return f"its system_url {system_url} does not report its worker id (GET /metrics)"
        return (
            f"its system_url {system_url} belongs to worker {', '.join(sorted(worker_ids))} here: "
            "start it with --advertise and an address of its host"
        )
