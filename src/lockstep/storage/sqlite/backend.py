"""Opens the store of one gateway by its URL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from lockstep.storage.sqlite import MEMORY
from lockstep.storage.sqlite.control import SqliteControlStore
from lockstep.storage.sqlite.leadership import AlwaysLeader
from lockstep.storage.sqlite.sessions import SqliteSessionStore
from lockstep.storage.store import Store
from lockstep.tokens.errors import BadRequest

STATE_FILE = "state.sqlite"
SESSION_FILE = "sessions.sqlite"


def sqlite_url(directory: Path | None, sessions: str | None = None) -> str:
    """Return the URL of the store in a directory, None for memory.

    `sessions` is the path of another session file, or "memory".
    """
    url = "memory:" if directory is None else f"sqlite:{quote(str(directory))}"
    return url if sessions is None else f"{url}?sessions={quote(sessions, safe='/')}"


@asynccontextmanager
async def open_backend(url: str, model: str | None) -> AsyncIterator[Store]:
    """Open the files of a URL; see `open_store`. The session file opens with `sessions.start`."""
    parts = urlsplit(url)
    directory = None if parts.scheme == "memory" else Path(unquote(parts.path))
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    sessions = options.pop("sessions", None)
    if options or parts.netloc or (directory is not None and not parts.path):
        raise BadRequest(
            f"the store is {url!r}: expected memory: or sqlite:DIRECTORY, with ?sessions=FILE at "
            "most",
            param="store",
        )
    if directory is None:
        control = SqliteControlStore(model=model)
    else:
        control = SqliteControlStore(str(directory / STATE_FILE), model=model)
        sessions = sessions or str(directory / SESSION_FILE)
    try:
        yield Store(SqliteSessionStore(sessions or MEMORY), control, AlwaysLeader(), None)
    finally:
        await control.close()
