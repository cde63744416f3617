"""The wire format of protobuf: fields in, fields out, for the few messages that the API has."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from lockstep.tokens.errors import BadRequest

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MOST_BITS = 64
MASK = 0xFFFF_FFFF_FFFF_FFFF


class MessageReader:
    """Reads the fields of one message in the order in which they lie.

    Every error is a BadRequest that says which message was cut short or is none.
    """

    def __init__(self, body: bytes | memoryview, name: str) -> None:
        self._body = memoryview(body)
        self._at = 0
        self._name = name

    def fields(self) -> Iterator[tuple[int, int | bytes]]:
        """Number and value of each field: an integer, or the bytes of everything else."""
        while self._at < len(self._body):
            tag = self._varint()
            number, kind = tag >> 3, tag & 7
            if kind == VARINT:
                yield number, self._varint()
            elif kind == BYTES:
                yield number, self._take(self._varint())
            elif kind in (FIXED64, FIXED32):
                yield number, self._take(8 if kind == FIXED64 else 4)
            else:
                raise self._bad(f"field {number} has wire type {kind}")

    def numbers(self) -> Iterator[int]:
        """The numbers of a packed list, which have no tags."""
        while self._at < len(self._body):
            yield self._varint()

    def _varint(self) -> int:
        value = shift = 0
        while shift < MOST_BITS:
            if self._at >= len(self._body):
                raise self._bad("it ends within a number")
            byte: int = self._body[self._at]
            self._at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & MASK
            shift += 7
        raise self._bad("a number has more than 64 bits")

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._body):
            raise self._bad(f"a field of {size} bytes goes beyond its end")
        taken = bytes(self._body[self._at : end])
        self._at = end
        return taken

    def _bad(self, why: str) -> BadRequest:
        return BadRequest(f"the body is not a {self._name} message: {why}", param="body")


def as_bytes(value: int | bytes, field: str) -> bytes:
    """The bytes of a field. Raises BadRequest for a number."""
    if isinstance(value, int):
        raise BadRequest(f"{field} is a number: expected bytes", param=field)
    return value


def as_int(value: int | bytes, field: str) -> int:
    """The number of a field, with its sign. Raises BadRequest for bytes."""
    if not isinstance(value, int):
        raise BadRequest(f"{field} is bytes: expected a number", param=field)
    return value - (MASK + 1) if value > MASK >> 1 else value


def as_text(value: int | bytes, field: str) -> str:
    """The text of a field. Raises BadRequest for what is no UTF-8."""
    try:
        return as_bytes(value, field).decode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"{field} is not UTF-8: {error}", param=field) from None


def as_double(value: int | bytes, field: str) -> float:
    """The number of a field of eight bytes. Raises BadRequest for anything else."""
    raw = as_bytes(value, field)
    if len(raw) != 8:
        raise BadRequest(f"{field} has {len(raw)} bytes: expected a double", param=field)
    number: float = struct.unpack("<d", raw)[0]
    return number


def as_ints(value: int | bytes, field: str) -> list[int]:
    """The numbers of a repeated field, one of them or all packed."""
    if isinstance(value, int):
        return [as_int(value, field)]
    return [as_int(number, field) for number in MessageReader(value, field).numbers()]


def write_varint(number: int) -> bytes:
    """A number as protobuf writes it."""
    number &= MASK
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def write_bytes(field: int, value: bytes | str) -> bytes:
    """A field of bytes, of text, or of a message that is written already."""
    raw = value.encode() if isinstance(value, str) else value
    return write_varint(field << 3 | BYTES) + write_varint(len(raw)) + raw


def write_int(field: int, value: int) -> bytes:
    """A field of a number; 0 is left out, as proto3 has it."""
    return write_varint(field << 3) + write_varint(value) if value else b""


def write_double(field: int, value: float) -> bytes:
    """A field of a double, 0 too: map entries always have their value."""
    return write_varint(field << 3 | FIXED64) + struct.pack("<d", value)


def write_ints(field: int, values: list[int] | tuple[int, ...]) -> bytes:
    """A packed field of numbers; nothing where there are none."""
    packed = b"".join(map(write_varint, values))
    return write_bytes(field, packed) if packed else b""
