"""Single-pass scan of a checkpoint for digests and non-finite values, in little memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MappingProxyType

import numpy as np

from lockstep.checkpoint.digest import tensor_digest
from lockstep.checkpoint.reader import CHUNK, Bytes, CheckpointReader, TensorShape
from lockstep.tokens.errors import CheckpointError

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


def digests(reader: CheckpointReader, odd: list[str] | None = None) -> dict[str, str]:
    """Return the digest of each tensor's dtype, shape and contents, by name.

    Add descriptions of all-zero matrices and implausibly large values to `odd`. Raises
    CheckpointError for the first NaN or infinite value, or for a file that became shorter.
    """
    # Reading, comparing and hashing all release the interpreter's lock. Beside a busy event loop, a
    # single thread would spend most of its time waiting for that lock.
    with ThreadPoolExecutor(THREADS, thread_name_prefix="scan") as pool:
        scanned = list(pool.map(partial(_scan, reader), reader.tensors))
    if odd is not None:
        why = [f"tensor {name!r} of {reader.where(name)} {why}" for name, _, why in scanned if why]
        odd += why[: max(MOST_ODD - len(odd), 0)]
    return {name: digest for name, digest, _ in scanned}


def _scan(reader: CheckpointReader, name: str) -> tuple[str, str, str | None]:
    """Return name and digest of a tensor, and what is suspicious about it."""
    tensor = reader.tensors[name]
    scratch = np.empty(min(CHUNK, max(tensor.nbytes, 1)), dtype=np.uint8)
    largest = 0

    def checked() -> Iterator[memoryview]:
        nonlocal largest
        at = 0
        for part in reader.parts(name):
            values = np.frombuffer(part, dtype=np.uint8)
            magnitude = _largest(tensor.dtype, values, scratch[: len(values)])
            if tensor.dtype in FINITE and magnitude >= FINITE[tensor.dtype][2]:
                raise _not_finite(reader, name, scratch[: len(values)], at)
            largest = max(largest, magnitude)
            at += len(values)
            yield part

    digest = tensor_digest(tensor.dtype, tensor.shape, checked())
    return name, digest, _odd(tensor, largest)


def _largest(dtype: str, values: Bytes, scratch: Bytes) -> int:
    """Return the bits of the largest magnitude; 0 for a dtype that is not a float.

    `scratch` receives all magnitudes.
    """
    if dtype not in FINITE:
        return 0
    bits, mask, _ = FINITE[dtype]
    magnitude = scratch.view(bits)
    np.bitwise_and(values.view(bits), magnitude.dtype.type(mask), out=magnitude)
    return int(magnitude.max())


def _not_finite(
    reader: CheckpointReader, name: str, scratch: Bytes, offset: int
) -> CheckpointError:
    tensor = reader.tensors[name]
    bits, _, least = FINITE[tensor.dtype]
    magnitude = scratch.view(bits)
    first = int((magnitude >= least).argmax()) + offset // magnitude.itemsize
    return CheckpointError(
        f"tensor {name!r} of {reader.directory / reader.where(name)} is NaN or infinite at value "
        f"{first} of {tensor.nbytes // magnitude.itemsize}"
    )


def _odd(tensor: TensorShape, largest: int) -> str | None:
    if tensor.dtype in FINITE and largest == 0 and len(tensor.shape) > 1:
        return "holds nothing but zeros"
    if largest >= HUGE.get(tensor.dtype, largest + 1):
        return "holds values beyond 1e30"
    return None
