"""The desired state of a fleet (version, adapters, pause), and its workers as the leader sees them.

A gateway that starts brings every worker to the stored state. All structs are stored as JSON.
"""

from __future__ import annotations

import msgspec

from lockstep.tokens.operation import PauseMode

STORED_OPERATIONS = 1000
"""Number of operations in a store; older ones are dropped."""
STORED_VERSIONS = 1000


class Closeness(msgspec.Struct, frozen=True):
    """Mean and largest difference between a worker's logprobs and the expected ones."""

    mean: float
    top: float


class Reference(msgspec.Struct, frozen=True):
    """Sequences and their logprobs, which a worker must reproduce to prove its weights.

    A tolerance of None is measured instead. `previous` are the logprobs under the weights before
    (an empty row where unknown), `dtype` is the type that the model computed in, `closeness` how
    close the workers were that proved it.
    """

    sequences: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    tolerance: float | None
    previous: tuple[tuple[float, ...], ...] | None = None
    dtype: str | None = None
    closeness: Closeness | None = None


class AdapterSpec(msgspec.Struct, frozen=True):
    """An adapter that every worker must hold, and the logprobs it must reproduce under it.

    `label` identifies its contents; it starts with `version` where the caller named one.
    """

    path: str
    label: str
    version: str | None = None
    reference: Reference | None = None


class Desired(msgspec.Struct, frozen=True):
    """The state that every serving worker is in.

    `checkpoint` is None for the weights that workers start with. A pause ends by itself at
    `lease_until` (Unix time); `lease_seconds` is its length, so that a clock that jumps cannot
    make it longer. `agreed` lists the accepted versions in order, `digests` the digests of their
    contents where known. `generation` is the leader's number, which rises with every election or
    start: workers reject commands of a lower one.
    """

    version: str | None = None
    checkpoint: str | None = None
    reference: Reference | None = None
    adapters: dict[str, AdapterSpec] = {}
    paused: PauseMode | None = None
    lease_until: float | None = None
    lease_seconds: float | None = None
    generation: int = 0
    agreed: tuple[str, ...] = ()
    digests: dict[str, str] = {}

    def agree(
        self, version: str, checkpoint: str | None, digest: str | None, reference: Reference
    ) -> Desired:
        """Return this state under new weights."""
        agreed = (*self.agreed[-STORED_VERSIONS:], version)
        digests = {name: value for name, value in self.digests.items() if name in agreed}
        if digest is not None:
            digests[version] = digest
        return msgspec.structs.replace(
            self,
            version=version,
            checkpoint=checkpoint,
            reference=reference,
            # Logprobs under an adapter depend on the weights below it: they are measured anew.
            adapters={
                name: msgspec.structs.replace(spec, reference=None)
                for name, spec in self.adapters.items()
            },
            agreed=agreed,
            digests=digests,
        )

    @property
    def resumed(self) -> Desired:
        """This state without its pause."""
        return msgspec.structs.replace(self, paused=None, lease_until=None, lease_seconds=None)


class WorkerRecord(msgspec.Struct, frozen=True):
    """A worker as the leader sees it, for the gateways that follow it.

    Followers send requests to it only while it is `serving`, and only under `version`, which it has
    proved. `admin_token` is None where it is the token of the gateways.
    """

    id: str
    url: str
    serving: bool
    version: str | None
    state: str
    reason: str | None = None
    admin_url: str | None = None
    backend: str | None = None
    admin_token: str | None = None
    transport: str | None = None
    logprob_mode: str | None = None
    gpus: tuple[str, ...] = ()


class FleetSnapshot(msgspec.Struct, frozen=True):
    """Desired state and workers of one moment. `revision` rises with every change."""

    desired: Desired
    workers: tuple[WorkerRecord, ...]
    revision: int
