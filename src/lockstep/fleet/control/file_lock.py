"""An exclusive lock on a file that one process at a time may use, which names its holder."""

from __future__ import annotations

import os
from pathlib import Path

from lockstep.tokens.errors import BadRequest


class FileLock:
    """Holds `path` for this process until it is closed, or the process ends, however it ends.

    The lock is on a file beside it, `path` with `.lock` added: SQLite drops its own locks when
    anybody in the process closes the database's file.
    """

    def __init__(self, path: str | Path, *, way_out: str = "stop it, or use another file") -> None:
        """Raises BadRequest that names the process which holds it, or the file that cannot be
        locked."""
        import fcntl  # there is none on Windows, where only memory can be used

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
        """Lets the next one have it; closing twice is no error."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
