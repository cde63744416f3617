"""Desired state and operations of a fleet in an SQLite file of one gateway, or in memory."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from lockstep.storage.desired_state import STORED_OPERATIONS, Desired, FleetSnapshot, WorkerRecord
from lockstep.storage.file_lock import FileLock
from lockstep.storage.sqlite import MEMORY
from lockstep.tokens.errors import BadRequest, Unavailable
from lockstep.tokens.operation import Operation

TABLES = (
    "CREATE TABLE IF NOT EXISTS desired (id INTEGER PRIMARY KEY, body BLOB)",
    "CREATE TABLE IF NOT EXISTS operations "
    "(number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, key TEXT, body BLOB)",
    "CREATE INDEX IF NOT EXISTS by_key ON operations (key)",
    "CREATE TABLE IF NOT EXISTS model (id INTEGER PRIMARY KEY, name TEXT)",
)
SAVE = "INSERT OR REPLACE INTO desired (id, body) VALUES (1, ?)"
RECORD = (
    "INSERT INTO operations (id, key, body) VALUES (?, ?, ?) "
    "ON CONFLICT (id) DO UPDATE SET body = excluded.body"
)
DROP_OLDEST = (
    "DELETE FROM operations WHERE number <= "
    "(SELECT number FROM operations ORDER BY number DESC LIMIT 1 OFFSET ?)"
)


class SqliteControlStore:
    """A ControlStore of one gateway: no other process reads or writes its file.

    The file belongs to one model; the file of another `model` is rejected. Statements run in
    worker threads, one at a time, since synchronous=FULL waits for the disk.
    """

    def __init__(self, path: str = MEMORY, *, model: str | None = None) -> None:
        """Raises BadRequest when another process uses the file, or it is of another model."""
        self._lock = threading.Lock()
        self._path = path
        self._file_lock: FileLock | None = None
        if path != MEMORY:
            self._file_lock = FileLock(path, way_out="stop it, or give another --state-dir")
            Path(path).touch(mode=0o600)
            Path(path).chmod(0o600)  # a file of an earlier release may be readable by others
        try:
            self._db = self._connect(path, model)
        except BaseException:
            self._unlock()
            raise

    def _connect(self, path: str, model: str | None) -> sqlite3.Connection:
        try:
            db = sqlite3.connect(
                ":memory:" if path == MEMORY else path,
                check_same_thread=False,
                isolation_level=None,
            )
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=FULL")
            for statement in TABLES:
                db.execute(statement)
        except sqlite3.Error as error:
            raise BadRequest(
                f"{path} cannot be used as the state of a fleet ({error}): move it away, or give "
                "another --state-dir",
                param="state_dir",
            ) from None
        if model is not None:
            db.execute("INSERT OR IGNORE INTO model (id, name) VALUES (1, ?)", (model,))
            (owner,) = db.execute("SELECT name FROM model WHERE id = 1").fetchone()
            if owner != model:
                db.close()
                raise BadRequest(
                    f"{path} is the state of {owner}, and {model} is to be served: give another "
                    "--state-dir, or --fresh to put that state aside and start over",
                    param="state_dir",
                )
        return db

    async def desired(self) -> Desired:
        rows = await self._run("SELECT body FROM desired WHERE id = 1")
        return msgspec.json.decode(rows[0][0], type=Desired) if rows else Desired()

    async def save(self, desired: Desired, workers: Sequence[WorkerRecord] | None = None) -> None:
        await self._run(SAVE, msgspec.json.encode(desired))

    async def record(self, operation: Operation) -> None:
        body = msgspec.json.encode(operation)

        def write() -> None:
            with self._using() as db:
                db.execute(RECORD, (operation.id, operation.key, body))
                db.execute(DROP_OLDEST, (STORED_OPERATIONS,))

        await asyncio.to_thread(write)

    async def cut_off(self) -> None:
        for operation in await self._operations("SELECT body FROM operations"):
            if operation.status == "running":
                operation.status, operation.error = "lost", "the gateway ended before it did"
                await self.record(operation)

    async def operation(self, operation_id: str) -> Operation | None:
        rows = await self._operations("SELECT body FROM operations WHERE id = ?", operation_id)
        return rows[0] if rows else None

    async def by_key(self, key: str) -> Operation | None:
        sql = "SELECT body FROM operations WHERE key = ? ORDER BY number DESC LIMIT 1"
        rows = await self._operations(sql, key)
        return rows[0] if rows else None

    async def latest(self, count: int) -> list[Operation]:
        sql = "SELECT body FROM operations ORDER BY number DESC LIMIT ?"
        return await self._operations(sql, count)

    async def publish(self, workers: Sequence[WorkerRecord]) -> None:
        """Do nothing: no gateway follows this one."""

    async def snapshot(self) -> FleetSnapshot:
        return FleetSnapshot(await self.desired(), (), 0)

    async def watch(self, changed: Callable[[], None]) -> None:
        """Do nothing: no other gateway changes this store."""

    async def close(self) -> None:
        with self._lock:
            self._db.close()
            self._unlock()

    async def _operations(self, sql: str, *values: Any) -> list[Operation]:
        rows = await self._run(sql, *values)
        return [msgspec.json.decode(body, type=Operation) for (body,) in rows]

    async def _run(self, sql: str, *values: Any) -> list[Any]:
        def run() -> list[Any]:
            with self._using() as db:
                return db.execute(sql, values).fetchall()

        return await asyncio.to_thread(run)

    @contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                yield self._db
            except sqlite3.Error as error:  # a full disk, most often
                raise Unavailable(
                    f"the state in {self._path} cannot be read or written: {error}; is the disk "
                    "full?"
                ) from error

    def _unlock(self) -> None:
        if self._file_lock is not None:
            self._file_lock.close()
