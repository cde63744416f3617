"""The tables of the session file: their schema, and what is read from and written to them."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lockstep.tokens.errors import BadRequest, NotFound, Unavailable

FORMAT = 2
MEMORY = "memory"
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


class SessionRow(NamedTuple):
    """The row of a session. Times are seconds since 1970.

    `read_turns` is how many turns it had when its samples were last read.
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


def connect(path: str) -> sqlite3.Connection:
    """The connection to a session file, made when it is not there. Raises BadRequest."""
    place = ":memory:" if path == MEMORY else path
    if path != MEMORY:
        # Conversations are private; SQLite gives its other files the mode of this one.
        Path(path).touch(mode=0o600)
    connection = sqlite3.connect(place, isolation_level=None, timeout=1.0)
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("BEGIN EXCLUSIVE")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    connection.execute("COMMIT")
    if not tables:
        connection.executescript(f"BEGIN; {SCHEMA} COMMIT;")
    elif version in MIGRATIONS:
        steps = "".join(MIGRATIONS[step] for step in range(version, FORMAT))
        connection.executescript(f"BEGIN; {steps} PRAGMA user_version = {FORMAT}; COMMIT;")
    elif version != FORMAT:
        connection.close()
        raise BadRequest(
            f"{path} has format {version}, expected {FORMAT}: another version of Lockstep wrote "
            "it; give another --state-dir or --sessions",
            param="sessions",
        )
    return connection


def write_turns(
    connection: sqlite3.Connection,
    row: SessionRow,
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
    """Records that the samples of a session were read when it had that many turns."""
    connection.execute(
        "UPDATE sessions SET read_turns = max(read_turns, ?) WHERE id = ?", (turns, session)
    )


def remove(connection: sqlite3.Connection, ids: Iterable[int]) -> None:
    """Deletes sessions with their turns and breaks."""
    rows = [(each,) for each in ids]
    for table, column in (("turns", "session"), ("breaks", "session"), ("sessions", "id")):
        connection.executemany(f"DELETE FROM {table} WHERE {column} = ?", rows)


def read_session(connection: sqlite3.Connection, session: int) -> StoredSession:
    """The turns and breaks of a session. Raises NotFound, or Unavailable when turns are missing."""
    counted = connection.execute("SELECT turns FROM sessions WHERE id = ?", (session,)).fetchone()
    if counted is None:
        raise NotFound(f"session {session} was deleted meanwhile")
    rows = connection.execute(
        "SELECT turn, data FROM turns WHERE session = ? ORDER BY turn", (session,)
    ).fetchall()
    if [turn for turn, _ in rows] != list(range(counted[0])):
        raise Unavailable(
            f"the stored session {session} has {len(rows)} of its {counted[0]} turns: the file is "
            "damaged; delete the session"
        )
    breaks = connection.execute("SELECT key, cause FROM breaks WHERE session = ?", (session,))
    return StoredSession([data for _, data in rows], breaks.fetchall())


def read_page(connection: sqlite3.Connection, after: str, limit: int) -> list[SessionRow]:
    """The first `limit` sessions whose names come after `after`."""
    rows = connection.execute(
        "SELECT * FROM sessions WHERE name > ? ORDER BY name LIMIT ?", (after, limit)
    )
    return [SessionRow(*each) for each in rows]


def read_sessions(connection: sqlite3.Connection) -> list[SessionRow]:
    """All sessions, the least recently used first."""
    rows = connection.execute("SELECT * FROM sessions ORDER BY used")
    return [SessionRow(*each) for each in rows]
