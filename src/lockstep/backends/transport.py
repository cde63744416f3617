"""The data side of a backend: send token ids with how to sample, get completions."""

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
"""Deltas as they come, then the completions."""


class Relay(Protocol):
    """Forwards request bodies as bytes to a server that speaks the gateway's own dialect."""

    async def forward(self, raw: bytes, request: GenerateRequest) -> tuple[bytearray, Reading]:
        """The response as it came, and what is needed to check it; `request` is what `raw` says."""
        ...

    def forward_events(
        self, raw: bytes, request: GenerateRequest
    ) -> AsyncGenerator[list[bytes], None]:
        """`forward` for a streamed response: the data of its events, in batches as they came."""
        ...


class Transport(Protocol):
    """Talks to one server in its dialect. Every method raises LockstepError, nothing of HTTP."""

    @property
    def name(self) -> TransportName: ...

    @property
    def base_url(self) -> str: ...

    @property
    def relay(self) -> Relay | None:
        """How /inference/v1/generate bodies are forwarded unchanged; None where they are not.

        It is known once `models` has told what kind of server this is.
        """
        ...

    @property
    def aborts_by_id(self) -> bool:
        """Whether `abort` reaches the server: some have no route for it."""
        ...

    @property
    def gives_choices(self) -> bool:
        """Whether n choices are one request to the server; where not, they are n requests."""
        ...

    async def generate(self, request: GenerateRequest) -> list[Completion]:
        """The n completions in order of their index. Cancelling it stops the server's work."""
        ...

    def stream(self, request: GenerateRequest) -> CompletionStream:
        """Deltas as they come, then the n completions, equal to those `generate` would give.

        Closing the iterator early closes the connection, so that the server stops.
        """
        ...

    async def models(self) -> list[ModelCard]:
        """What the server lists now, fetched anew."""
        ...

    async def abort(self, *request_ids: str) -> int | None:
        """Has the server end those requests; how many it stopped, or None if it does not tell."""
        ...

    async def close(self) -> None:
        """Closes the connections. The transport cannot be used after."""
        ...
