"""Keeps a worker registered at a gateway, from the side of the worker."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress

from lockstep.fleet.remote import RemoteFleet
from lockstep.integrations.ray.node_process import VLLM_LOGPROBS, NodeCommand, NodeProcess
from lockstep.tokens.errors import LockstepError, Unavailable

log = logging.getLogger(__name__)
RETRY_SECONDS = 0.5
CHECK_SECONDS = 30.0
"""Interval of checks that the worker is still registered: the gateway may have lost its state."""


class GatewayJoining:
    """Registers a worker at the first of `gateways` that responds, and again when it was lost.

    It is not part of the actor, because Ray runs actors with async methods on an event loop.
    """

    def __init__(
        self,
        worker_id: str,
        process: NodeProcess,
        command: NodeCommand,
        gateways: tuple[str, ...],
        token: str,
        stopping: threading.Event,
    ) -> None:
        self._id, self._process, self._command = worker_id, process, command
        self._gateways, self._token, self._stopping = gateways, token, stopping

    def run(self) -> None:
        """Keep the worker registered until `stopping` is set."""
        asyncio.run(self._keep_joined())

    def leave(self) -> None:
        """Drain the worker: return when its running requests have finished."""
        asyncio.run(self._leave())

    async def _keep_joined(self) -> None:
        while not self._stopping.is_set():
            try:
                await self._join()
                seconds = CHECK_SECONDS
            except LockstepError as error:
                log.warning("worker %s is not registered: %s", self._id, error.message)
                seconds = RETRY_SECONDS
            await asyncio.to_thread(self._stopping.wait, seconds)

    async def _join(self) -> None:
        """Register at the first gateway that responds, replacing an earlier process."""
        last_error: LockstepError = Unavailable("there is no gateway")
        for url in self._gateways:
            try:
                async with RemoteFleet(url, token=self._token) as fleet:
                    return await self._join_at(fleet)
            except LockstepError as error:
                last_error = error
        raise last_error

    async def _join_at(self, fleet: RemoteFleet) -> None:
        earlier = [row for row in await fleet.workers() if row["id"] == self._id]
        if earlier and earlier[0]["url"] == self._process.url:
            return
        if earlier:
            await fleet.drain(self._id, drain_seconds=0)
        if self._command.engine == "vllm":
            await fleet.add_worker(
                self._process.url, id=self._id, backend="vllm", logprob_mode=VLLM_LOGPROBS,
                admin_token=self._command.api_key,
            )  # fmt: skip
        else:
            await fleet.add_worker(
                self._process.url, id=self._id, backend="lockstep",
                admin_url=self._process.admin_url, admin_token=self._token,
            )  # fmt: skip

    async def _leave(self) -> None:
        for url in self._gateways:
            with suppress(LockstepError):  # an unreachable gateway sends it no requests either
                async with RemoteFleet(url, token=self._token) as fleet:
                    await fleet.drain(self._id)
                    return
