"""Reads every value of a weight file once, in little memory, for digests and non-finite values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from io import FileIO
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from lockstep.checkpoint.digest import tensor_digest
from lockstep.checkpoint.safetensors_file import TensorEntry, TensorFile
from lockstep.tokens.errors import CheckpointError

CHUNK = 256 << 10
"""Bytes read at once: they stay in the CPU's cache between the passes over them."""
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
"""For each float its bits as integers: the mask of the magnitude, and the least that is no number.
Integers compare fast in every width, and numpy has no bfloat16."""


def digests(file: TensorFile) -> dict[str, str]:
    """The digest of each tensor's type, shape and contents, by name.

    Raises CheckpointError that names the first NaN or infinite value, or a file that became
    shorter.
    """
    buffer = np.zeros(CHUNK, dtype=np.uint8)
    scratch = np.zeros(CHUNK, dtype=np.uint8)

    def parts(source: FileIO, entry: TensorEntry) -> Iterator[memoryview]:
        source.seek(entry.start)
        for start in range(entry.start, entry.end, CHUNK):
            count = min(CHUNK, entry.end - start)
            _fill(source, buffer[:count], file)
            _check(entry, buffer[:count], scratch[:count], start - entry.start, file)
            yield buffer[:count].data

    # Read, not mapped: touching a mapped file that somebody cuts would end the process.
    with open(file.path, "rb", buffering=0) as source:
        return {
            entry.name: tensor_digest(entry.dtype, entry.shape, parts(source, entry))
            for entry in file.entries
        }


def _fill(source: FileIO, buffer: npt.NDArray[np.uint8], file: TensorFile) -> None:
    """Fills the buffer: network file systems may return less than was requested."""
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
) -> None:
    if entry.dtype not in FINITE:
        return
    bits, mask, least = FINITE[entry.dtype]
    magnitude = scratch.view(bits)
    np.bitwise_and(values.view(bits), magnitude.dtype.type(mask), out=magnitude)
    if int(magnitude.max()) >= least:
        first = int((magnitude >= least).argmax()) + offset // magnitude.itemsize
        raise CheckpointError(
            f"tensor {entry.name!r} of {file.path} is NaN or infinite at value {first} of "
            f"{(entry.end - entry.start) // magnitude.itemsize}"
        )
