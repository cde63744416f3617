"""Tables of the session file: schema, migrations, reads and writes."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.storage.protocols import StoredSession
from lockstep.storage.session_entry import (
    SessionEntry,
    SessionTerms,
    damaged_session,
    turn_checksum,
)
from lockstep.storage.sqlite import MEMORY
from lockstep.tokens.errors import BadRequest, NotFound

FORMAT = 3
Blob = bytes  # SessionRow has a field named bytes
SCHEMA = f"""
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, tokenizer BLOB NOT NULL,
    created REAL NOT NULL, used REAL NOT NULL, turns INTEGER NOT NULL, bytes INTEGER NOT NULL,
    read_turns INTEGER NOT NULL DEFAULT 0, active REAL NOT NULL DEFAULT 0, terms BLOB);
CREATE TABLE turns (
    session INTEGER NOT NULL, turn INTEGER NOT NULL, data BLOB NOT NULL,
    checksum BLOB NOT NULL DEFAULT x'', PRIMARY KEY (session, turn));
CREATE TABLE breaks (
    session INTEGER NOT NULL, key BLOB NOT NULL, cause TEXT NOT NULL, PRIMARY KEY (session, key));
CREATE TABLE facts (name TEXT PRIMARY KEY, value NOT NULL);
PRAGMA user_version = {FORMAT};
"""
MIGRATIONS = {
    1: "ALTER TABLE sessions ADD COLUMN read_turns INTEGER NOT NULL DEFAULT 0;",
    # Older turns keep an empty checksum: one computed now would hide damage that is there already.
    2: "ALTER TABLE sessions ADD COLUMN active REAL NOT NULL DEFAULT 0;"
    "ALTER TABLE sessions ADD COLUMN terms BLOB;"
    "ALTER TABLE turns ADD COLUMN checksum BLOB NOT NULL DEFAULT x'';"
    "CREATE TABLE facts (name TEXT PRIMARY KEY, value NOT NULL);",
}
"""Statements that migrate a file from each format to the next."""
MARK_READ = "UPDATE sessions SET read_turns = max(read_turns, ?) WHERE id = ?"
SAVE_CLOCK = "UPDATE facts SET value = ? WHERE name = 'clock'"


class SessionRow(NamedTuple):
    """Columns of a session; see SessionEntry. `terms` are encoded SessionTerms."""

    id: int
    name: str
    tokenizer: bytes
    created: float
    used: float
    turns: int
    bytes: int
    read_turns: int
    active: float
    terms: Blob | None


KINDS: tuple[Any, ...] = (int, str, bytes, float, float, int, int, int, float, bytes | None)
"""Types of an undamaged row; SQLite itself accepts any type in any column."""


def row_of(entry: SessionEntry) -> SessionRow:
    """Return the row of an entry that has an id."""
    return SessionRow(
        entry.id or 0, entry.name, entry.tokenizer, entry.created, entry.used, entry.turns,
        entry.bytes, entry.read_turns, entry.active,
        None if entry.terms is None else entry.terms.encode(),
    )  # fmt: skip


def entry_of(row: tuple[Any, ...]) -> SessionEntry:
    """Return the session of a row; an unreadable row gives a damaged entry without sizes."""
    if not _is_readable(row):
        return SessionEntry(row[0], _name_of(row), b"", 0.0, 0.0, 0.0, damaged=True)
    session = SessionRow(*row)
    return SessionEntry(
        session.id, session.name, session.tokenizer, session.created, session.used, session.active,
        session.turns, session.bytes, session.read_turns, SessionTerms.decode(session.terms),
    )  # fmt: skip


class StoredFile(NamedTuple):
    """Contents of a session file without the turns: its sessions, some of them perhaps damaged, its
    secret, and the service clock when it was last saved."""

    entries: list[SessionEntry]
    secret: bytes
    clock: float


def connect(path: str) -> sqlite3.Connection:
    """Open a session file, or create it, and migrate it. Raises BadRequest for a newer format."""
    if path != MEMORY:
        # Conversations are private. SQLite gives its -wal and -shm files the mode of this one.
        Path(path).touch(mode=0o600)
    connection = sqlite3.connect(
        ":memory:" if path == MEMORY else path, isolation_level=None, timeout=1.0
    )
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
    connection.execute(
        "INSERT OR IGNORE INTO facts VALUES ('secret', ?), ('clock', 0.0)",
        (secrets.token_bytes(32),),
    )
    return connection


def write_turns(
    connection: sqlite3.Connection,
    row: SessionRow,
    turns: Iterable[tuple[int, bytes]],
    breaks: Iterable[tuple[bytes, str]],
) -> None:
    """Insert turns and breaks of a session, and insert or update its row."""
    connection.execute(
        "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (id) DO UPDATE SET tokenizer = excluded.tokenizer, used = excluded.used, "
        "turns = excluded.turns, bytes = excluded.bytes, active = excluded.active, "
        "terms = excluded.terms",
        row,
    )
    connection.executemany(
        "INSERT INTO turns VALUES (?, ?, ?, ?)",
        ((row.id, at, data, turn_checksum(str(row.id), at, data)) for at, data in turns),
    )
    connection.executemany(
        "INSERT OR IGNORE INTO breaks VALUES (?, ?, ?)",
        ((row.id, key, cause) for key, cause in breaks),
    )


def remove(connection: sqlite3.Connection, ids: Iterable[int]) -> None:
    """Delete sessions with their turns and breaks."""
    rows = [(session,) for session in ids]
    for table, column in (("turns", "session"), ("breaks", "session"), ("sessions", "id")):
        connection.executemany(f"DELETE FROM {table} WHERE {column} = ?", rows)


def read_session(connection: sqlite3.Connection, session: int, name: str) -> StoredSession:
    """Return the turns and breaks of a session. Raises NotFound, and Unavailable when turns are
    missing or changed."""
    row = connection.execute("SELECT turns FROM sessions WHERE id = ?", (session,)).fetchone()
    if row is None:
        raise NotFound(f"session {name!r} was deleted meanwhile")
    (count,) = row
    rows = connection.execute(
        "SELECT turn, data, checksum FROM turns WHERE session = ? ORDER BY turn", (session,)
    ).fetchall()
    if [turn for turn, _, _ in rows] != list(range(count)):
        raise damaged_session(name, f"it has {len(rows)} of its {count} turns", "file")
    for turn, data, checksum in rows:
        whole = isinstance(data, bytes)
        if not whole or checksum not in (b"", turn_checksum(str(session), turn, data)):
            raise damaged_session(
                name, f"it has a turn {turn} that is not as it was written", "file"
            )
    breaks = connection.execute(
        "SELECT key, cause FROM breaks WHERE session = ?", (session,)
    ).fetchall()
    if not all(isinstance(key, bytes) and isinstance(cause, str) for key, cause in breaks):
        raise damaged_session(name, "it has a break that is not as it was written", "file")
    return StoredSession([data for _, data, _ in rows], breaks)


def read_page(connection: sqlite3.Connection, after: str, limit: int) -> list[SessionEntry]:
    """Return the first `limit` sessions with names greater than `after`, ordered by name."""
    rows = connection.execute(
        "SELECT * FROM sessions WHERE name > ? AND typeof(name) = 'text' ORDER BY name LIMIT ?",
        (after, limit),
    )
    return [entry_of(row) for row in rows]


def read_file(connection: sqlite3.Connection) -> StoredFile:
    """Return all sessions, least recently used first, with the secret and the clock."""
    rows = connection.execute("SELECT * FROM sessions ORDER BY active, used").fetchall()
    facts = dict(connection.execute("SELECT name, value FROM facts"))
    return StoredFile([entry_of(row) for row in rows], facts["secret"], facts["clock"])


def _is_readable(row: tuple[Any, ...]) -> bool:
    typed = all(isinstance(value, kind) for value, kind in zip(row, KINDS, strict=True))
    return typed and SessionTerms.is_readable(row[-1])


def _name_of(row: tuple[Any, ...]) -> str:
    """Return the name in a damaged row, or one that no session can have if it is damaged too."""
    return row[1] if isinstance(row[1], str) else f"(damaged row {row[0]})"
