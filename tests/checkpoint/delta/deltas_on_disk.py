"""Chains of deltas on disk, in plain numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lockstep.checkpoint.delta.convert import make_delta
from lockstep.checkpoint.manifest import begin, mark_stable, write_manifest
from lockstep.checkpoint.open import open_checkpoint
from lockstep.checkpoint.tensor_scan import digests
from lockstep.checkpoint.whole_reader import WholeReader
from tests.checkpoint import weights_on_disk

Arrays = dict[str, np.ndarray]


def full(directory: Path, arrays: Arrays) -> Path:
    """A full checkpoint with a manifest, as `save_checkpoint` writes one."""
    begin(directory)
    weights_on_disk.write(directory, arrays)
    write_manifest(directory, digests(WholeReader.open(directory)))
    mark_stable(directory)
    return directory


def moved(arrays: Arrays, seed: int) -> Arrays:
    """Arrays of which about one value in ten is another."""
    rng = np.random.default_rng(seed)
    changed = {}
    for name, array in arrays.items():
        changed[name] = array.copy()
        hit = rng.random(array.shape) < 0.1
        changed[name][hit] += np.float32(1.0)
    return changed


def chain(parent: Path, links: int) -> tuple[list[Path], list[Arrays]]:
    """step-0 in full and `links` deltas, each on the one before; and their contents."""
    contents = [weights_on_disk.tensors()]
    paths = [full(parent / "step-0", contents[0])]
    for step in range(1, links + 1):
        contents.append(moved(contents[-1], step))
        path = full(parent / "full" / f"step-{step}", contents[-1])
        paths.append(parent / f"step-{step}")
        make_delta(path, paths[-2], paths[-1])
    return paths, contents


def same(path: Path, arrays: Arrays) -> bool:
    """Whether reading the checkpoint gives exactly these bytes."""
    reader = open_checkpoint(path)
    return all(reader.array(name).tobytes() == arrays[name].tobytes() for name in arrays)
