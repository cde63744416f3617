"""Digests that identify weights by their contents: one of every tensor, and one of them all.

A digest covers type, shape and every byte in order, so a tensor whose rows were swapped is another
one. It does not depend on how a checkpoint is split into files. SHA-256 because CPUs have
instructions for it: 1.6 GB/s on one core, where blake2b of the same library makes 0.9.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from lockstep.checkpoint.tensor_names import DERIVED, SHOWN

LENGTH = 32
"""Hexadecimal digits that are kept: 128 bits."""
SCHEME = "sha256:"
"""Begins every combined digest: one that was made another way says nothing about this one."""


def tensor_digest(dtype: str, shape: Sequence[int], parts: Iterable[bytes | memoryview]) -> str:
    """The digest of one tensor; `dtype` as safetensors names it, its bytes in any parts."""
    digest = tensor_hash(dtype, shape)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:LENGTH]


def tensor_hash(dtype: str, shape: Sequence[int]) -> hashlib._Hash:
    """What is to be updated with a tensor's bytes: LENGTH digits of it are then its digest."""
    return hashlib.sha256(f"{dtype} {list(shape)}\0".encode())


def combined(tensors: Mapping[str, str]) -> str:
    """The digest of a whole set of weights, from the digests of its tensors by name."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        if not name.endswith(DERIVED):
            digest.update(f"{name}\0{tensors[name]}\n".encode(errors="backslashreplace"))
    return SCHEME + digest.hexdigest()[:LENGTH]


def differing(expected: Mapping[str, str], actual: Mapping[str, str]) -> str:
    """Names the tensors in which two sets differ, in words."""
    names = sorted(
        name
        for name in expected.keys() | actual.keys()
        if expected.get(name) != actual.get(name) and not name.endswith(DERIVED)
    )
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(repr, names[:SHOWN])) + more
