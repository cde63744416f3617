"""The data side of a backend: send token ids with sampling options, receive completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from lockstep.backends.registry import TransportName
from lockstep.protocol.common.model_card import ModelCard
from lockstep.protocol.common.request import GenerateRequest
from lockstep.protocol.common.response import Reading, StreamDelta
from lockstep.tokens import Completion

__all__ = [
    "CompletionStream",
    "GenerateRequest",
    "ModelCard",
    "Relay",
    "StreamDelta",
    "Transport",
    "TransportName",
]

CompletionStream = AsyncGenerator[StreamDelta | Completion, None]
"""Deltas in the order they arrive, then the completions."""


class Relay(Protocol):
    """Forwards request bodies as bytes to a server that speaks the gateway's own dialect."""

    async def forward(self, raw: bytes, request: GenerateRequest) -> tuple[bytearray, Reading]:
        """Return the response as received, and what is needed to check it. `request` is `raw`
        decoded."""
        ...

    def forward_events(
        self, raw: bytes, request: GenerateRequest
    ) -> AsyncGenerator[list[bytes], None]:
        """Yield the data of a streamed response's events, in batches as they arrive."""
        ...


class Transport(Protocol):
    """Requests to one server in its dialect. Every method raises LockstepError, and no HTTP
    error."""

    @property
    def name(self) -> TransportName: ...

    @property
    def base_url(self) -> str: ...

    @property
    def relay(self) -> Relay | None:
        """Forwarder of unchanged /inference/v1/generate bodies; None where they must be encoded
        anew.

        It is known once `models` has detected what kind of server this is.
        """
        ...

    @property
    def aborts_by_id(self) -> bool:
        """Whether `abort` reaches the server: some have no route for it."""
        ...

    @property
    def gives_choices(self) -> bool:
        """Whether n choices are one request to the server. Where not, they are n requests."""
        ...

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """Return the n completions in order of their index. Cancelling it stops the server's
        work."""
        ...

    def stream(self, request: GenerateRequest) -> CompletionStream:
        """Yield deltas as they arrive, then the n completions, equal to those of `generate`.
        Closing the iterator early closes the connection, so that the server stops."""
        ...

    async def models(self) -> list[ModelCard]:
        """Return the models that the server lists now."""
        ...

    async def abort(self, *request_ids: str) -> int | None:
        """Abort requests by id; return how many the server stopped, or None if it does not report
        it."""
        ...

    async def close(self) -> None:
        """Close the connections. The transport cannot be used afterwards."""
        ...
