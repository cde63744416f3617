"""`lockstep gateway --dynamo`: the workers of a Dynamo deployment, as its discovery lists them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.cli.serving.model_identity import ModelIdentity, served_model
from lockstep.cli.serving.sources import ShowStatus, WorkerRows

if TYPE_CHECKING:
    from lockstep.fleet.fleet import Fleet


@dataclass(frozen=True, slots=True)
class DynamoWorkers:
    """The workers of a Dynamo deployment, behind its frontend."""

    frontend: str
    worker_options: dict[str, Any]
    wait_seconds: float
    starts_workers = False

    async def identity(self) -> ModelIdentity:
        """The identity of the model that the frontend serves."""
        name = await served_model([self.frontend], self.wait_seconds, {"transport": "dynamo"})
        return ModelIdentity.of_fleet(name, [self.frontend])

    @asynccontextmanager
    async def joined(self, fleet: Fleet, _: str, show: ShowStatus) -> AsyncIterator[WorkerRows]:
        """Keep the workers that Dynamo's discovery lists in the fleet while the block runs."""
        from lockstep.backends.dynamo.discovery import DynamoDiscovery
        from lockstep.fleet.dynamo_follower import follow_discovery

        show(f"Looking for the workers of {self.frontend}")
        discovery = DynamoDiscovery(self.frontend)
        try:
            async with fleet.pool, fleet:
                async with follow_discovery(
                    fleet, discovery, wait_seconds=self.wait_seconds, **self.worker_options
                ):
                    yield [
                        {
                            "id": worker.id,
                            "url": worker.url,
                            "system_url": worker.control.url,
                            "pid": None,
                        }
                        for worker in fleet.workers
                    ]
        finally:
            await discovery.close()
