"""Directories that only the user of this process may read."""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)


def close_to_others(directory: Path) -> None:
    """Remove the access of other users to an existing directory, and so to all files in it.

    Warns for a directory of another user, whose mode this process cannot change.
    """
    mode = directory.stat().st_mode & 0o777
    if not mode & 0o077:
        return
    try:
        directory.chmod(0o700)
    except PermissionError:
        log.warning(
            "%s has mode %o and belongs to another user: others may read what is stored in it",
            directory, mode,
        )  # fmt: skip
