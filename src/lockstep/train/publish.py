"""Publishing weights: pushed until the fleet serves them, and again when it has lost them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from lockstep.backends.admin import PauseMode
from lockstep.tokens.errors import CheckpointError, Conflict, LockstepError
from lockstep.tokens.operation import Operation
from lockstep.tokens.versions import VersionLabel, joined
from lockstep.train.retry import PASSING, RetryPolicy

WATCH_SECONDS = 0.5
PROOF_TRIES = 3
Worker = Mapping[str, Any]


class FleetLike(Protocol):
    """What a trainer needs of a fleet; `lockstep.fleet.remote.RemoteFleet` is one."""

    async def state(self) -> dict[str, Any]: ...

    async def update_weights(
        self,
        weight_dir: str | Path,
        version: str | None = None,
        *,
        mode: PauseMode = "keep",
        key: str | None = None,
    ) -> Operation: ...

    async def load_adapter(
        self, name: str, path: str | Path, version: str | None = None
    ) -> Operation: ...


@dataclass(frozen=True, slots=True)
class Published:
    """Weights that the fleet serves as `version`; `label` is what tokens sampled under it carry."""

    step: int
    directory: Path
    version: str
    label: str
    seconds: float
    pause_seconds: float
    workers: tuple[Worker, ...]


class Publisher:
    """Publishes the weights of a run. `adapter` names the LoRA adapter that is trained, if any."""

    def __init__(
        self,
        fleet: FleetLike,
        retry: RetryPolicy,
        *,
        adapter: str | None,
        mode: PauseMode,
        suffix: str = "",
    ) -> None:
        """`suffix` ends the labels of this run; one is made up when the fleet has such a label."""
        self._fleet = fleet
        self._retry = retry
        self._adapter = adapter
        self._mode = mode
        self._nonce = secrets.token_hex(4)
        self.suffix = suffix
        self._lock = asyncio.Lock()
        self.current: Published | None = None
        self._seen: tuple[Worker, ...] = ()

    def serving(self) -> int:
        """How many workers served the weights when they were published; 0 before that."""
        workers = self.current.workers if self.current is not None else ()
        return sum(worker["state"] == "serving" for worker in workers)

    async def publish(self, directory: Path, step: int) -> Published:
        """Pushes a checkpoint until the fleet serves it, proved. Raises what the fleet raises.

        Passing failures are tried again: a lost connection, too few workers, an update that was
        undone because one died in the middle of it.
        """
        async with self._lock:
            return await self._publish(directory, step)

    async def ensure(self) -> None:
        """Pushes the current weights again when the fleet does not serve them any more."""
        async with self._lock:
            current = self.current
            if current is not None and not _serves(await self._fleet.state(), current.label):
                await self._publish(current.directory, current.step)

    async def _publish(self, directory: Path, step: int) -> Published:
        begun = perf_counter()
        version = f"step-{step}{self.suffix}"

        async def push(attempt: int) -> Operation:
            # The fleet gives the failure of a key again for ever: a new attempt needs a new key.
            # An update that did happen is not repeated: the fleet knows what it serves.
            key = f"{self._nonce}-{version}-{attempt}"
            if self._adapter is not None:
                return await self._fleet.load_adapter(self._adapter, directory, version)
            return await self._fleet.update_weights(directory, version, mode=self._mode, key=key)

        async def give_up(error: LockstepError) -> None:
            await self._give_up_if_disproved(version, error)

        try:
            operation = await self._retry.call(f"update to {version}", push, between=give_up)
        except Conflict:
            if self.suffix:
                raise
            # Another run has used this label on this fleet: ours are told apart from now on.
            self.suffix = f"-{self._nonce}"
            return await self._publish(directory, step)
        label, workers = await self._as_served(operation, version)
        self.current = Published(
            step,
            directory,
            version,
            label,
            perf_counter() - begun,
            operation.pause_seconds or 0.0,
            workers,
        )
        return self.current

    async def _as_served(
        self, operation: Operation, version: str
    ) -> tuple[str, tuple[Worker, ...]]:
        """What tokens sampled now are labelled with, and all workers of the fleet.

        An operation on the whole fleet tells it, where the weights are no adapter. Raises Conflict
        when the fleet serves other weights.
        """
        results = operation.workers
        whole = results.keys() == {worker["id"] for worker in self._seen} and all(
            result.status == "ok" for result in results.values()
        )
        if self._adapter is None and results and whole:
            states = [{"id": name, "version": version, "state": "serving"} for name in results]
            return version, tuple(states)
        state = await self._retry.call("state", lambda _: self._fleet.state())
        self._seen = workers_of(state)
        label = version
        if self._adapter is not None:
            label = joined(str(state["version"]), self._adapter, operation.version or "")
        if not _serves(state, label):
            raise Conflict(
                f"version {version!r} was published, but the fleet serves "
                f"{state['version']!r}: another trainer updates it too"
            )
        return label, self._seen

    async def _give_up_if_disproved(self, version: str, error: LockstepError) -> None:
        """Raises CheckpointError when workers failed the probe of this version several times."""
        with suppress(*PASSING):
            operations = (await self._fleet.state())["operations"]
            failed = [each for each in operations if each["version"] == version]
            disproved = [
                each
                for each in failed
                if any(result["phase"] == "prove" for result in each["workers"].values())
            ]
            if len(disproved) >= PROOF_TRIES:
                raise CheckpointError(
                    f"the fleet undid the update to {version!r} {len(disproved)} times, as its "
                    f"workers do not compute what the trainer's model does: {error.message}; if "
                    "they cannot, set learner.exact to false or a learner.probe_tolerance"
                )

    async def watch(self, on_change: Callable[[str, Worker], None]) -> None:
        """Reports workers that are lost or come back, until cancelled."""
        known: dict[str, str] = {}
        while True:
            with suppress(LockstepError):  # whoever needs a gateway that is away sees it themselves
                self._seen = workers_of(await self._fleet.state())
                for worker in self._seen:
                    before, now = known.get(worker["id"]), str(worker["state"])
                    if before is not None and (before == "serving") != (now == "serving"):
                        on_change("worker_back" if now == "serving" else "worker_lost", worker)
                    known[worker["id"]] = now
            await asyncio.sleep(WATCH_SECONDS)


def workers_of(state: Mapping[str, Any]) -> tuple[Worker, ...]:
    """Id, version and state of each worker."""
    return tuple(
        {"id": worker["id"], "version": worker["version"], "state": worker["state"]}
        for worker in state["workers"]
    )


def _serves(state: Mapping[str, Any], served: str) -> bool:
    label = VersionLabel.parse(served)
    if label.adapter is not None and state["adapters"].get(label.adapter) != label.contents:
        return False
    return bool(state["version"] == label.weights)
