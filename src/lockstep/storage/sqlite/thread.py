"""The thread that reads and writes the session file, an SQLite database.

Writes that are queued at the same time share one transaction. A write is done when its transaction
is committed, so that a turn whose response was sent survives a crash of this process. A crash of
the machine may lose the last turns, but never part of one.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from lockstep.storage.file_lock import FileLock
from lockstep.storage.sqlite import MEMORY
from lockstep.storage.sqlite.session_tables import StoredFile, connect, read_file
from lockstep.tokens.errors import BadRequest, LockstepError, Unavailable

BATCH = 512
"""Most jobs taken into one transaction, give or take one pass of the event loop."""
T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    work: Work[Any]
    future: asyncio.Future[Any]
    writes: bool


class SqliteThread:
    """One thread for one session file, or for a database in memory.

    Results are set on the event loop that called `start`. The file is locked: a second process is
    rejected, so that no two gateways write the same session.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock: FileLock | None = None
        self._jobs: SimpleQueue[list[_Job] | None] = SimpleQueue()
        self._queued: list[_Job] = []
        self._thread = threading.Thread(target=self._serve, name="lockstep-sessions", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open = False

    async def start(self) -> StoredFile:
        """Open the file and return its contents. Raises BadRequest when it cannot be used."""
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._thread.start()
        try:
            return await self.read(read_file)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the thread after the queued jobs; later jobs raise Unavailable."""
        self._open = False
        self._hand_over()
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def write(self, work: Work[T]) -> asyncio.Future[T]:
        """Run `work` in a transaction; the future is done when that is committed.

        A LockstepError, which `work` raises before it writes anything, fails this job alone. Any
        other error rolls the transaction back, and fails all its jobs as Unavailable.
        """
        return self._submit(work, True)

    def read(self, work: Work[T]) -> asyncio.Future[T]:
        """Run `work` after all writes submitted before it. SQLite errors become Unavailable."""
        return self._submit(work, False)

    def _submit(self, work: Work[T], writes: bool) -> asyncio.Future[T]:
        if self._loop is None or not self._open:
            raise Unavailable("the sessions are not open: use them in `async with Sessions(...)`")
        future: asyncio.Future[T] = self._loop.create_future()
        if not self._queued:
            # Waking the thread costs more than a write, so jobs of one loop pass wake it once.
            self._loop.call_soon(self._hand_over)
        self._queued.append(_Job(work, future, writes))
        return future

    def _hand_over(self) -> None:
        if self._queued:
            self._jobs.put(self._queued)
            self._queued = []

    def _serve(self) -> None:
        connection: sqlite3.Connection | None = None
        refused: LockstepError | None = None
        try:
            if self._path != MEMORY:
                self._lock = FileLock(self._path, way_out="stop it, or give another --state-dir")
            connection = connect(self._path)
        except (OSError, sqlite3.Error, LockstepError) as error:
            refused = _refusal(self._path, error)
        running = True
        while running:
            jobs, running = self._next()
            if connection is None:
                self._settle([(job, None, refused) for job in jobs])
                continue
            writes = [job for job in jobs if job.writes]
            if writes:
                self._settle(_transact(connection, writes))
            for job in jobs:
                if not job.writes:
                    self._settle([_attempt(connection, job)])
        if connection is not None:
            connection.close()
        if self._lock is not None:
            self._lock.close()

    def _next(self) -> tuple[list[_Job], bool]:
        """Wait for jobs; return them, and whether the thread goes on after them."""
        jobs: list[_Job] = []
        batch = self._jobs.get()
        while batch is not None:
            jobs += batch
            if len(jobs) >= BATCH or self._jobs.empty():
                return jobs, True
            batch = self._jobs.get()
        return jobs, False

    def _settle(self, results: list[tuple[_Job, Any, Exception | None]]) -> None:
        if results and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_resolve, results)


def _transact(
    connection: sqlite3.Connection, jobs: list[_Job]
) -> list[tuple[_Job, Any, Exception | None]]:
    try:
        connection.execute("BEGIN IMMEDIATE")
        results = [_attempt(connection, job) for job in jobs]
        broken = next((e for _, _, e in results if e and not isinstance(e, LockstepError)), None)
        if broken is not None:
            raise broken
        connection.execute("COMMIT")
    except Exception as error:
        # Whatever the error is, no job of this transaction may be reported as stored.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        failure = Unavailable(f"the session file cannot be written: {error}")
        return [(job, None, failure) for job in jobs]
    return results


def _attempt(connection: sqlite3.Connection, job: _Job) -> tuple[_Job, Any, Exception | None]:
    try:
        return job, job.work(connection), None
    except sqlite3.Error as error:
        if job.writes:
            return job, None, error  # rolls the transaction back
        return job, None, Unavailable(f"the session file cannot be read: {error}")
    except Exception as error:
        # Raised where the job is awaited; the thread must survive for the other sessions.
        return job, None, error


def _resolve(results: list[tuple[_Job, Any, Exception | None]]) -> None:
    for job, result, error in results:
        if job.future.done():
            continue
        if error is not None:
            job.future.set_exception(error)
        else:
            job.future.set_result(result)


def _refusal(path: str, error: Exception) -> LockstepError:
    if isinstance(error, LockstepError):
        return error
    return BadRequest(
        f"the session file {path} cannot be used ({error}): is another gateway using it? "
        "Give another --state-dir or --sessions",
        param="sessions",
    )
