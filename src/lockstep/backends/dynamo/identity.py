"""Asks a Dynamo worker who it is, so that another one at its address is not taken for it."""

from __future__ import annotations

import re
from typing import Protocol

from lockstep.http.client.client import HttpClient
from lockstep.tokens.errors import LockstepError

SECONDS = 2.0
WORKER_ID = re.compile(rb'\bworker_id="([0-9a-f]{1,16})"')
"""The label of Dynamo's own metrics; in hexadecimal."""


class Identify(Protocol):
    """Says why the worker at a system URL is not the one with an instance id; None: it is."""

    async def __call__(self, instance_id: str, system_url: str) -> str | None: ...


class Identities:
    """Workers by what they say of themselves. One that has shown who it is, is not asked again."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str]] = set()

    async def __call__(self, instance_id: str, system_url: str) -> str | None:
        if (instance_id, system_url) in self._known:
            return None
        client = HttpClient(system_url, retries=0)
        try:
            metrics = await client.get("/metrics", timeout=SECONDS)
        except LockstepError as error:
            return f"its system_url {system_url} cannot be reached from here: {error.message}"
        finally:
            await client.close()
        worker_ids = {str(int(one, 16)) for one in WORKER_ID.findall(metrics)}
        if worker_ids == {instance_id}:
            self._known.add((instance_id, system_url))
            return None
        if not worker_ids:
            return f"its system_url {system_url} does not say which worker it is (GET /metrics)"
        return (
            f"its system_url {system_url} is worker {', '.join(sorted(worker_ids))} here, not it: "
            "start it with --advertise and an address of its host"
        )
