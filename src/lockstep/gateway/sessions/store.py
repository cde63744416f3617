"""The SQLite file of the sessions: one row a turn, one thread that owns the connection.

Writes that wait at the same time share one transaction. A write is answered after its transaction
is in the file, so that what was answered survives the end of this process, however it ends. Only
a machine that goes down with it may lose the last moments: whole turns, and no more than that.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

from lockstep.fleet.control.file_lock import FileLock
from lockstep.tokens.errors import BadRequest, LockstepError, NotFound, Unavailable

FORMAT = 2
MEMORY = "memory"
BATCH = 512
"""Writes in one transaction, about, at most: the first of them must not wait for ever."""
SCHEMA = f"""
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, tokenizer BLOB NOT NULL,
    created REAL NOT NULL, used REAL NOT NULL, turns INTEGER NOT NULL, bytes INTEGER NOT NULL,
    read_turns INTEGER NOT NULL DEFAULT 0);
CREATE TABLE turns (
    session INTEGER NOT NULL, turn INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (session, turn));
CREATE TABLE breaks (
    session INTEGER NOT NULL, key BLOB NOT NULL, cause TEXT NOT NULL, PRIMARY KEY (session, key));
PRAGMA user_version = {FORMAT};
"""
MIGRATIONS = {
    1: "ALTER TABLE sessions ADD COLUMN read_turns INTEGER NOT NULL DEFAULT 0;",
}
"""What brings a file of an earlier format to the next one."""
T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]


class TurnRow(NamedTuple):
    """A session as its row in the table tells it. Times are seconds since 1970.

    `read_turns` is how many turns it had when somebody last read its samples.
    """

    id: int
    name: str
    tokenizer: bytes
    created: float
    used: float
    turns: int
    bytes: int
    read_turns: int


class StoredSession(NamedTuple):
    """The turns of a session in order, and its prefix breaks as (key, cause)."""

    turns: list[bytes]
    breaks: list[tuple[bytes, str]]


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    work: Work[Any]
    future: asyncio.Future[Any]
    writes: bool
    undone: Callable[[LockstepError], None] | None = None


class SessionStore:
    """One thread over one SQLite file, or over memory. Jobs are settled on the caller's loop.

    The file is held exclusively: a second process is refused, so that no two write one session.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock: FileLock | None = None
        self._jobs: SimpleQueue[list[_Job] | None] = SimpleQueue()
        self._given: list[_Job] = []
        self._thread = threading.Thread(target=self._serve, name="lockstep-sessions", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open = False

    async def start(self) -> list[TurnRow]:
        """Opens the file; the sessions in it. Raises BadRequest when it cannot be used."""
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._thread.start()
        try:
            return await self.read(_rows)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Ends the thread after what was given to it before; it takes nothing more."""
        self._open = False
        self._hand_over()
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def write(
        self, work: Work[T], undone: Callable[[LockstepError], None] | None = None
    ) -> asyncio.Future[T]:
        """Does the work in a transaction; the future is done when that is in the file.

        A LockstepError from work that touched nothing yet fails it alone. Any other error undoes
        the whole transaction and fails, as Unavailable, everything that shared it; `undone` is
        then called on this store's thread, before any later work.
        """
        return self._give(work, True, undone)

    def read(self, work: Work[T]) -> asyncio.Future[T]:
        """Does the work after every write that was given before."""
        return self._give(work, False, None)

    def _give(
        self, work: Work[T], writes: bool, undone: Callable[[LockstepError], None] | None
    ) -> asyncio.Future[T]:
        if self._loop is None or not self._open:
            raise Unavailable("the sessions are not open: use them in `async with Sessions(...)`")
        future: asyncio.Future[T] = self._loop.create_future()
        if not self._given:
            # Waking a thread costs more than a write: once for all that this pass of the loop has.
            self._loop.call_soon(self._hand_over)
        self._given.append(_Job(work, future, writes, undone))
        return future

    def _hand_over(self) -> None:
        if self._given:
            self._jobs.put(self._given)
            self._given = []

    def _serve(self) -> None:
        connection: sqlite3.Connection | None = None
        refused: LockstepError | None = None
        try:
            if self._path != MEMORY:
                self._lock = FileLock(self._path, way_out="stop it, or give another --state-dir")
            connection = connect(self._path)
        except (OSError, sqlite3.Error, LockstepError) as error:
            refused = _refusal(self._path, error)
        going = True
        while going:
            jobs, going = self._next()
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
        """What waits, at least one job, and whether there will be more."""
        jobs: list[_Job] = []
        given = self._jobs.get()
        while given is not None:
            jobs += given
            if len(jobs) >= BATCH or self._jobs.empty():
                return jobs, True
            given = self._jobs.get()
        return jobs, False

    def _settle(self, done: list[tuple[_Job, Any, Exception | None]]) -> None:
        if done and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_resolve, done)


def connect(path: str) -> sqlite3.Connection:
    """The connection to a session file, made when it is not there. Raises BadRequest."""
    place = ":memory:" if path == MEMORY else path
    if path != MEMORY:
        # Conversations are nobody else's; SQLite gives its other files the mode of this one.
        Path(path).touch(mode=0o600)
    connection = sqlite3.connect(place, isolation_level=None, timeout=1.0)
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("BEGIN EXCLUSIVE")
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    connection.execute("COMMIT")
    if not tables:
        connection.executescript(f"BEGIN; {SCHEMA} COMMIT;")
    elif found in MIGRATIONS:
        steps = "".join(MIGRATIONS[step] for step in range(found, FORMAT))
        connection.executescript(f"BEGIN; {steps} PRAGMA user_version = {FORMAT}; COMMIT;")
    elif found != FORMAT:
        connection.close()
        raise BadRequest(
            f"{path} has format {found}, expected {FORMAT}: it is no session file of this version",
            param="sessions",
        )
    return connection


def write_turns(
    connection: sqlite3.Connection,
    row: TurnRow,
    turns: Iterable[tuple[int, bytes]],
    breaks: Iterable[tuple[bytes, str]],
) -> None:
    """Adds turns and breaks to a session, and brings its own row up to date."""
    connection.execute(
        "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (id) DO UPDATE SET used = excluded.used, turns = excluded.turns, "
        "bytes = excluded.bytes",
        row,
    )
    connection.executemany(
        "INSERT INTO turns VALUES (?, ?, ?)", ((row.id, at, data) for at, data in turns)
    )
    connection.executemany(
        "INSERT OR IGNORE INTO breaks VALUES (?, ?, ?)",
        ((row.id, key, cause) for key, cause in breaks),
    )


def mark_read(connection: sqlite3.Connection, session: int, turns: int) -> None:
    """Notes that somebody has the samples of a session as it was with that many turns."""
    connection.execute(
        "UPDATE sessions SET read_turns = max(read_turns, ?) WHERE id = ?", (turns, session)
    )


def remove(connection: sqlite3.Connection, ids: Iterable[int]) -> None:
    wanted = [(each,) for each in ids]
    for table, column in (("turns", "session"), ("breaks", "session"), ("sessions", "id")):
        connection.executemany(f"DELETE FROM {table} WHERE {column} = ?", wanted)


def read_session(connection: sqlite3.Connection, session: int) -> StoredSession:
    """Raises NotFound, or Unavailable when what is left is not what was answered."""
    kept = connection.execute("SELECT turns FROM sessions WHERE id = ?", (session,)).fetchone()
    if kept is None:
        raise NotFound(f"session {session} was deleted meanwhile")
    rows = connection.execute(
        "SELECT turn, data FROM turns WHERE session = ? ORDER BY turn", (session,)
    ).fetchall()
    if [turn for turn, _ in rows] != list(range(kept[0])):
        raise Unavailable(
            f"the stored session {session} has {len(rows)} of its {kept[0]} turns: the file is "
            "damaged"
        )
    breaks = connection.execute("SELECT key, cause FROM breaks WHERE session = ?", (session,))
    return StoredSession([data for _, data in rows], breaks.fetchall())


def read_page(connection: sqlite3.Connection, after: str, limit: int) -> list[TurnRow]:
    found = connection.execute(
        "SELECT * FROM sessions WHERE name > ? ORDER BY name LIMIT ?", (after, limit)
    )
    return [TurnRow(*each) for each in found]


def _rows(connection: sqlite3.Connection) -> list[TurnRow]:
    return [TurnRow(*each) for each in connection.execute("SELECT * FROM sessions ORDER BY used")]


def _transact(
    connection: sqlite3.Connection, jobs: list[_Job]
) -> list[tuple[_Job, Any, Exception | None]]:
    try:
        connection.execute("BEGIN IMMEDIATE")
        done = [_attempt(connection, job) for job in jobs]
        broken = next((e for _, _, e in done if e and not isinstance(e, LockstepError)), None)
        if broken is not None:
            raise broken
        connection.execute("COMMIT")
    except Exception as error:
        # Whatever it is, nothing of this transaction may be answered as stored.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        why = Unavailable(f"the session file cannot be written: {error}")
        for job in jobs:
            if job.undone is not None:
                job.undone(why)
        return [(job, None, why) for job in jobs]
    return done


def _attempt(connection: sqlite3.Connection, job: _Job) -> tuple[_Job, Any, Exception | None]:
    try:
        return job, job.work(connection), None
    except Exception as error:
        # Raised again where the job is awaited; this thread serves the other sessions.
        return job, None, error


def _resolve(done: list[tuple[_Job, Any, Exception | None]]) -> None:
    for job, result, error in done:
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
        f"the session file {path} cannot be used ({error}): is another gateway using it?",
        param="sessions",
    )
