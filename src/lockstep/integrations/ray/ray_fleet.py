"""A fleet of workers on a Ray cluster that register themselves at a gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lockstep.backends.admin import PauseMode
from lockstep.backends.registry import LAUNCHED, EngineName, check_name
from lockstep.fleet.remote import RemoteFleet
from lockstep.integrations.ray.node_process import NodeCommand
from lockstep.integrations.ray.object_checkpoint import ObjectCheckpoint, remove_others
from lockstep.integrations.ray.worker_actor import CheckpointHolder, FleetPlace, WorkerActor
from lockstep.tokens.errors import BadRequest, LockstepError, Unavailable
from lockstep.tokens.operation import Operation

START_SECONDS = 600.0
POLL_SECONDS = 0.2


class RayFleet:
    """Workers as Ray actors: Ray places and restarts them, and they register at the gateway.

        with RayFleet("tiny", 2, gateway="http://10.0.0.1:8001", token=token) as fleet:
            await fleet.wait_serving()

    `gateway` is the admin URL of a gateway, or several of one store; start it with
    `--workers-join`. `token` is the admin token of gateway and workers. Every node needs Lockstep;
    `python` is the interpreter with the engine there, if it is not Ray's.

    Checkpoints are read from a path that all nodes and the gateway share. With `weights_dir` they
    are sent through Ray's object store to that directory of each node and of this machine, which
    must be the gateway's. `api_key` is the key of the workers (LOCKSTEP_WORKER_API_KEY of the
    gateway), which the embedded engine requires outside loopback. Workers listen on the address of
    their node, or on `host`: 127.0.0.1 for a Ray cluster of one machine. `actor_options` are passed
    to Ray, such as num_gpus or resources. The fleet ends with the process that created it.
    """

    def __init__(
        self,
        model: str,
        workers: int,
        *,
        gateway: str | Sequence[str],
        token: str,
        engine: EngineName = "lockstep",
        arguments: Sequence[str] = (),
        python: str | None = None,
        api_key: str | None = None,
        insecure: bool = False,
        host: str | None = None,
        weights_dir: str | Path | None = None,
        name: str = "ray",
        max_restarts: int = -1,
        actor_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Check the arguments. Raises BadRequest for no worker, no gateway, or another engine."""
        check_name(engine, LAUNCHED, "engine")
        if workers < 1:
            raise BadRequest(f"workers is {workers}: expected at least 1", param="workers")
        gateways = (gateway,) if isinstance(gateway, str) else tuple(gateway)
        if not gateways:
            raise BadRequest("gateway is empty: expected the URL of an admin port", param="gateway")
        self._weights_dir = None if weights_dir is None else Path(weights_dir).absolute()
        own = tuple(arguments)
        if self._weights_dir is not None and engine == "lockstep":
            own = ("--checkpoint-root", str(self._weights_dir), *own)
        self._command = NodeCommand(
            model=model, engine=engine, arguments=own, python=python, api_key=api_key,
            insecure=insecure,
        )  # fmt: skip
        weights = None if self._weights_dir is None else str(self._weights_dir)
        self._place = FleetPlace(gateways=gateways, token=token, host=host, weights_dir=weights)
        self._names = tuple(f"{name}-{number}" for number in range(workers))
        self._options = {"max_restarts": max_restarts, "max_task_retries": -1,
                         "scheduling_strategy": "SPREAD", "num_cpus": 1,
                         **(actor_options or {})}  # fmt: skip
        self._holder: Any = None
        self._actors: dict[str, Any] = {}

    def __enter__(self) -> RayFleet:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, seconds: float = START_SECONDS) -> None:
        """Start all workers and wait until they run; `wait_serving` waits until they have joined.

        Raises what Ray raises when a worker cannot be placed or started in that time.
        """
        here = NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=True
        )  # on the node that owns the objects it holds
        holder = f"lockstep-checkpoints-{uuid4().hex}"
        self._holder = (
            ray.remote(CheckpointHolder)
            .options(name=holder, num_cpus=0, scheduling_strategy=here)
            .remote()
        )
        actor = ray.remote(WorkerActor)
        try:
            for name in self._names:
                self._actors[name] = actor.options(**self._options).remote(
                    name, self._command, self._place, holder
                )
            self.views(seconds)
        except BaseException:
            self._kill()
            raise

    def stop(self) -> None:
        """Drain every worker, then end it. Running requests finish first."""
        leaving = [actor.stop.remote() for actor in self._actors.values()]
        try:
            ray.wait(leaving, num_returns=len(leaving), timeout=START_SECONDS)
        finally:
            self._kill()

    def views(self, seconds: float = START_SECONDS) -> list[dict[str, Any]]:
        """Return id, URLs, processes and node of each worker; wait for those being restarted."""
        rows: list[dict[str, Any]] = ray.get(
            [actor.view.remote() for actor in self._actors.values()], timeout=seconds
        )
        return rows

    async def wait_serving(self, seconds: float = START_SECONDS) -> None:
        """Wait until the gateway serves from every worker. Raises Unavailable after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                states = await self._states()
                missing = [name for name in self._names if states.get(name) != "serving"]
            except LockstepError as error:
                missing = [error.message]
            if not missing:
                return
            if time.monotonic() > deadline:
                raise Unavailable(f"not serving after {seconds:g} s: {', '.join(missing)}")
            await asyncio.sleep(POLL_SECONDS)

    async def update_weights(
        self, weight_dir: str | Path, version: str | None = None, *, mode: PauseMode = "keep"
    ) -> Operation:
        """Update the weights of all workers, as `RemoteFleet.update_weights` does.

        With `weights_dir` the checkpoint is first written to every node and its digests checked.
        Checkpoints other than the accepted one are then deleted there. `version` defaults to the
        name of `weight_dir`. Raises CheckpointError, and what the update raises.
        """
        directory = Path.cwd() / weight_dir
        if self._weights_dir is None:
            async with self._control() as control:
                return await control.update_weights(directory, version, mode=mode)
        place = await asyncio.to_thread(self._publish, directory)
        async with self._control() as control:
            try:
                return await control.update_weights(place, version or directory.name, mode=mode)
            finally:
                # Ask the gateway what it accepted: the response of the update may have been lost.
                with suppress(LockstepError):
                    accepted = (await control.state())["checkpoint"]
                    name = None if accepted is None else Path(accepted).name
                    await asyncio.to_thread(self._keep_only, name)

    # Internals

    def _control(self) -> RemoteFleet:
        return RemoteFleet(self._place.gateways[0], token=self._place.token)

    async def _states(self) -> dict[str, str]:
        async with self._control() as control:
            return {row["id"]: row["state"] for row in await control.workers()}

    def _publish(self, directory: Path) -> Path:
        """Write the checkpoint to every node, including those of workers that start meanwhile."""
        if self._weights_dir is None:
            raise BadRequest(
                "weights_dir is None: pass RayFleet a directory that exists on every node, or use "
                "checkpoints on a path that all nodes share",
                param="weights_dir",
            )
        checkpoint = ObjectCheckpoint.put(directory)
        # First to the holder: a worker that restarts during the fetch reads the checkpoint there.
        ray.get(self._holder.add.remote(checkpoint))
        ray.get([actor.fetch.remote(checkpoint) for actor in self._actors.values()])
        return checkpoint.write(self._weights_dir)

    def _keep_only(self, name: str | None) -> None:
        ray.get(self._holder.keep_only.remote(name))
        ray.get([actor.keep_only.remote(name) for actor in self._actors.values()])
        if self._weights_dir is not None:
            remove_others(self._weights_dir, name)

    def _kill(self) -> None:
        for actor in (*self._actors.values(), self._holder):
            ray.kill(actor, no_restart=True)
        self._actors = {}
