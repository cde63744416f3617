"""Which checkpoint directories are needed to read others, so that the rest can be deleted."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from lockstep.checkpoint.delta.chain import resolve_chain
from lockstep.checkpoint.delta.record import read_link
from lockstep.checkpoint.manifest import MANIFEST, STABLE
from lockstep.tokens.errors import CheckpointError


def needed(directories: Iterable[Path]) -> frozenset[Path]:
    """Return these directories and all that their chains read.

    Raises CheckpointError for a chain that is broken: what it needs is then not known.
    """
    chains: set[Path] = set()
    for directory in directories:
        # Chains share links: one that was met before brings nothing new.
        if directory in chains:
            continue
        chains.add(directory)
        if read_link(directory) is not None:
            chains.update(resolve_chain(directory).directories)
    return frozenset(chains)


def prune(parent: Path, keep: Iterable[Path], *, dry_run: bool = False) -> list[Path]:
    """Delete the checkpoints in `parent` that none in `keep` needs; return them.

    Only directories with a manifest or STABLE are touched. Raises CheckpointError, and deletes
    nothing, for a kept checkpoint that does not exist or has a broken chain.
    """
    to_keep = [path if path.is_absolute() else parent / path for path in keep]
    for path in to_keep:
        if not path.is_dir():
            raise CheckpointError(f"{path} is to be kept, but does not exist: nothing was deleted")
    stay = {path.resolve() for path in needed(to_keep)}
    unneeded = [
        path
        for path in sorted(parent.iterdir())
        if path.is_dir()
        and not path.is_symlink()
        and ((path / MANIFEST).exists() or (path / STABLE).exists())
        and path.resolve() not in stay
    ]
    if not dry_run:
        for path in unneeded:
            # Without STABLE it is refused by readers while it is being deleted.
            (path / STABLE).unlink(missing_ok=True)
            shutil.rmtree(path)
    return unneeded
