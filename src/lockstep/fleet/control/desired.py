"""The desired state of a fleet (version, adapters, pause), and the record of its operations.

Stored in SQLite, so that it survives the gateway: the next one brings every worker to it.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from lockstep.backends.admin import PauseMode
from lockstep.fleet.control.file_lock import FileLock
from lockstep.tokens.errors import BadRequest, Unavailable
from lockstep.tokens.operation import Operation

MEMORY = "memory"
KEPT_OPERATIONS = 1000
KEPT_VERSIONS = 1000


class Closeness(msgspec.Struct, frozen=True):
    """How far a worker's logprobs were from the right ones: mean and top difference."""

    mean: float
    top: float


class Reference(msgspec.Struct, frozen=True):
    """Sequences and their logprobs under the weights, which a worker must reproduce to be proved.

    A tolerance of None means that it is measured. `previous` are the logprobs under the weights
    before (an empty row where unknown), `dtype` is the type that the model computed in, `closeness`
    how closely the workers that proved it followed.
    """

    sequences: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    tolerance: float | None
    previous: tuple[tuple[float, ...], ...] | None = None
    dtype: str | None = None
    closeness: Closeness | None = None


class AdapterSpec(msgspec.Struct, frozen=True):
    """An adapter that every worker must hold, and what it must reproduce under it.

    `label` identifies its contents. It starts with `version` where the caller gave one.
    """

    path: str
    label: str
    version: str | None = None
    reference: Reference | None = None


class Desired(msgspec.Struct, frozen=True):
    """The state that every serving worker is in. `checkpoint` is None for the initial weights.

    `lease_until` (Unix time) is when a pause ends by itself, `lease_seconds` how long it was
    granted: a clock that jumps does not extend it. `agreed` lists the versions in the order in
    which the fleet accepted them, `digests` identifies their contents, where known. `generation` is
    the number of the gateway that controls the workers, higher with every start: workers refuse
    commands of a lower one.
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
        """Return this state under other weights."""
        agreed = (*self.agreed[-KEPT_VERSIONS:], version)
        digests = {name: value for name, value in self.digests.items() if name in agreed}
        if digest is not None:
            digests[version] = digest
        return msgspec.structs.replace(
            self,
            version=version,
            checkpoint=checkpoint,
            reference=reference,
            # The scores of adapters depend on the weights under them, so they are taken again.
            adapters={
                name: msgspec.structs.replace(spec, reference=None)
                for name, spec in self.adapters.items()
            },
            agreed=agreed,
            digests=digests,
        )

    @property
    def resumed(self) -> Desired:
        """This state, not paused."""
        return msgspec.structs.replace(self, paused=None, lease_until=None, lease_seconds=None)


class StateStore:
    """Desired state and operations in one SQLite file, or in memory. Safe in any thread.

    A file belongs to one process at a time, and to one model: `model` says which, and a file of
    another one is refused.
    """

    def __init__(self, path: str = MEMORY, *, model: str | None = None) -> None:
        """Raises BadRequest when another process uses the file, or it is of another model."""
        self._lock = threading.Lock()
        self._path = path
        self._held: FileLock | None = None
        if path != MEMORY:
            self._held = FileLock(path, way_out="stop it, or give another --state-dir")
            Path(path).touch(mode=0o600)
            Path(path).chmod(0o600)  # one of an earlier release may be open to others
        try:
            self._db = self._open(path, model)
        except BaseException:
            self._let_go()
            raise

    def _open(self, path: str, model: str | None) -> sqlite3.Connection:
        where = ":memory:" if path == MEMORY else path
        try:
            db = sqlite3.connect(where, check_same_thread=False, isolation_level=None)
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
            db.execute("CREATE TABLE IF NOT EXISTS desired (id INTEGER PRIMARY KEY, body BLOB)")
            db.execute(
                "CREATE TABLE IF NOT EXISTS operations "
                "(number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, key TEXT, body BLOB)"
            )
            db.execute("CREATE INDEX IF NOT EXISTS by_key ON operations (key)")
            db.execute("CREATE TABLE IF NOT EXISTS model (id INTEGER PRIMARY KEY, name TEXT)")
        except sqlite3.Error as error:
            raise BadRequest(
                f"{path} cannot be used as the state of a fleet ({error}): move it away, or give "
                "another --state-dir",
                param="state_dir",
            ) from None
        if model is not None:
            db.execute("INSERT OR IGNORE INTO model (id, name) VALUES (1, ?)", (model,))
            (kept,) = db.execute("SELECT name FROM model WHERE id = 1").fetchone()
            if kept != model:
                db.close()
                raise BadRequest(
                    f"{path} is the state of {kept}, and {model} is to be served: give another "
                    "--state-dir, or --fresh to put that state aside and start over",
                    param="state_dir",
                )
        return db

    def desired(self) -> Desired:
        row = self._one("SELECT body FROM desired WHERE id = 1")
        return Desired() if row is None else msgspec.json.decode(row, type=Desired)

    def save(self, desired: Desired) -> None:
        """Durable when it returns. Raises Unavailable when the file cannot be written."""
        body = msgspec.json.encode(desired)
        with self._using():
            self._db.execute("INSERT OR REPLACE INTO desired (id, body) VALUES (1, ?)", (body,))

    def record(self, operation: Operation) -> None:
        """Writes an operation as it stands; the oldest go when there are too many. Raises
        Unavailable when the file cannot be written."""
        body = msgspec.json.encode(operation)
        with self._using():
            self._db.execute(
                "INSERT INTO operations (id, key, body) VALUES (?, ?, ?) "
                "ON CONFLICT (id) DO UPDATE SET body = excluded.body",
                (operation.id, operation.key, body),
            )
            self._db.execute(
                "DELETE FROM operations WHERE number <= "
                "(SELECT number FROM operations ORDER BY number DESC LIMIT 1 OFFSET ?)",
                (KEPT_OPERATIONS,),
            )

    def cut_off(self) -> None:
        """Marks what an earlier process left running as lost."""
        with self._using():
            rows = self._db.execute("SELECT body FROM operations").fetchall()
        for row in rows:
            operation = msgspec.json.decode(row[0], type=Operation)
            if operation.status == "running":
                operation.status, operation.error = "lost", "the gateway ended before it did"
                self.record(operation)

    def operation(self, operation_id: str) -> Operation | None:
        return self._decoded(self._one("SELECT body FROM operations WHERE id = ?", operation_id))

    def by_key(self, key: str) -> Operation | None:
        """The last operation of that key."""
        sql = "SELECT body FROM operations WHERE key = ? ORDER BY number DESC"
        return self._decoded(self._one(sql, key))

    def latest(self, count: int) -> list[Operation]:
        with self._using():
            rows = self._db.execute(
                "SELECT body FROM operations ORDER BY number DESC LIMIT ?", (count,)
            ).fetchall()
        return [msgspec.json.decode(row[0], type=Operation) for row in rows]

    @contextmanager
    def _using(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except sqlite3.Error as error:  # a full disk, most often
                raise Unavailable(
                    f"the state in {self._path} cannot be read or written: {error}; is the disk "
                    "full?"
                ) from error

    def close(self) -> None:
        with self._lock:
            self._db.close()
            self._let_go()

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.close()

    def _one(self, sql: str, *values: str) -> bytes | None:
        with self._using():
            row = self._db.execute(sql, values).fetchone()
        return None if row is None else row[0]

    @staticmethod
    def _decoded(body: bytes | None) -> Operation | None:
        return None if body is None else msgspec.json.decode(body, type=Operation)
