"""The Ray actor of one worker: starts its process, keeps it registered, and ends with it."""

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
    """The settings that all workers of a fleet share.

    `gateways` are admin URLs and `token` is their admin token. Workers listen on `host`, or on the
    address of their node. Weights from the object store are written to `weights_dir`.
    """

    gateways: tuple[str, ...]
    token: str
    host: str | None = None
    weights_dir: str | None = None


class CheckpointHolder:
    """Holds the accepted checkpoint and a pending one, for workers that start on a new node."""

    def __init__(self) -> None:
        self._checkpoints: dict[str, ObjectCheckpoint] = {}

    def add(self, checkpoint: ObjectCheckpoint) -> None:
        self._checkpoints[checkpoint.name] = checkpoint

    def keep_only(self, name: str | None) -> None:
        self._checkpoints = {key: own for key, own in self._checkpoints.items() if key == name}

    def checkpoints(self) -> list[ObjectCheckpoint]:
        return list(self._checkpoints.values())


class WorkerActor:
    """One worker. Ray restarts it, here or on another node, when it or its process ends.

    It registers itself at the gateway, independently of the process that created the fleet. Raises
    the error of a worker that does not start; a wrong command line is not retried.
    """

    def __init__(
        self, worker_id: str, command: NodeCommand, place: FleetPlace, holder: str
    ) -> None:
        # The holder by name: Ray may not restart an actor whose arguments are object references.
        self._id, self._command, self._place = worker_id, command, place
        self._stopping = threading.Event()
        if place.weights_dir is not None:
            for checkpoint in ray.get(ray.get_actor(holder).checkpoints.remote()):
                checkpoint.write(Path(place.weights_dir))
        host = place.host or ray.util.get_node_ip_address()
        self._process = NodeProcess(command, worker_id, host, place.token)
        threading.Thread(target=self._end_with_process, daemon=True).start()
        self._joining = GatewayJoining(
            worker_id, self._process, command, place.gateways, place.token, self._stopping
        )
        threading.Thread(target=self._joining.run, daemon=True).start()

    def view(self) -> dict[str, Any]:
        """Return the worker's id, URLs, processes and node."""
        return {
            "id": self._id,
            "url": self._process.url,
            "admin_url": self._process.admin_url,
            "pid": self._process.pid,
            "actor_pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
        }

    def fetch(self, checkpoint: ObjectCheckpoint) -> str:
        """Write the checkpoint to this node if it is missing, and return its directory."""
        return str(checkpoint.write(self._weights_dir()))

    def keep_only(self, name: str | None) -> None:
        """Delete all other checkpoints of this fleet on this node."""
        remove_others(self._weights_dir(), name)

    def stop(self) -> None:
        """Drain the worker at the gateway and end its process."""
        self._stopping.set()
        self._joining.leave()
        self._process.stop()

    # Internals

    def _weights_dir(self) -> Path:
        if self._place.weights_dir is None:
            raise NotFound("this fleet has no weights_dir: its checkpoints are on a shared path")
        return Path(self._place.weights_dir)

    def _end_with_process(self) -> None:
        code = self._process.wait()
        if not self._stopping.is_set():
            log.error("worker %s ended with code %d; Ray restarts it", self._id, code)
            os._exit(TRY_AGAIN)
