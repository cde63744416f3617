"""The tables of the session file: their schema, and what is read from and written to them."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.gateway.sessions.entry import SessionEntry
from lockstep.gateway.sessions.store.interface import StoredSession
from lockstep.gateway.sessions.terms import SessionTerms
from lockstep.tokens.errors import BadRequest, NotFound, Unavailable

FORMAT = 3
MEMORY = "memory"
CHECKSUM_BYTES = 8
Blob = bytes  # a row has a field of that name
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
    # Turns of before have no checksum: one made now would vouch for what may be damaged already.
    2: "ALTER TABLE sessions ADD COLUMN active REAL NOT NULL DEFAULT 0;"
    "ALTER TABLE sessions ADD COLUMN terms BLOB;"
    "ALTER TABLE turns ADD COLUMN checksum BLOB NOT NULL DEFAULT x'';"
    "CREATE TABLE facts (name TEXT PRIMARY KEY, value NOT NULL);",
}
"""What brings a file of an earlier format to the next one."""


class SessionRow(NamedTuple):
    """The row of a session. Times are seconds since 1970, but `active` is of the service clock.

    `read_turns` is how many turns it had when its samples were last read, `terms` the encoded
    SessionTerms of a session that was begun with a key of its own.
    """

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
"""The types of a row that is not damaged: SQLite itself would hold anything."""


def row_of(entry: SessionEntry) -> SessionRow:
    """The row of a session that has a number already."""
    return SessionRow(
        entry.id or 0, entry.name, entry.tokenizer, entry.created, entry.used, entry.turns,
        entry.bytes, entry.read_turns, entry.active,
        None if entry.terms is None else entry.terms.encode(),
    )  # fmt: skip


def entry_of(row: tuple[Any, ...]) -> SessionEntry:
    """The session of a row; one whose row cannot be read is damaged and has no sizes."""
    if not _is_whole(row):
        return SessionEntry(row[0], _shown_name(row), b"", 0.0, 0.0, 0.0, damaged=True)
    known = SessionRow(*row)
    return SessionEntry(
        known.id, known.name, known.tokenizer, known.created, known.used, known.active,
        known.turns, known.bytes, known.read_turns, SessionTerms.decode(known.terms),
    )  # fmt: skip


class StoredFile(NamedTuple):
    """What a session file holds beside turns: its sessions, some perhaps damaged, a secret that
    only this file has, and the service clock when it was last saved."""

    entries: list[SessionEntry]
    secret: bytes
    clock: float


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
    """Adds turns and breaks to a session, and brings its own row up to date."""
    connection.execute(
        "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (id) DO UPDATE SET tokenizer = excluded.tokenizer, used = excluded.used, "
        "turns = excluded.turns, bytes = excluded.bytes, active = excluded.active, "
        "terms = excluded.terms",
        row,
    )
    connection.executemany(
        "INSERT INTO turns VALUES (?, ?, ?, ?)",
        ((row.id, at, data, _checksum(row.id, at, data)) for at, data in turns),
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


def save_clock(connection: sqlite3.Connection, seconds: float) -> None:
    """Records the service clock, which goes on from there after a restart."""
    connection.execute("UPDATE facts SET value = ? WHERE name = 'clock'", (seconds,))


def remove(connection: sqlite3.Connection, ids: Iterable[int]) -> None:
    """Deletes sessions with their turns and breaks."""
    rows = [(each,) for each in ids]
    for table, column in (("turns", "session"), ("breaks", "session"), ("sessions", "id")):
        connection.executemany(f"DELETE FROM {table} WHERE {column} = ?", rows)


def read_session(connection: sqlite3.Connection, session: int, name: str) -> StoredSession:
    """The turns and breaks of a session. Raises NotFound, or Unavailable when turns are missing
    or not as they were written."""
    counted = connection.execute("SELECT turns FROM sessions WHERE id = ?", (session,)).fetchone()
    if counted is None:
        raise NotFound(f"session {name!r} was deleted meanwhile")
    rows = connection.execute(
        "SELECT turn, data, checksum FROM turns WHERE session = ? ORDER BY turn", (session,)
    ).fetchall()
    if [turn for turn, _, _ in rows] != list(range(counted[0])):
        raise _damaged(name, f"it has {len(rows)} of its {counted[0]} turns")
    for turn, data, checksum in rows:
        known = data if isinstance(data, bytes) else b""
        if checksum not in (b"", _checksum(session, turn, known)) or known is not data:
            raise _damaged(name, f"it has a turn {turn} that is not as it was written")
    breaks = connection.execute(
        "SELECT key, cause FROM breaks WHERE session = ?", (session,)
    ).fetchall()
    if not all(isinstance(key, bytes) and isinstance(cause, str) for key, cause in breaks):
        raise _damaged(name, "it has a break that is not as it was written")
    return StoredSession([data for _, data, _ in rows], breaks)


def read_page(connection: sqlite3.Connection, after: str, limit: int) -> list[SessionEntry]:
    """The first `limit` sessions whose names come after `after`; a damaged one has no sizes."""
    rows = connection.execute(
        "SELECT * FROM sessions WHERE name > ? AND typeof(name) = 'text' ORDER BY name LIMIT ?",
        (after, limit),
    )
    return [entry_of(each) for each in rows]


def read_file(connection: sqlite3.Connection) -> StoredFile:
    """All sessions, the least recently used first, and the facts about the file."""
    rows = connection.execute("SELECT * FROM sessions ORDER BY active, used").fetchall()
    facts = dict(connection.execute("SELECT name, value FROM facts"))
    return StoredFile([entry_of(each) for each in rows], facts["secret"], facts["clock"])


def _checksum(session: int, turn: int, data: bytes) -> bytes:
    """Of a turn and of where it stands: two turns that change places are damage as well."""
    digest = blake2b(b"%d:%d:" % (session, turn), digest_size=CHECKSUM_BYTES)
    digest.update(data)
    return digest.digest()


def _is_whole(row: tuple[Any, ...]) -> bool:
    typed = all(isinstance(value, kind) for value, kind in zip(row, KINDS, strict=True))
    return typed and SessionTerms.is_readable(row[-1])


def _shown_name(row: tuple[Any, ...]) -> str:
    """The name of a damaged row; where that is damaged too, one that no session can have."""
    return row[1] if isinstance(row[1], str) else f"(damaged row {row[0]})"


def _damaged(name: str, what: str) -> Unavailable:
    return Unavailable(
        f"session {name!r} cannot be read back: {what}; the file is damaged, delete the session"
    )
