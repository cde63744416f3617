"""The Ray actor around one worker: starts it, keeps it joined to the gateway, and ends with it."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from lockstep.integrations.ray.gateway_joining import GatewayJoining
from lockstep.integrations.ray.node_process import NodeCommand, NodeProcess
from lockstep.integrations.ray.object_checkpoint import ObjectCheckpoint, remove_others
from lockstep.tokens.errors import NotFound
from lockstep.tokens.exit_codes import TRY_AGAIN

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlace:
    """Where workers belong: admin URLs of gateways, their token, the address to listen on where
    that is not their node's, and the directory for weights that come through the object store."""

    gateways: tuple[str, ...]
    token: str
    host: str | None = None
    weights_dir: str | None = None


class CheckpointHolder:
    """The accepted checkpoint and one that is being tried, for workers that start on a new node."""

    def __init__(self) -> None:
        self._held: dict[str, ObjectCheckpoint] = {}

    def add(self, checkpoint: ObjectCheckpoint) -> None:
        self._held[checkpoint.name] = checkpoint

    def keep_only(self, name: str | None) -> None:
        self._held = {held: one for held, one in self._held.items() if held == name}

    def held(self) -> list[ObjectCheckpoint]:
        return list(self._held.values())


class WorkerActor:
    """One worker. Ray makes it anew, here or on another node, when it or its process ends.

    It joins by itself: whoever made the fleet may be gone or busy. Raises what keeps the worker
    from starting; a command that is wrong is not tried again.
    """

    def __init__(
        self, worker_id: str, command: NodeCommand, place: FleetPlace, holder: str
    ) -> None:
        # The holder by its name: Ray does not promise a restart with arguments that are objects.
        self._id, self._command, self._place = worker_id, command, place
        self._stopping = threading.Event()
        if place.weights_dir is not None:
            for checkpoint in ray.get(ray.get_actor(holder).held.remote()):
                checkpoint.write(Path(place.weights_dir))
        host = place.host or ray.util.get_node_ip_address()
        self._process = NodeProcess(command, worker_id, host, place.token)
        threading.Thread(target=self._end_with_process, daemon=True).start()
        self._joining = GatewayJoining(
            worker_id, self._process, command, place.gateways, place.token, self._stopping
        )
        threading.Thread(target=self._joining.run, daemon=True).start()

    def view(self) -> dict[str, Any]:
        """Where the worker is: its id, URLs, processes and node."""
        return {
            "id": self._id,
            "url": self._process.url,
            "admin_url": self._process.admin_url,
            "pid": self._process.pid,
            "actor_pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
        }

    def fetch(self, checkpoint: ObjectCheckpoint) -> str:
        """Writes the checkpoint to this node, if it is not there yet; where it is."""
        return str(checkpoint.write(self._weights_dir()))

    def keep_only(self, name: str | None) -> None:
        """Deletes the other checkpoints that came to this node."""
        remove_others(self._weights_dir(), name)

    def stop(self) -> None:
        """Leaves the gateway, which gives it nothing new, and ends the process."""
        self._stopping.set()
        self._joining.leave()
        self._process.stop()

    # Parts

    def _weights_dir(self) -> Path:
        if self._place.weights_dir is None:
            raise NotFound("this fleet has no weights_dir: its checkpoints are on a shared path")
        return Path(self._place.weights_dir)

    def _end_with_process(self) -> None:
        code = self._process.wait()
        if not self._stopping.is_set():
            log.error("worker %s ended with code %d: Ray starts it again", self._id, code)
            os._exit(TRY_AGAIN)
