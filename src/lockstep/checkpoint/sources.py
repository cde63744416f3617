"""Allowed sources of new weights: exactly one source, and directories inside allowed roots."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from lockstep.tokens.errors import BadRequest, CheckpointError, Forbidden


def check_one_source(**sources: object) -> None:
    """Raise BadRequest unless exactly one of the named sources is set (is not None)."""
    if list(sources.values()).count(None) != len(sources) - 1:
        names = ", ".join(f"{name} {str(value)!r}" for name, value in sources.items() if value)
        raise BadRequest(
            f"the weights come from {names or 'nowhere'}: expected exactly one of "
            f"{', '.join(sources)}",
            param=next(iter(sources)),
        )


def resolve(path: str, roots: Sequence[Path] | None, field: str = "weight_dir") -> Path:
    """Return the directory that `path` refers to, without symlinks; `roots` None allows any.

    `field` names it in errors. Raises BadRequest for an impossible path, Forbidden for one outside
    `roots` (after resolving symlinks), CheckpointError if it is not a directory.
    """
    if not path or not _spellable(path):
        raise BadRequest(
            f"{field} is {path!r}: expected the absolute path of a directory", param=field
        )
    if not os.path.isabs(path):
        raise BadRequest(
            f"{field} is {path!r}, a relative path: give an absolute one, as the server runs in "
            "another directory than you",
            param=field,
        )
    real = Path(os.path.realpath(path))
    if roots is not None and not inside(real, roots):
        led = "" if str(real) == path else f", which leads to {real},"
        raise Forbidden(
            f"{field} is {path!r}{led} outside the allowed roots "
            f"({', '.join(map(str, roots)) or 'there are none'}): move it or add a checkpoint root",
            param=field,
        )
    try:
        if not stat.S_ISDIR(real.stat().st_mode):
            raise NotADirectoryError("it is not a directory")
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{field} is {path!r}: {reason}", param=field) from None
    return real


def check_links(directory: Path, names: Iterable[str], roots: Sequence[Path]) -> None:
    """Raise Forbidden for a symlink in `directory` that leads out of it and of `roots`."""
    for name in names:
        path = directory / name
        if path.is_symlink() and not inside(path.resolve(), (directory, *roots)):
            raise Forbidden(f"{path} is a symlink out of the allowed roots")


def inside(path: Path, roots: Sequence[Path]) -> bool:
    """Return whether a path without symlinks is inside one of the roots, which may be symlinks."""
    return any(path.is_relative_to(os.path.realpath(root)) for root in roots)


def _spellable(path: str) -> bool:
    """Return whether a file could have this name at all."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False
