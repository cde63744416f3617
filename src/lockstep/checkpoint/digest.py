"""Digests that identify weights by their contents: one per tensor, and one of them all.

A digest covers dtype, shape and every byte in order, so a tensor with swapped rows has another
digest. It does not depend on how a checkpoint is split into files. SHA-256 because CPUs have
instructions for it: 1.6 GB/s on one core, where blake2b of the same library reaches 0.9.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from lockstep.checkpoint.tensor_names import DERIVED, SHOWN

LENGTH = 32
"""Number of hexadecimal digits kept: 128 bits."""
SCHEME = "sha256:"
"""Prefix of every combined digest; digests with another prefix are not comparable."""


def tensor_digest(dtype: str, shape: Sequence[int], parts: Iterable[bytes | memoryview]) -> str:
    """Return the digest of one tensor; `dtype` is safetensors' name, the bytes come in any
    parts.
    """
    digest = tensor_hash(dtype, shape)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:LENGTH]


def tensor_hash(dtype: str, shape: Sequence[int]) -> hashlib._Hash:
    """Return a hash to update with a tensor's bytes; its first LENGTH digits are the digest."""
    return hashlib.sha256(f"{dtype} {list(shape)}\0".encode())


def combined(tensors: Mapping[str, str]) -> str:
    """Return the digest of a whole set of weights, from the digests of its tensors by name."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        if not name.endswith(DERIVED):
            digest.update(f"{name}\0{tensors[name]}\n".encode(errors="backslashreplace"))
    return SCHEME + digest.hexdigest()[:LENGTH]


def differing(expected: Mapping[str, str], actual: Mapping[str, str]) -> str:
    """Describe the tensors in which two sets differ."""
    names = sorted(
        name
        for name in expected.keys() | actual.keys()
        if expected.get(name) != actual.get(name) and not name.endswith(DERIVED)
    )
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(repr, names[:SHOWN])) + more
