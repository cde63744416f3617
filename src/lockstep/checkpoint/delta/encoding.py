"""Encodings of the change of one tensor, from its bytes before to its bytes after.

`same` has no payload. `sparse` overwrites values: the gaps between changed positions and the new
values, byte plane by byte plane, compressed. `xor` is the exclusive or of all bytes, byte plane by
byte plane, compressed. `full` is the new bytes as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from lockstep.checkpoint.reader import Bytes, TensorShape
from lockstep.checkpoint.safetensors_file import SIZES
from lockstep.tokens.errors import CheckpointError

EncodingName = Literal["same", "sparse", "xor", "full"]
ENCODINGS: tuple[EncodingName, ...] = get_args(EncodingName)
GAP_BYTES = (1, 2, 4)
LEVEL = 1
"""Level of zstd. Level 3 makes a step of a trainer 2 % smaller and takes twice as long."""
SPARSE_ONLY = 32
"""With fewer than one changed value in so many, `xor` is at most a few percent smaller, and not
tried: it reads and compresses every byte.
"""
XOR_ONLY = 4
"""With more than one changed value in so many, positions cost more than `xor` does."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A payload; `changed` counts values, and `gap_bytes` is the width of a gap (`sparse`)."""

    encoding: EncodingName
    payload: bytes | Bytes
    changed: int
    gap_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Patch:
    """A decoded payload. `positions` (in values, rising) is None unless it is `sparse`.

    `values` are new values for `sparse` and `full`, and bits to flip for `xor`.
    """

    encoding: EncodingName
    values: npt.NDArray[Any]
    positions: npt.NDArray[np.int64] | None = None

    def apply(self, target: Bytes) -> None:
        """Change the bytes of a tensor in place."""
        words = target.view(self.values.dtype)
        if self.positions is not None:
            words[self.positions] = self.values
        elif self.encoding == "xor":
            np.bitwise_xor(words, self.values, out=words)
        else:
            words[:] = self.values


def encode(old: Bytes, new: Bytes, dtype: str) -> Encoded:
    """Return the smallest encoding of a change; `old` and `new` have the same length."""
    width = SIZES[dtype]
    positions = changed_positions(old, new, width)
    count, changed = len(new) // width, len(positions)
    if not changed:
        return Encoded("same", b"", 0)
    best = Encoded("full", new, changed)
    if changed * XOR_ONLY <= count:
        best = min(best, _sparse(new, positions, width), key=_size)
    if changed * SPARSE_ONLY > count:
        best = min(best, Encoded("xor", _compress(_planes(old ^ new, width)), changed), key=_size)
    return best


def decode(
    payload: memoryview, tensor: TensorShape, encoding: EncodingName, changed: int, gap_bytes: int
) -> Patch:
    """Return the patch of a payload. Raises CheckpointError without the name of the tensor.

    Sizes that the payload claims are compared with those of the tensor before memory is taken.
    """
    width = SIZES[tensor.dtype]
    word = np.dtype(f"u{min(width, 8)}")
    if encoding == "full":
        if len(payload) != tensor.nbytes:
            raise CheckpointError(f"has {len(payload)} bytes, expected {tensor.nbytes}")
        return Patch("full", np.frombuffer(payload, word))
    if encoding == "xor":
        flips = _interleave(_decompress(payload, tensor.nbytes), width)
        return Patch("xor", flips.view(word))
    raw = _decompress(payload, changed * (gap_bytes + width))
    gaps = _interleave(raw[: changed * gap_bytes], gap_bytes).view(f"<u{gap_bytes}")
    values = _interleave(raw[changed * gap_bytes :], width).view(word)
    count = tensor.nbytes // width
    # Summed as floats first: integers of a hostile payload could wrap around.
    if float(gaps.sum(dtype=np.float64)) + changed > count:
        raise CheckpointError(f"changes a value beyond the {count} of the tensor")
    positions = np.cumsum(gaps, dtype=np.int64)
    positions += np.arange(changed, dtype=np.int64)
    return Patch("sparse", values, positions)


def changed_positions(old: Bytes, new: Bytes, width: int) -> npt.NDArray[np.int64]:
    """Return the positions of values that differ, in rising order."""
    word = f"u{width}"
    whole = len(new) // 8 * 8
    here, there = old[:whole].view("u8"), new[:whole].view("u8")
    # Most words of 8 bytes are equal: look closer only at the others.
    hits = np.flatnonzero(here != there)
    pair = (-1, 8 // width)
    rows, columns = np.nonzero(
        here[hits].view(word).reshape(pair) != there[hits].view(word).reshape(pair)
    )
    tail = np.flatnonzero(old[whole:].view(word) != new[whole:].view(word)) + whole // width
    return np.concatenate([hits[rows] * (8 // width) + columns, tail])


def _size(encoded: Encoded) -> int:
    return len(encoded.payload)


def _sparse(new: Bytes, positions: npt.NDArray[np.int64], width: int) -> Encoded:
    gaps = np.diff(positions, prepend=-1) - 1
    largest = int(gaps.max())
    gap_bytes = next((size for size in GAP_BYTES if largest < 1 << 8 * size), None)
    if gap_bytes is None:
        return Encoded("full", new, len(positions))
    values = new.view(f"u{width}")[positions]
    planes = np.concatenate(
        [
            _planes(gaps.astype(f"<u{gap_bytes}").view(np.uint8), gap_bytes),
            _planes(values.view(np.uint8), width),
        ]
    )
    return Encoded("sparse", _compress(planes), len(positions), gap_bytes)


def _planes(data: Bytes, width: int) -> Bytes:
    """Return first byte 0 of every value, then byte 1, and so on: each compresses on its own."""
    return np.ascontiguousarray(data.reshape(-1, width).T).reshape(-1)


def _interleave(planes: Bytes, width: int) -> Bytes:
    return np.ascontiguousarray(planes.reshape(width, -1).T).reshape(-1)


def _compress(data: Bytes) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=LEVEL).compress(data.data)


def _decompress(payload: memoryview, size: int) -> Bytes:
    """Return `size` bytes. Raises CheckpointError for a payload of another size, by its header."""
    import zstandard

    try:
        claimed = zstandard.frame_content_size(payload)
        if claimed != size:
            raise CheckpointError(f"unpacks to {claimed} bytes, expected {size}")
        return np.frombuffer(
            zstandard.ZstdDecompressor().decompress(payload, allow_extra_data=False), np.uint8
        )
    except zstandard.ZstdError as error:
        raise CheckpointError(f"is not sound zstd: {error}") from None
