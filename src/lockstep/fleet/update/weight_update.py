"""One weight update of a fleet: read the new weights, run the transaction, record the agreement."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.backends.admin import PauseMode, Source
from lockstep.fleet.replica import Replica
from lockstep.fleet.state import FleetState
from lockstep.fleet.update.adapter_changes import AdapterChanges
from lockstep.fleet.update.new_weights import NewWeights, WeightReader
from lockstep.fleet.update.recovery import workers_to_update
from lockstep.fleet.update.transaction import Transaction
from lockstep.fleet.worker import Worker
from lockstep.storage.desired_state import Reference
from lockstep.tokens.errors import BadRequest
from lockstep.tokens.operation import Operation
from lockstep.tokens.versions import check_label


class WeightUpdate:
    """One call of `Fleet.update_weights`; `run` is the work of its operation.

    Raises BadRequest unless exactly one of `weight_dir` and `source` is given, and for a `version`
    that cannot be a label.
    """

    def __init__(
        self,
        state: FleetState,
        replica: Replica,
        reader: WeightReader,
        *,
        weight_dir: str | None,
        source: Source | None,
        version: str | None,
        mode: PauseMode,
    ) -> None:
        if (weight_dir is None) == (source is None):
            raise BadRequest(
                f"weight_dir is {weight_dir!r} and source is {source!r}: give exactly one of them",
                param="weight_dir",
            )
        label = version or (Path(weight_dir).name if weight_dir else "")
        check_label(label, "version")
        self._state, self._replica, self._reader = state, replica, reader
        self._weight_dir, self._source = weight_dir, source
        self._label, self._is_label_chosen = label, version is not None
        self._mode: PauseMode = mode
        self.recovered: list[Worker] = []
        """Workers updated while in quarantine, because none served. They are to be brought up."""

    @property
    def request(self) -> dict[str, str | None]:
        """The request as its operation records it."""
        return {"weight_dir": self._weight_dir, "version": self._label, "mode": self._mode}

    async def run(self, operation: Operation) -> None:
        """Bring every worker to the new weights, proved. Raises the error that stopped it."""
        state = self._state
        operation.version = self._label
        workers = await workers_to_update(state.workers, operation)
        served = any(worker.serves for worker in workers)
        new = await self._reader.read(
            self._weight_dir, self._source, self._label, state.desired, served=served,
            strict=self._is_label_chosen,
        )  # fmt: skip
        operation.version = new.version
        operation.warnings += new.warnings
        operation.nbytes, operation.delta = new.nbytes, new.delta
        operation.fetched = new.fetched
        if new.is_served:
            return
        transaction = Transaction(
            workers,
            new.source,
            new.version,
            new.proof,
            operation=operation,
            quarantine=state.quarantine,
            hold=state.pool.hold,
            mode=self._mode,
            paused=state.desired.paused,
            budget=state.budget,
        )
        await transaction.run(lambda reference, proved: self._agree(new, reference, proved))
        if served:
            await AdapterChanges(state).prove_again(operation)
        else:
            self.recovered.extend(workers)

    async def _agree(self, new: NewWeights, reference: Reference, proved: Sequence[Worker]) -> None:
        state = self._state
        desired = state.desired.agree(new.version, new.path, new.digest, reference)
        await self._replica.agree(desired, proved)
        # Only after the write: a completion under the new version is accepted from here on, and
        # if the write fails the transaction rolls all workers back.
        state.adopt(desired)
        state.pool.accepted.accept(new.version)
