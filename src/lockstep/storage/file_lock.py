"""An exclusive lock on a file, which names the process that holds it."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.tokens.errors import BadRequest


class FileLock:
    """A lock on `path`, held until it is closed or the process ends, even by a crash.

    The lock is on a second file, `path` with `.lock` added: closing a descriptor of the database
    file itself would drop the POSIX locks that SQLite holds on it.
    """

    def __init__(self, path: str | Path, *, way_out: str = "stop it, or use another file") -> None:
        """Raises BadRequest that names the process which holds the lock, or the file that cannot be
        locked."""
        import fcntl  # missing on Windows, where only stores in memory work

        self.path = Path(f"{path}.lock")
        try:
            self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BadRequest(
                f"{path} cannot be used: {error.strerror}; does its directory exist, and may you "
                "write there?",
                param="path",
            ) from None
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.read(self._handle, 32).decode(errors="replace").strip()
            os.close(self._handle)
            raise BadRequest(
                f"{path} is in use by another gateway, process {holder or 'unknown'}: {way_out}",
                param="path",
            ) from None
        os.ftruncate(self._handle, 0)
        os.write(self._handle, f"{os.getpid()}\n".encode())

    def close(self) -> None:
        """Release the lock. Closing twice is no error."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
