"""Request bodies: read within limits, and decoded off the event loop where that takes long."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.requests import Request

from lockstep.http.off_loop import (
    LIGHT_BODY_BYTES,
    LIGHT_BODY_VALUES,
    SMALL_BODY_BYTES,
    off_loop,
)
from lockstep.protocol.json.limits import RequestLimits, check_shape, rough_values
from lockstep.tokens.errors import BadRequest, TooLarge

T = TypeVar("T")
JSON = "application/json"
SIZE = "body_bytes"
"""Where a request's state holds the size of its body."""


class ClientGone(Exception):
    """The client closed the connection before its response was ready."""


async def read_json(request: Request, limit: int) -> bytes:
    """The raw body, which may be empty.

    Raises BadRequest unless it is declared as JSON, TooLarge past `limit`, and ClientGone when the
    client leaves before its end.
    """
    return b"".join(await read_pieces(request, limit))


async def read_body(request: Request, decode: Callable[[bytes], T], limits: RequestLimits) -> T:
    """What `decode` makes of the body, which is refused before that if it holds too much.

    Raises as `read_json` and `decode`, and BadRequest for a decoded body past a limit.
    """
    pieces = await read_pieces(request, limits.body_bytes)
    size = sum(map(len, pieces))
    request.scope.setdefault("state", {})[SIZE] = size
    if size <= SMALL_BODY_BYTES or (
        size <= LIGHT_BODY_BYTES and _rough(pieces) <= LIGHT_BODY_VALUES
    ):
        return _decoded(pieces, decode, limits)
    return await off_loop(True, _checked, pieces, decode, limits)


async def read_pieces(
    request: Request, limit: int, kinds: tuple[str, ...] = (JSON,)
) -> list[bytes]:
    """The body as it came. Raises as `read_json`; `kinds` are the content types that are taken."""
    kind = request.headers.get("content-type")
    if kind is not None:
        _check_kind(kind, kinds)
    pieces: list[bytes] = []
    size, more = 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece, more = message.get("body", b""), message.get("more_body", False)
        size += len(piece)
        if size and kind is None:
            # A web page may send such a body to any server, without being asked who it is.
            raise BadRequest(
                f"the body has no content-type: send {' or '.join(kinds)}", param="content-type"
            )
        if size > limit:
            raise TooLarge(f"the body is larger than the limit of {limit} bytes")
        pieces.append(piece)
    return pieces


def body_bytes(request: Request) -> int:
    """The size of the body that `read_body` decoded, as it came."""
    size: int = request.scope["state"][SIZE]
    return size


def _check_kind(header: str, kinds: tuple[str, ...]) -> None:
    kind = header.partition(";")[0].strip().lower()
    if kind not in kinds:
        raise BadRequest(
            f"content-type is {kind[:100]!r}: only {' and '.join(kinds)} is read here",
            param="content-type",
        )


def _rough(pieces: list[bytes]) -> int:
    return sum(map(rough_values, pieces))


def _checked(pieces: list[bytes], decode: Callable[[bytes], T], limits: RequestLimits) -> T:
    commas = sum(piece.count(b",") for piece in pieces)
    if commas > limits.items or _rough(pieces) > limits.values:
        check_shape(pieces, limits)
    return _decoded(pieces, decode, limits)


def _decoded(pieces: list[bytes], decode: Callable[[bytes], T], limits: RequestLimits) -> T:
    value = decode(pieces[0] if len(pieces) == 1 else b"".join(pieces))
    if isinstance(value, msgspec.Struct):
        limits.check(value)
    return value
