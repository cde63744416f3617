"""Safetensors format in plain Python and numpy: strict headers, and small files as a whole.

A file is 8 bytes of length, a JSON header, and the tensors end to end. Everything that can be
checked without reading the tensors is checked.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from lockstep.checkpoint.files import file_size, unique_names, write_whole
from lockstep.tokens.errors import CheckpointError

LARGEST_HEADER = 32 << 20
MOST_TENSORS = 100_000
"""Tensors of one file."""
SIZES: Mapping[str, int] = MappingProxyType(
    {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8}
    | {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}
)
"""Bytes per value, by the format's dtype name."""
ARRAYS: Mapping[str, str] = MappingProxyType({"I64": "<i8", "F64": "<f8", "F32": "<f4"})
"""Dtypes that `array` and `write` support."""
DECODER = json.JSONDecoder(object_pairs_hook=unique_names)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: bytes [start, end) from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class TensorFile:
    """Header of a safetensors file; `entries` are contiguous, in this order, up to its end."""

    path: Path
    size: int
    entries: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> TensorFile:
        """Read the header. Raises CheckpointError if the file is truncated, too long or invalid."""
        size = file_size(path)
        try:
            with open(path, "rb") as file:
                prefix = file.read(8)
                if len(prefix) < 8:
                    raise CheckpointError(f"{path} has {size} bytes: too short for a header")
                (length,) = struct.unpack("<Q", prefix)
                if length > min(LARGEST_HEADER, size - 8):
                    raise CheckpointError(
                        f"{path} says that its header has {length} bytes, but the file has {size} "
                        f"and a header at most {LARGEST_HEADER}"
                    )
                text = file.read(length)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        by_name: dict[str, TensorEntry] = {}
        metadata: dict[str, str] | None = None
        for name, value in _header_items(text, path):
            if name in by_name or (name == "__metadata__" and metadata is not None):
                raise CheckpointError(f"{name!r} is twice in the header of {path}")
            if name == "__metadata__":
                metadata = _metadata(value, path)
                continue
            if len(by_name) == MOST_TENSORS:
                raise CheckpointError(
                    f"{path} has more than {MOST_TENSORS} tensors: use more files"
                )
            by_name[name] = _entry(name, value, 8 + length, path)
        entries = sorted(by_name.values(), key=lambda entry: (entry.start, entry.end))
        at = 8 + length
        for entry in entries:
            if entry.start != at:
                raise CheckpointError(
                    f"tensor {entry.name!r} of {path} starts at byte {entry.start}, expected {at}: "
                    "tensors lie end to end"
                )
            at = entry.end
        if at != size:
            more = "cut" if at > size else "followed by something else"
            raise CheckpointError(
                f"{path} has {size} bytes, but its header describes {at}: the file is {more}"
            )
        return cls(path, size, tuple(entries), MappingProxyType(metadata or {}))

    def array(self, name: str) -> npt.NDArray[Any]:
        """Return one small tensor. Raises CheckpointError if missing, changed or of a wrong dtype.

        Large tensors are read in pieces by their users.
        """
        entry = next((entry for entry in self.entries if entry.name == name), None)
        if entry is None or entry.dtype not in ARRAYS:
            problem = "is missing" if entry is None else f"has dtype {entry.dtype}"
            raise CheckpointError(f"tensor {name!r} of {self.path} {problem}")
        try:
            with open(self.path, "rb") as file:
                file.seek(entry.start)
                data = file.read(entry.end - entry.start)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from None
        if len(data) != entry.end - entry.start:
            raise CheckpointError(f"{self.path} became shorter while it was read")
        return np.frombuffer(data, dtype=ARRAYS[entry.dtype]).reshape(entry.shape)


def write(
    path: Path, arrays: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a small file atomically. Arrays have the dtypes in ARRAYS."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    dtypes = {np.dtype(numpy_name): name for name, numpy_name in ARRAYS.items()}
    parts: list[bytes] = []
    at = 0
    for name, array in arrays.items():
        parts.append(np.ascontiguousarray(array).tobytes())
        header[name] = {
            "dtype": dtypes[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at + len(parts[-1])],
        }
        at += len(parts[-1])
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers that map the file need aligned tensors
    write_whole(path, b"".join([struct.pack("<Q", len(text)), text, *parts]))


def _header_items(text: bytes, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a header, one at a time.

    `json.loads` of a large header would keep the interpreter for a second, and with it the event
    loop of the process.
    """
    try:
        header = text.decode("utf-8")
        at = _skip(header, 0, "{")
        more = header[at : at + 1] != "}"
        while more:
            name, at = DECODER.raw_decode(header, at)
            if not isinstance(name, str):
                raise ValueError(f"{name!r} is not a name")
            value, at = DECODER.raw_decode(header, _skip(header, at, ":"))
            yield name, value
            at = _skip(header, at)
            more = header[at : at + 1] == ","
            at = _skip(header, at, ",") if more else at
        if _skip(header, at, "}") != len(header):
            raise ValueError("there is more behind the object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the header of {path} is not sound JSON: {error}") from None


def _skip(text: str, at: int, mark: str = "") -> int:
    """Return the position behind `mark` and the white space around it. Raises ValueError."""
    match = re.compile(rf"[ \t\n\r]*{re.escape(mark)}[ \t\n\r]*").match(text, at)
    if match is None:
        raise ValueError(f"expected {mark!r} at character {at}")
    return match.end()


def _metadata(raw: Any, path: Path) -> dict[str, str]:
    if not isinstance(raw, dict) or not all(isinstance(value, str) for value in raw.values()):
        raise CheckpointError(f"__metadata__ in the header of {path} is not a map of strings")
    return raw


def _entry(name: str, raw: Any, base: int, path: Path) -> TensorEntry:
    where = f"tensor {name!r} in the header of {path}"
    if not isinstance(raw, dict) or set(raw) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise CheckpointError(f"{where} has dtype {dtype!r}: expected one of {', '.join(SIZES)}")
    if not _counts(shape):
        raise CheckpointError(f"{where} has shape {shape!r}: expected a list of sizes")
    if not _counts(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where} has data_offsets {offsets!r}: expected [start, end]")
    start, end = offsets
    needed = math.prod(shape) * SIZES[dtype]
    if end - start != needed:
        raise CheckpointError(
            f"{where} has {end - start} bytes, but {dtype} of shape {shape} takes {needed}"
        )
    return TensorEntry(name, dtype, tuple(shape), base + start, base + end)


def _counts(raw: Any) -> bool:
    return isinstance(raw, list) and all(type(value) is int and value >= 0 for value in raw)
