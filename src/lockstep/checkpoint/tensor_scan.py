"""Single-pass scan of a weight file for digests and non-finite values, in little memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import FileIO
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from lockstep.checkpoint.digest import tensor_digest
from lockstep.checkpoint.safetensors_file import TensorEntry, TensorFile
from lockstep.tokens.errors import CheckpointError

CHUNK = 256 << 10
"""Bytes per read: small enough to stay in the CPU's cache between the passes over them."""
FINITE: Mapping[str, tuple[str, int, int]] = MappingProxyType(
    {
        "F64": ("<u8", 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
        "F32": ("<u4", 0x7FFF_FFFF, 0x7F80_0000),
        "F16": ("<u2", 0x7FFF, 0x7C00),
        "BF16": ("<u2", 0x7FFF, 0x7F80),
        "F8_E5M2": ("u1", 0x7F, 0x7C),
        "F8_E4M3": ("u1", 0x7F, 0x7F),
    }
)
"""For each float dtype, its bits as integers: the mask of the magnitude, and the smallest value
that is not a number. Integers compare fast in every width, and numpy has no bfloat16.
"""


HUGE: Mapping[str, int] = MappingProxyType({"F64": 0x4630_0000_0000_0000, "F32": 0x7180_0000,
                                            "BF16": 0x7180})  # fmt: skip
"""Bits of 2**100: no model has such weights, and products of two of them overflow."""
THREADS = min(4, max((os.cpu_count() or 1) // 2, 1))
"""Tensors read concurrently: at most half of the cores, because requests continue meanwhile."""
MOST_ODD = 8
"""Maximum number of suspicious tensors to list."""


def digests(file: TensorFile, odd: list[str] | None = None) -> dict[str, str]:
    """Return the digest of each tensor's dtype, shape and contents, by name.

    Add descriptions of all-zero matrices and implausibly large values to `odd`. Raises
    CheckpointError for the first NaN or infinite value, or for a file that became shorter.
    """
    # Reading, comparing and hashing all release the interpreter's lock. Beside a busy event loop, a
    # single thread would spend most of its time waiting for that lock.
    with ThreadPoolExecutor(THREADS, thread_name_prefix="scan") as pool:
        scanned = list(pool.map(partial(_scan, file), file.entries))
    if odd is not None:
        why = [f"tensor {name!r} of {file.path.name} {why}" for name, _, why in scanned if why]
        odd += why[: max(MOST_ODD - len(odd), 0)]
    return {name: digest for name, digest, _ in scanned}


def _scan(file: TensorFile, entry: TensorEntry) -> tuple[str, str, str | None]:
    """Return name and digest of a tensor, and what is suspicious about it."""
    size = min(CHUNK, max(entry.end - entry.start, 1))
    buffer, scratch = (np.empty(size, dtype=np.uint8) for _ in "ab")
    largest = 0

    def parts(source: FileIO) -> Iterator[memoryview]:
        nonlocal largest
        source.seek(entry.start)
        for start in range(entry.start, entry.end, CHUNK):
            count = min(CHUNK, entry.end - start)
            _fill(source, buffer[:count], file)
            magnitude = _check(entry, buffer[:count], scratch[:count], start - entry.start, file)
            largest = max(largest, magnitude)
            yield buffer[:count].data

    # Read, not mapped: touching a mapped file that is truncated meanwhile would kill the process.
    with open(file.path, "rb", buffering=0) as source:
        digest = tensor_digest(entry.dtype, entry.shape, parts(source))
    return entry.name, digest, _odd(entry, largest)


def _fill(source: FileIO, buffer: npt.NDArray[np.uint8], file: TensorFile) -> None:
    """Fill the buffer: network file systems may return less than requested."""
    at = 0
    while at < len(buffer):
        read = source.readinto(buffer.data[at:])
        if not read:
            raise CheckpointError(f"{file.path} became shorter while it was read")
        at += read


def _check(
    entry: TensorEntry,
    values: npt.NDArray[np.uint8],
    scratch: npt.NDArray[np.uint8],
    offset: int,
    file: TensorFile,
) -> int:
    """Return the bits of the largest magnitude; 0 for a dtype that is not a float."""
    if entry.dtype not in FINITE:
        return 0
    bits, mask, least = FINITE[entry.dtype]
    magnitude = scratch.view(bits)
    np.bitwise_and(values.view(bits), magnitude.dtype.type(mask), out=magnitude)
    largest = int(magnitude.max())
    if largest >= least:
        first = int((magnitude >= least).argmax()) + offset // magnitude.itemsize
        raise CheckpointError(
            f"tensor {entry.name!r} of {file.path} is NaN or infinite at value {first} of "
            f"{(entry.end - entry.start) // magnitude.itemsize}"
        )
    return largest


def _odd(entry: TensorEntry, largest: int) -> str | None:
    if entry.dtype in FINITE and largest == 0 and len(entry.shape) > 1:
        return "holds nothing but zeros"
    if largest >= HUGE.get(entry.dtype, largest + 1):
        return "holds values beyond 1e30"
    return None
