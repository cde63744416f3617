"""Publishes weights: pushes a checkpoint until the fleet serves it, and again when it was lost."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from lockstep.backends.admin import PauseMode
from lockstep.tokens.errors import CheckpointError, Conflict, LockstepError
from lockstep.tokens.operation import Operation
from lockstep.tokens.versions import VersionLabel, joined
from lockstep.train.retry import TRANSIENT, RetryPolicy
from lockstep.train.step_store import StepStore, StoredStep

WATCH_SECONDS = 0.5
MAX_FAILED_PROOFS = 3
"""Failed probes of one version after which publishing it is given up."""
Worker = Mapping[str, Any]


class FleetLike(Protocol):
    """The calls that a trainer makes to a fleet, such as a `lockstep.fleet.remote.RemoteFleet`."""

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
    """Weights that the fleet serves as `version`. Tokens sampled from them carry `label`."""

    step: int
    directory: Path
    version: str
    label: str
    seconds: float
    pause_seconds: float
    workers: tuple[Worker, ...]
    proofs: Mapping[str, Any] = field(default_factory=dict)
    """How each worker proved that it serves them, by worker: status, phase, evidence."""
    stored: StoredStep | None = None
    """Where they are in an object store, if they are published through one."""

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` takes, for other ranks."""
        return {**asdict(self), "directory": str(self.directory)}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Published:
        directory, workers = Path(plain["directory"]), tuple(plain["workers"])
        return cls(**{**plain, "directory": directory, "workers": workers})


class Publisher:
    """Publishes the weights of a run. `adapter` is the name of the trained LoRA adapter, if any."""

    def __init__(
        self,
        fleet: FleetLike,
        retry: RetryPolicy,
        *,
        adapter: str | None,
        mode: PauseMode,
        suffix: str = "",
        store: StepStore | None = None,
    ) -> None:
        """`suffix` ends the labels of this run, where another run has used the plain labels.

        With a `store`, checkpoints are stored there, and the workers fetch them.
        """
        self._store = store
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
        """Return how many workers served the weights when they were published; 0 before that."""
        workers = self.current.workers if self.current is not None else ()
        return sum(worker["state"] == "serving" for worker in workers)

    async def enforces_versions(self) -> bool:
        """Return whether every worker rejects a request that requires another version than its own.
        vLLM, SGLang and Dynamo have no such field."""
        state = await self._retry.call("state", lambda _: self._fleet.state())
        return all(worker.get("backend", "lockstep") == "lockstep" for worker in state["workers"])

    async def publish(self, directory: Path, step: int) -> Published:
        """Push a checkpoint until the fleet has proved and serves it. Raises what the fleet raises.

        Transient failures are retried: a lost connection, too few workers, an update that was
        rolled back because a worker died.
        """
        async with self._lock:
            return await self._publish(directory, step)

    async def ensure(self) -> None:
        """Push the current weights again if the fleet no longer serves them."""
        # Under the lock: several rollouts may find at once that the fleet lost its weights.
        async with self._lock:
            current = self.current
            if current is not None and not _serves(await self._fleet.state(), current.label):
                await self._publish(current.directory, current.step)

    async def _publish(self, directory: Path, step: int) -> Published:
        started = perf_counter()
        version = f"step-{step}{self.suffix}"

        stored: StoredStep | None = None
        if (store := self._store) is not None:
            stored = await self._retry.call(
                f"upload of {version}", lambda _: asyncio.to_thread(store.put, directory)
            )
        where = directory if stored is None else stored.url

        async def push(attempt: int) -> Operation:
            # The fleet repeats the result of a key, failures included, so a retry needs a new key.
            # An update that did succeed is not repeated: the fleet already serves the version.
            key = f"{self._nonce}-{version}-{attempt}"
            if self._adapter is not None:
                return await self._fleet.load_adapter(self._adapter, directory, version)
            return await self._fleet.update_weights(where, version, mode=self._mode, key=key)

        async def give_up(error: LockstepError) -> None:
            await self._give_up_if_disproved(version, error)

        try:
            operation = await self._retry.call(f"update to {version}", push, between=give_up)
        except Conflict:
            if self.suffix:
                raise
            # Another run has used this label on this fleet: use a suffix from now on.
            self.suffix = f"-{self._nonce}"
            return await self._publish(directory, step)
        label, workers = await self._confirm_served(operation, version)
        self.current = Published(
            step,
            directory,
            version,
            label,
            perf_counter() - started,
            operation.pause_seconds or 0.0,
            workers,
            {
                name: {
                    "status": result.status,
                    "evidence": result.evidence and asdict(result.evidence),
                }
                for name, result in operation.workers.items()
            },
            stored,
        )
        return self.current

    async def _confirm_served(
        self, operation: Operation, version: str
    ) -> tuple[str, tuple[Worker, ...]]:
        """Return the label of tokens sampled now, and all workers of the fleet.

        A full update that succeeded on every worker needs no further request. Raises Conflict when
        the fleet serves other weights.
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
                f"{state['version']!r}: does another trainer update this fleet?"
            )
        return label, self._seen

    async def _give_up_if_disproved(self, version: str, error: LockstepError) -> None:
        """Raise CheckpointError when workers failed the probe of this version several times."""
        with suppress(*TRANSIENT):
            operations = (await self._fleet.state())["operations"]
            disproved = [
                operation
                for operation in operations
                if operation["version"] == version
                and any(result["phase"] == "prove" for result in operation["workers"].values())
            ]
            if len(disproved) >= MAX_FAILED_PROOFS:
                raise CheckpointError(
                    f"the fleet rolled back the update to {version!r} {len(disproved)} times, "
                    f"because its workers did not reproduce the trainer's probe: {error.message}; "
                    "set learner.exact to false or a learner.probe_tolerance if they cannot"
                )

    async def watch(self, on_change: Callable[[str, Worker], None]) -> None:
        """Report workers that are lost or return, until cancelled."""
        states: dict[str, str] = {}
        while True:
            with suppress(LockstepError):  # requests to an unreachable gateway fail on their own
                self._seen = workers_of(await self._fleet.state())
                for worker in self._seen:
                    before, now = states.get(worker["id"]), str(worker["state"])
                    if before is not None and (before == "serving") != (now == "serving"):
                        on_change("worker_back" if now == "serving" else "worker_lost", worker)
                    states[worker["id"]] = now
            await asyncio.sleep(WATCH_SECONDS)


def workers_of(state: Mapping[str, Any]) -> tuple[Worker, ...]:
    """Return the id, version and state of each worker."""
    return tuple(
        {"id": worker["id"], "version": worker["version"], "state": worker["state"]}
        for worker in state["workers"]
    )


def _serves(state: Mapping[str, Any], served: str) -> bool:
    label = VersionLabel.parse(served)
    if label.adapter is not None and state["adapters"].get(label.adapter) != label.contents:
        return False
    return bool(state["version"] == label.weights)
