"""Comparison of the weights that an SGLang server computes with to a checkpoint, by checksums.

On a CPU, SGLang's checksum of a parameter is the beginning of the SHA-256 of its bytes. The same
number is computed here from the checkpoint's tensors: fused as SGLang fuses them, in the dtype that
it computes in. Equal checksums show that the parameter holds the checkpoint's values, however small
the last update was, and no matter what the server's response to the update said.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import numpy.typing as npt

from lockstep.checkpoint.digest import combined
from lockstep.checkpoint.open import open_checkpoint
from lockstep.checkpoint.reader import CheckpointReader
from lockstep.checkpoint.tensor_names import DERIVED
from lockstep.checkpoint.tensor_scan import digests
from lockstep.protocol.control.read_back import ReadBack

DIGITS = 16
"""Number of hexadecimal digits of SGLang's checksums."""
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Parameters that SGLang makes of several tensors, by the last part of a module's name."""
PLAIN = (".weight", ".bias")
"""Endings of parameters that have the name of their tensor, unless they are fused."""
PADDED = ("embed_tokens.weight", "lm_head.weight")
ROWS = 64
"""SGLang pads the vocabulary to a multiple of this with rows of zeros."""
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class HeldComparison:
    """Result of a comparison. `digest` identifies the checkpoint; None unless all of it is held."""

    report: ReadBack
    digest: str | None


def compare(directory: Path, dtype: str, checksums: Mapping[str, str]) -> HeldComparison:
    """Compare a server's checksums to a checkpoint. `dtype` is what the server computes in.

    Raises CheckpointError for a directory that cannot be read.
    """
    began = perf_counter()
    reader = open_checkpoint(directory)
    tensors: dict[str, tuple[int, int]] = {}
    unread: dict[str, str] = {}
    for parameter, checksum in checksums.items():
        names = _sources(parameter, reader)
        if missing := [name for name in names if name not in reader.tensors]:
            # The server kept what it held before, and reported success.
            tensors |= dict.fromkeys(missing, (1, 1))
            continue
        if not names:
            unread[parameter] = "no tensor of the checkpoint is known to belong to it"
            continue
        unknown = [name for name in names if (reader.tensors[name].dtype, dtype) not in CONVERSIONS]
        if unknown:
            unread |= {name: _unknown_dtype(reader, name, dtype) for name in names}
            continue
        same = checksum in _possible_checksums(parameter, names, reader, dtype)
        for name in names:
            elements = math.prod(reader.tensors[name].shape)
            tensors[name] = (elements, 0 if same else elements)
    for name in reader.tensors:
        if name not in tensors and name not in unread and not name.endswith(DERIVED):
            unread[name] = "the server has no parameter of that name"
    report = ReadBack(
        tensors, None, unread, seconds=round(perf_counter() - began, 3), whole_tensors=True
    )
    is_held = report.is_complete and not report.different
    return HeldComparison(report, combined(digests(reader)) if is_held else None)


def _sources(parameter: str, reader: CheckpointReader) -> tuple[str, ...]:
    """Return the tensors that make a parameter, also those that the checkpoint lacks; empty where
    they are not known."""
    if parameter in reader.tensors:
        return (parameter,)
    for fused, parts in FUSED.items():
        if f".{fused}." in parameter:
            return tuple(parameter.replace(f".{fused}.", f".{part}.") for part in parts)
    is_plain = parameter.endswith(PLAIN) and parameter.startswith("model.")
    return (parameter,) if is_plain else ()


def _possible_checksums(
    parameter: str, names: tuple[str, ...], reader: CheckpointReader, dtype: str
) -> set[str]:
    """Return the checksum of the tensors one after the other, and with a padded vocabulary."""
    digest = hashlib.sha256()
    for name in names:
        for part in _converted(reader, name, dtype):
            digest.update(part)
    possible = {digest.hexdigest()[:DIGITS]}
    if parameter.endswith(PADDED):
        rows, *rest = reader.tensors[names[0]].shape
        digest.update(bytes((-rows % ROWS) * math.prod(rest) * BYTES[dtype]))
        possible.add(digest.hexdigest()[:DIGITS])
    return possible


def _converted(reader: CheckpointReader, name: str, dtype: str) -> Iterator[bytes | memoryview]:
    convert = CONVERSIONS[reader.tensors[name].dtype, dtype]
    for part in reader.parts(name):
        yield part if convert is None else convert(np.frombuffer(part, dtype=np.uint8)).tobytes()


def _unknown_dtype(reader: CheckpointReader, name: str, dtype: str) -> str:
    return f"{reader.tensors[name].dtype} was converted to {dtype}, which is not repeated here"


def _widened(part: Bytes) -> npt.NDArray[np.uint32]:
    return part.view(np.uint16).astype(np.uint32) << np.uint32(16)


def _rounded(part: Bytes) -> npt.NDArray[np.uint16]:
    """Return float32 as bfloat16, rounded to nearest, ties to even."""
    bits = part.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


CONVERSIONS: Mapping[tuple[str, str], Callable[[Bytes], npt.NDArray[np.generic]] | None] = {
    ("F32", "float32"): None,
    ("BF16", "bfloat16"): None,
    ("F16", "float16"): None,
    ("BF16", "float32"): _widened,
    ("F16", "float32"): lambda part: part.view("<f2").astype("<f4"),
    ("F32", "bfloat16"): _rounded,
    ("F32", "float16"): lambda part: part.view("<f4").astype("<f2"),
}
"""How a tensor's bytes become those of a server's dtype; None where they stay as they are."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
