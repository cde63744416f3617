"""Requests as handlers use them: indexed headers, bodies within limits, clients that may
disconnect.

Starlette scans all headers for every name, and raises an error for a missing one. An agent's
request has about twenty headers, and a dozen names are looked up in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar, overload

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from lockstep.http.off_loop import (
    HUGE_BODY_ITEMS,
    LIGHT_BODY_BYTES,
    LIGHT_BODY_VALUES,
    SMALL_BODY_BYTES,
    off_loop,
    paced,
)
from lockstep.protocol.json.strict import RequestLimits, check_shape, rough_values
from lockstep.tokens.errors import BadRequest, TooLarge

T = TypeVar("T")
JSON = "application/json"
SIZE = "body_bytes"
"""Key in the state of a request under which the size of its body is stored."""


GONE = "lockstep.gone"
"""Extension in the scope that registers a callback for a disconnected client; None removes it."""


class ClientGone(Exception):
    """The client closed the connection before its response was ready."""


class IndexedHeaders(Headers):
    """Starlette's headers with an index. The first of several headers of one name counts, as
    there.
    """

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope=scope)
        self._index: dict[bytes, bytes] = dict(reversed(self._list))

    def __getitem__(self, key: str) -> str:
        value = self.get(key)
        if value is None:
            raise KeyError(key)
        return value

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.get(key) is not None

    @overload
    def get(self, key: str, default: None = None, /) -> str | None: ...
    @overload
    def get(self, key: str, default: str | T, /) -> str | T: ...
    def get(self, key: str, default: str | T | None = None, /) -> str | T | None:
        value = self._index.get(key.lower().encode("latin-1"))
        return default if value is None else value.decode("latin-1")


class IndexedRequest(Request):
    """Starlette's request with indexed headers."""

    @property
    def headers(self) -> Headers:
        if not hasattr(self, "_headers"):
            self._headers = IndexedHeaders(self.scope)
        return self._headers


class Presence:
    """Whether the client of one request is connected, and the callback for when it disconnects."""

    __slots__ = ("_call", "_gone")

    def __init__(self) -> None:
        self._gone = False
        self._call: Callable[[], object] | None = None

    def when_gone(self, call: Callable[[], object] | None) -> None:
        """Call `call` when the client disconnects, or now if it has."""
        self._call = call
        if self._gone and call is not None:
            call()

    def leave(self) -> None:
        self._gone = True
        if self._call is not None:
            self._call()


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`, which is cancelled when the client disconnects (raises
    ClientGone).
    """
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("a request must be handled in a task")
    left = False

    def leave() -> None:
        nonlocal left
        left = task.cancel()

    when_gone = request.scope["extensions"][GONE]
    when_gone(leave)
    try:
        return await work
    except asyncio.CancelledError:
        # As in asyncio.timeout: only if no other code cancelled this task too.
        if left and task.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        when_gone(None)


async def read_json(request: Request, limit: int) -> bytes:
    """Return the raw body, which may be empty.

    Raises BadRequest unless it is declared as JSON, TooLarge past `limit`, and ClientGone when the
    client disconnects before its end.
    """
    return b"".join(await read_pieces(request, limit))


async def read_body(request: Request, decode: Callable[[bytes], T], limits: RequestLimits) -> T:
    """Return the decoded body. A body that exceeds a limit is rejected before decoding.

    Raises as `read_json` and `decode`, and BadRequest for a decoded body past a limit.
    """
    pieces = await read_pieces(request, limits.body_bytes)
    size = sum(map(len, pieces))
    request.scope.setdefault("state", {})[SIZE] = size
    if size <= SMALL_BODY_BYTES or (
        size <= LIGHT_BODY_BYTES and _rough(pieces) <= LIGHT_BODY_VALUES
    ):
        return _decoded(pieces, decode, limits)
    items = sum(piece.count(b",") for piece in pieces)
    if items > HUGE_BODY_ITEMS:
        return await paced(_checked, pieces, decode, limits, items)
    return await off_loop(True, _checked, pieces, decode, limits, items)


async def read_pieces(
    request: Request, limit: int, kinds: tuple[str, ...] = (JSON,)
) -> list[bytes]:
    """Return the body in the pieces that arrived. Raises as `read_json`; `kinds` are the accepted
    content types.
    """
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
            # A web page may send a body of such a type to any server without a CORS preflight.
            raise BadRequest(
                f"the body has no content-type: send {' or '.join(kinds)}", param="content-type"
            )
        if size > limit:
            raise TooLarge(f"the body is larger than the limit of {limit} bytes")
        pieces.append(piece)
    return pieces


def body_bytes(request: Request) -> int:
    """Return the size of the body that `read_body` decoded, as it arrived."""
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


def _checked(
    pieces: list[bytes], decode: Callable[[bytes], T], limits: RequestLimits, items: int
) -> T:
    body = b"".join(pieces)
    limits.check_id_lists(body, items)
    if items > limits.items or _rough(pieces) > limits.values:
        check_shape(pieces, limits)
    return _decoded([body], decode, limits)


def _decoded(pieces: list[bytes], decode: Callable[[bytes], T], limits: RequestLimits) -> T:
    value = decode(pieces[0] if len(pieces) == 1 else b"".join(pieces))
    if isinstance(value, msgspec.Struct):
        limits.check(value)
    return value
