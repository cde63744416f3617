"""Routed experts in responses: every form becomes one value, decoded on use."""

from __future__ import annotations

import ast
import binascii
from typing import Any

import msgspec
import numpy as np

from lockstep.protocol.json.base64_extract import Base64Text, ExtractedBody
from lockstep.tokens import RoutedExperts
from lockstep.tokens.errors import BadExperts
from lockstep.tokens.experts import Buffer, check_size

NPY_MAGIC = b"\x93NUMPY"
NPY_HEADER_LIMIT = 64 * 1024


class ExpertsObject(msgspec.Struct, gc=False):
    """The object form {data, shape, dtype, start} of Dynamo, prime-rl's server and Lockstep."""

    data: str
    shape: list[int]
    dtype: str
    start: int = 0


ExpertsField = ExpertsObject | str | None


class EncodedExperts(RoutedExperts):
    """Routed experts whose bytes are still base64, as received; `data` decodes them once.

    `skip` counts decoded bytes before the first row (an .npy header, or trimmed rows). The size is
    checked on construction; invalid base64 raises BadExperts on first use.
    """

    __slots__ = ("_raw", "_skip", "_text")
    _text: Base64Text | None
    _raw: Buffer | None
    _skip: int

    def __init__(
        self,
        text: Base64Text,
        shape: tuple[int, int, int],
        dtype: str,
        start: int = 0,
        *,
        skip: int = 0,
    ) -> None:
        put = object.__setattr__
        put(self, "_text", text)
        put(self, "_raw", None)
        put(self, "_skip", skip)
        put(self, "shape", shape)
        put(self, "dtype", dtype)
        put(self, "start", start)
        check_size(decoded_size(text), shape, dtype, start, skip=skip)

    @property
    def data(self) -> Buffer:
        if self._raw is None:
            raw = memoryview(decode_base64(self._text.whole() if self._text else b""))[self._skip :]
            object.__setattr__(self, "_raw", raw)
            object.__setattr__(self, "_text", None)  # releases the response's body
        return self._raw or b""

    def from_row(self, start: int) -> RoutedExperts:
        if self._text is None or not self.start <= start <= self.start + self.rows:
            return RoutedExperts(self.data, self.shape, self.dtype, self.start).from_row(start)
        dropped = start - self.start
        row_bytes = self.shape[1] * self.shape[2] * np.dtype(self.dtype).itemsize
        shape = (self.rows - dropped, self.shape[1], self.shape[2])
        skip = self._skip + dropped * row_bytes
        return EncodedExperts(self._text, shape, self.dtype, start, skip=skip)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoutedExperts):
            return NotImplemented
        mine, theirs = memoryview(self.data).cast("B"), memoryview(other.data).cast("B")
        form = (self.shape, self.dtype, self.start)
        return form == (other.shape, other.dtype, other.start) and mine == theirs

    __hash__ = RoutedExperts.__hash__

    def __repr__(self) -> str:
        return f"EncodedExperts(shape={self.shape}, dtype={self.dtype!r}, start={self.start})"

    def __reduce__(self) -> tuple[Any, ...]:
        return RoutedExperts, (bytes(self.data), self.shape, self.dtype, self.start)


def read_experts(
    field: ExpertsField, extracted: ExtractedBody, *, total: int, first_row: int | None
) -> RoutedExperts | None:
    """Return the experts of a sequence of `total` tokens, from `first_row` on (None: all rows).

    Raises BadExperts if they were requested and are missing, if there are too few or too many rows,
    or if shape, dtype and size do not match.
    """
    if field is None:
        if first_row is not None:
            raise BadExperts(
                "routed experts were requested, but the response has none: the server must be "
                "started with its option to return them"
            )
        return None
    if isinstance(field, str):
        experts = from_npy(extracted.text(field), total=total, first_row=first_row)
    else:
        shape = three(field.shape)
        experts = EncodedExperts(extracted.text(field.data), shape, field.dtype, field.start)
    return trim(experts, total=total, first_row=first_row)


def from_npy(text: Base64Text, *, total: int, first_row: int | None) -> RoutedExperts:
    """Decode vLLM's base64 of an .npy file. Its start follows from the number of rows."""
    head = decode_base64(text.start(4 * ((NPY_HEADER_LIMIT + 12) // 3)), prefix=True)
    if head[:6] != NPY_MAGIC:
        raise BadExperts("routed experts are a string, but not the base64 of an .npy file")
    width = 2 if head[6] == 1 else 4
    size = int.from_bytes(head[8 : 8 + width], "little")
    skip = 8 + width + size
    try:
        header = ast.literal_eval(head[8 + width : skip].decode("latin-1").strip())
        shape = three(header["shape"])
        dtype = np.dtype(header["descr"])
        columns = bool(header["fortran_order"])
    except (ValueError, SyntaxError, KeyError, TypeError) as error:
        raise BadExperts(f"the .npy header of the routed experts is broken: {error}") from None
    if columns or dtype.byteorder == ">":
        raise BadExperts(
            "routed experts are not a little-endian array in C order: "
            f"fortran_order={columns}, descr={header['descr']!r}"
        )
    trimmed = first_row is not None and shape[0] == max(total - 1 - first_row, 0)
    start = first_row if trimmed and first_row is not None else 0
    return EncodedExperts(text, shape, dtype.name, start, skip=skip)


def trim(experts: RoutedExperts, *, total: int, first_row: int | None) -> RoutedExperts:
    """Check the rows, and drop those before `first_row` that the server has not dropped."""
    experts.check_covers(total)
    return (
        experts if first_row is None or first_row == experts.start else experts.from_row(first_row)
    )


def three(shape: Any) -> tuple[int, int, int]:
    """Return the shape as three sizes. Raises BadExperts for another number of dimensions."""
    if len(shape) != 3:
        raise BadExperts(f"routed experts have shape {tuple(shape)}, expected (rows, layers, k)")
    return int(shape[0]), int(shape[1]), int(shape[2])


def decoded_size(text: Base64Text) -> int:
    """Return the number of bytes encoded in base64. Raises BadExperts for an impossible length."""
    if len(text) % 4:
        raise BadExperts(f"routed experts are {len(text)} base64 characters, no multiple of 4")
    return len(text) // 4 * 3 - text.end(2).count(b"=")


def decode_base64(text: Buffer, *, prefix: bool = False) -> bytes:
    """Decode base64. Raises BadExperts for invalid characters."""
    try:
        return binascii.a2b_base64(text, strict_mode=not prefix)
    except binascii.Error as error:
        raise BadExperts(f"routed experts are not base64: {error}") from None
